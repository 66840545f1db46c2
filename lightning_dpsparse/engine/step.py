"""The private step, on a page: for every mechanism, everything that happens to a batch.

Every rank holds the rows that it owns, and a local batch. Before the calls below, the forward pass
has run: at every lookup the mechanism's state was called before and after the read (state.py), the
lookups ended in detached leaves, and every dense call was recorded. What remains is `clipped_sums`,
once for every part of the batch that fits in memory, and one `release`. The form of a dense weight
decides what is released of it, in norms, sums and noise alike (dense.py). By default this is the
gradient itself.

Gradients of dense layers may be taken in another unit than those of tables: divided by a public
`dense_scale` when they are clipped, and multiplied by it once they have their noise. They then take
less of an example's norm and get more noise, in one Gaussian query all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dpsparse.engine.clipping import Clipping
from lightning_dpsparse.engine.ghost import DenseCapture
from lightning_dpsparse.engine.lookups import Lookup
from lightning_dpsparse.engine.mechanism import BatchReads, Mechanism, RowChoice, WholeBatch
from lightning_dpsparse.engine.norms import square_norms
from lightning_dpsparse.engine.precision import whole_products
from lightning_dpsparse.engine.rounding import room_left
from lightning_dpsparse.engine.rows import RowGradient, clipped_row_gradients
from lightning_dpsparse.engine.state import MechanismState, StepNoise, TableKernel
from lightning_dpsparse.engine.step_inputs import Ranks, Read, add_up, renumber, take
from lightning_dpsparse.noise.grid import grid_of, round_to_
from lightning_dpsparse.noise.sources import NoiseSource

# B examples of all ranks, n examples of this rank, K groups of parameters, E width of a kernel
# A unit is what is clipped as one: an example, or all examples of a user, which lie side by side.


@dataclass(frozen=True)
class StepConfig:
    """What a step needs to know of the plan. It does not change during a run."""

    mechanism: Mechanism
    clipping: Clipping
    clip_norm: float
    noise_multiplier: float
    expected_batch: float
    noise: NoiseSource
    diagnose: bool = False
    """Whether to count the units that are clipped. These counts are not private."""
    dense_scale: float = 1.0
    """What gradients of dense layers are divided by before everything, and multiplied by after."""

    def open(self, kernels: Sequence[TableKernel]) -> MechanismState:
        """Open the mechanism's state for a run on these kernels."""
        noise = StepNoise(self.noise, self.noise_stddev, self.dense_scale)
        return self.mechanism.open(kernels, noise)

    @property
    def noise_stddev(self) -> float:
        """Standard deviation of the noise on the mean gradient of tables: sigma C / (q N)."""
        if self.noise_multiplier == 0:
            return 0.0  # the clip norm may be infinite
        sigma = self.mechanism.gradient_noise(self.noise_multiplier)
        return sigma * self.clip_norm / self.expected_batch

    def bounds(self, numbers_B: Tensor) -> float | Tensor:
        """Compute the norm that every unit's gradient is clipped to.

        It is C, less what rounding may add if the unit touches `numbers_B` numbers.
        """
        stddev = self.noise_stddev
        if stddev == 0:
            return self.clip_norm
        sensitivity = self.clip_norm / self.expected_batch
        return room_left(stddev, sensitivity, self.expected_batch, numbers_B).mul_(self.clip_norm)


@dataclass(frozen=True)
class Clipped:
    """Clipped sums over the expected batch, without noise. They are secret."""

    tables: list[list[RowGradient]]
    """The sums on the rows that take part, for every read and each of its stacks of tables."""
    dense: Tensor
    """The sums of all dense parameters end to end, each in its form and divided by the dense scale,
    over this rank's examples."""
    units_clipped: Tensor | None = None
    """Number of units that were clipped, and of all units; None unless the config asks for it."""
    word: float = 0.0
    """The sum of the words that all ranks sent along with their norms (`Ranks.word`)."""

    def __add__(self, other: Clipped) -> Clipped:
        """Add the sums of two parts of a batch."""
        tables = [
            [one + two for one, two in zip(mine, theirs)]
            for mine, theirs in zip(self.tables, other.tables)
        ]
        counts = None
        if self.units_clipped is not None and other.units_clipped is not None:
            counts = self.units_clipped + other.units_clipped
        return Clipped(tables, self.dense + other.dense, counts, self.word + other.word)


def clipped_sums(
    loss_n: Tensor,
    reads: Sequence[Read],
    dense: DenseCapture,
    config: StepConfig,
    state: MechanismState,
    ranks: Ranks,
    step: int,
    first_of_unit_B: Tensor | None = None,
    out: Tensor | None = None,
    whole_batch: WholeBatch | None = None,
) -> Clipped:
    """Compute (1 / expected batch) * sum_b f_b g_b for every parameter.

    The factor f_b comes from the norm of b's unit.
    `first_of_unit_B` is the first example of every example's unit; None if units are examples.
    `out` is memory for the dense part; None if it is still to be allocated.
    `whole_batch` is the batch that these examples are a part of; None if they are all of it.

    Guarantees: adding or removing one unit moves the result, over all tables, ranks and dense
    layers (these divided by the dense scale) together, by at most clip_norm / expected_batch in
    norm. The divisor is a constant of the run, never the number of units drawn.
    """
    # 1. One backward pass leaves a gradient at every lookup and at every dense call. What follows
    #    is computed in all bits of float32, whatever precision the model itself uses.
    loss_n.sum().backward()
    dense.check_nothing_escaped()
    with whole_products():
        return _clip_and_add(
            loss_n, reads, dense, config, state, ranks, step, first_of_unit_B, out, whole_batch
        )


def _clip_and_add(
    loss_n: Tensor,
    reads: Sequence[Read],
    dense: DenseCapture,
    config: StepConfig,
    state: MechanismState,
    ranks: Ranks,
    step: int,
    first_of_unit_B: Tensor | None,
    out: Tensor | None,
    whole_batch: WholeBatch | None,
) -> Clipped:
    mine = slice(ranks.first_example, ranks.first_example + loss_n.numel())
    lookups = [read.lookup() for read in reads]

    # 2. The mechanism chooses the rows that take part. An example's gradient on other rows counts
    #    neither in its norm nor in the sum.
    batch = BatchReads(
        reads,
        lookups,
        first_of_unit_B,
        ranks,
        config.noise,
        config.noise_multiplier,
        config.expected_batch,
        step,
        loss_n.device,
        whole_batch,
    )
    choices = state.choose_rows(batch)

    # 3. Squared norms add up over tables, shards and layers: each rank fills in what it can see of
    #    every unit, and one all-reduce tells every rank every unit's norm. The same all-reduce adds
    #    up the counts of numbers that each unit touches.
    group = _groups(reads, dense, config.clipping)
    totals = loss_n.new_zeros(config.clipping.num_groups + 1, ranks.num_examples + 1)
    squares_KB, touched_B, word = totals[:-1, :-1], totals[-1, :-1], totals[-1, -1]
    word.fill_(ranks.word)
    for read, lookup, choice in zip(reads, lookups, choices):
        first_of_unit = renumber(first_of_unit_B, read.order_B)
        kept = None if choice is None else choice.kept
        add_up(touched_B, lookup.bags.numbers_B, read.order_B)
        for k, squares_B in enumerate(squares_KB):
            tables = [t for t, name in enumerate(read.table_names) if group[name] == k]
            if tables:
                squares = square_norms(lookup, kept, tables=tables, first_of_unit_B=first_of_unit)
                add_up(squares_B, squares, read.order_B)
    first_of_unit_n = (
        None if first_of_unit_B is None else first_of_unit_B[mine] - ranks.first_example
    )
    mine_Kn = [squares_B[mine] for squares_B in squares_KB]
    for name, squares_n in dense.square_norms(loss_n.numel(), first_of_unit_n):
        mine_Kn[group[name]].add_(squares_n, alpha=config.dense_scale**-2)
    ranks.sum(totals)

    # 4. All examples of a unit get the same factor. A unit that overflowed anywhere counts nowhere.
    if first_of_unit_B is not None:
        squares_KB = squares_KB[:, first_of_unit_B]
        touched_B = torch.zeros_like(touched_B).index_add_(0, first_of_unit_B, touched_B)[
            first_of_unit_B
        ]
    good_B = squares_KB.isfinite().all(0)
    # The CPU waits for the device once, for both of these numbers.
    all_good, heard = torch.stack([good_B.all().to(word.dtype), word]).tolist()
    factors_KB = config.clipping.factors(squares_KB, config.bounds(touched_B + dense.size))
    counts = _count(squares_KB, factors_KB, first_of_unit_B) if config.diagnose else None
    factors_KB.div_(config.expected_batch)
    if not all_good:  # zero times infinity is not zero
        bad_B = ~good_B
        factors_KB.masked_fill_(bad_B, 0.0)
        lookups = [x.without(take(bad_B, read.order_B)) for read, x in zip(reads, lookups)]
        dense.drop_examples(bad_B[mine])

    # 5. Clipped sums are made on this rank's rows, for all examples, and on dense layers, for this
    #    rank's examples.
    sums_of_tables = [
        _sums_of_rows(
            lookup,
            take(factors_KB, read.order_B),
            [group[name] for name in read.table_names],
            choice,
        )
        for read, lookup, choice in zip(reads, lookups, choices)
    ]
    factors_Kn = [f_B[mine] / config.dense_scale for f_B in factors_KB]
    flat = dense.new_flat() if out is None else out
    for name, piece in dense.pieces(flat).items():
        dense.clipped_sum(name, factors_Kn[group[name]], out=piece)
    return Clipped(sums_of_tables, flat, counts, heard)


def release(
    clipped: Clipped,
    reads: Sequence[Read],
    dense: DenseCapture,
    state: MechanismState,
    ranks: Ranks,
    step: int,
) -> None:
    """Add noise, update the tables, and leave the dense gradients in `.grad`.

    g~ = clipped sum + N(0, (sigma C / expected batch)^2), both rounded to one public grid;
    dense layers were clipped as g / s, and get s g~

    Guarantees: no optimizer sees anything but g~, and each row and parameter sees it once.
    """
    # 6. Dense layers are added up over ranks. Then every rank adds the same noise.
    if clipped.dense.numel():
        ranks.sum(clipped.dense)
    state.add_dense_noise_(clipped.dense, step)
    if state.noise.dense_scale != 1:
        clipped.dense.mul_(state.noise.dense_scale)
    for parameter, released in dense.gradients(clipped.dense):
        parameter.grad = released

    # 7. Each rank updates its own rows. The mechanism's state says which rows move, and with what
    #    noise.
    for read, sums in zip(reads, clipped.tables):
        if state.noise.stddev:
            for gradient in sums:
                round_to_(gradient.values_UD, grid_of(state.noise.stddev))
        for update in read.state.updates(sums, step):
            read.state.apply(update)


def _groups(reads: Sequence[Read], dense: DenseCapture, clipping: Clipping) -> dict[str, int]:
    names = [*(name for read in reads for name in read.table_names), *dense.parameters]
    return dict(zip(names, clipping.groups_of(names)))


def _sums_of_rows(
    lookup: Lookup, factors_KB: Tensor, group_of_table: list[int], choice: RowChoice | None
) -> list[RowGradient]:
    """Compute clipped sums on the rows that take part. On rows that nobody read they are zero."""
    if choice is None:
        return clipped_row_gradients(lookup, factors_KB, group_of_table)
    sums = clipped_row_gradients(lookup, factors_KB, group_of_table, choice.kept)
    unread = lookup.layout.by_stack(choice.unread_rows_V)
    return [gradient.with_rows(rows) for gradient, rows in zip(sums, unread)]


def _count(squares_KB: Tensor, factors_KB: Tensor, first_of_unit_B: Tensor | None) -> Tensor:
    """Count the units that were clipped, and the units that have a gradient at all."""
    is_unit_B = (squares_KB > torch.finfo(squares_KB.dtype).tiny).any(0)
    if first_of_unit_B is not None:
        is_unit_B &= first_of_unit_B == torch.arange(
            first_of_unit_B.numel(), device=first_of_unit_B.device
        )
    is_clipped_B = (factors_KB < 1).any(0) & is_unit_B
    return torch.stack([is_clipped_B.sum(), is_unit_B.sum()])

"""The private step, on a page.

Every rank holds the rows that it owns, and a local batch. It has run the forward pass: the tables'
lookups ended in detached leaves, and every dense call was recorded. What remains is `clipped_sums`,
once for every part of the batch that fits in memory, and one `release`. A dense weight's gradient
is what its form makes of it, in norms, sums and noise alike (`dense.py`): by default, itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from lightning_dpsparse.engine.clipping import Clipping
from lightning_dpsparse.engine.draws import StackNoise
from lightning_dpsparse.engine.ghost import DenseCapture
from lightning_dpsparse.engine.lookups import Lookup
from lightning_dpsparse.engine.mechanism import BatchReads, Draw, Mechanism, RowChoice
from lightning_dpsparse.engine.norms import square_norms
from lightning_dpsparse.engine.precision import whole_products
from lightning_dpsparse.engine.rounding import room_left
from lightning_dpsparse.engine.rows import RowGradient, clipped_row_gradients
from lightning_dpsparse.engine.step_inputs import Ranks, Read, add_up, renumber, take
from lightning_dpsparse.noise.grid import grid_of, round_to_
from lightning_dpsparse.noise.keys import Stream
from lightning_dpsparse.noise.sources import NoiseSource

# B examples of all ranks, n examples of this one, K groups of parameters, E width of a kernel
# A unit is what is clipped as one: an example, or all examples of a user, which lie side by side.


@dataclass(frozen=True)
class StepConfig:
    """What a step needs to know of the plan. Constant for a run."""

    mechanism: Mechanism
    clipping: Clipping
    clip_norm: float
    noise_multiplier: float
    expected_batch: float
    noise: NoiseSource
    diagnose: bool = False
    """Count what is clipped. Not private."""

    @property
    def noise_stddev(self) -> float:
        """Of the noise on the mean gradient: sigma C / (q N)."""
        if self.noise_multiplier == 0:
            return 0.0  # also where nothing is clipped
        sigma = self.mechanism.gradient_noise(self.noise_multiplier)
        return sigma * self.clip_norm / self.expected_batch

    def bounds(self, numbers_B: Tensor) -> float | Tensor:
        """What every unit's gradient is clipped to: C, less what rounding may add where the unit
        touches so many numbers."""
        stddev = self.noise_stddev
        if stddev == 0:
            return self.clip_norm
        sensitivity = self.clip_norm / self.expected_batch
        return room_left(stddev, sensitivity, self.expected_batch, numbers_B).mul_(self.clip_norm)


@dataclass(frozen=True)
class Clipped:
    """Clipped sums over the expected batch, without noise. Secret."""

    tables: list[list[RowGradient]]
    """For every read, a gradient on the rows of each of its stacks of tables that take part."""
    dense: Tensor
    """All dense parameters end to end, each in its form; this rank's examples only."""
    units_clipped: Tensor | None = None
    """Units that were clipped, and units in all; where the recipe asks for it."""
    word: float = 0.0
    """What the ranks told each other, added up."""

    def __add__(self, other: Clipped) -> Clipped:
        """The sums of two parts of a batch."""
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
    recipe: StepConfig,
    ranks: Ranks,
    step: int,
    first_of_unit_B: Tensor | None = None,
    out: Tensor | None = None,
) -> Clipped:
    """(1 / expected batch) * sum_b f_b g_b for every parameter, f_b from the norm of b's unit.

    `first_of_unit_B` is the first example of every example's unit; None if units are examples.

    Guarantees: adding or removing one unit moves the result, over all tables, ranks and dense
    layers together, by at most clip_norm / expected_batch in norm. The divisor is a constant of the
    run, never the number of units drawn. `out` is memory for the dense part, if at hand.
    """
    # 1. One backward pass. It leaves a gradient at every lookup and at every dense call. What
    #    follows is done in all bits of float32, whatever the model itself is done in.
    loss_n.sum().backward()
    dense.check_nothing_escaped()
    with whole_products():
        return _clip_and_add(loss_n, reads, dense, recipe, ranks, step, first_of_unit_B, out)


def _clip_and_add(
    loss_n: Tensor,
    reads: Sequence[Read],
    dense: DenseCapture,
    recipe: StepConfig,
    ranks: Ranks,
    step: int,
    first_of_unit_B: Tensor | None,
    out: Tensor | None,
) -> Clipped:
    mine = slice(ranks.first_example, ranks.first_example + loss_n.numel())
    lookups = [read.lookup() for read in reads]

    # 2. The rows that take part. What an example does to others counts neither in norm nor in sum.
    question = BatchReads(
        reads,
        lookups,
        first_of_unit_B,
        ranks,
        recipe.noise,
        recipe.noise_multiplier,
        recipe.expected_batch,
        step,
        loss_n.device,
    )
    found = recipe.mechanism.choose_rows(question)
    answers: Sequence[RowChoice | None] = [None] * len(lookups) if found is None else found

    # 3. Squared norms. They add up over tables, shards and layers: each rank fills in what it can
    #    see of every unit, and one all-reduce tells every rank every unit's norm. So do counts of
    #    the numbers that a unit touches.
    group = _groups(reads, dense, recipe.clipping)
    totals = loss_n.new_zeros(recipe.clipping.num_groups + 1, ranks.num_examples + 1)
    squares_KB, touched_B, word = totals[:-1, :-1], totals[-1, :-1], totals[-1, -1]
    word.fill_(ranks.word)
    for read, lookup, answer in zip(reads, lookups, answers):
        leaders = renumber(first_of_unit_B, read.order_B)
        kept = None if answer is None else answer.kept
        add_up(touched_B, lookup.bags.numbers_B, read.order_B)
        for k, squares_B in enumerate(squares_KB):
            tables = [t for t, name in enumerate(read.table_names) if group[name] == k]
            if tables:
                squares = square_norms(lookup, kept, tables=tables, first_of_unit_B=leaders)
                add_up(squares_B, squares, read.order_B)
    first_of_unit_n = (
        None if first_of_unit_B is None else first_of_unit_B[mine] - ranks.first_example
    )
    mine_Kn = [squares_B[mine] for squares_B in squares_KB]
    for name, squares_n in dense.square_norms(loss_n.numel(), first_of_unit_n):
        mine_Kn[group[name]].add_(squares_n)
    ranks.sum(totals)

    # 4. Factors, the same for all examples of a unit. One that overflowed anywhere counts nowhere.
    if first_of_unit_B is not None:
        squares_KB = squares_KB[:, first_of_unit_B]
        touched_B = torch.zeros_like(touched_B).index_add_(0, first_of_unit_B, touched_B)[
            first_of_unit_B
        ]
    good_B = squares_KB.isfinite().all(0)
    all_good, heard = torch.stack([good_B.all().to(word.dtype), word]).tolist()  # one wait
    factors_KB = recipe.clipping.factors(squares_KB, recipe.bounds(touched_B + dense.size))
    counts = _count(squares_KB, factors_KB, first_of_unit_B) if recipe.diagnose else None
    factors_KB.div_(recipe.expected_batch)
    if not all_good:  # zero times infinity is not zero
        bad_B = ~good_B
        factors_KB.masked_fill_(bad_B, 0.0)
        lookups = [x.without(take(bad_B, read.order_B)) for read, x in zip(reads, lookups)]
        dense.drop_examples(bad_B[mine])

    # 5. Clipped sums: rows where they live, dense layers for this rank's examples.
    sums_of_tables = [
        _sums_of_rows(
            lookup,
            take(factors_KB, read.order_B),
            [group[name] for name in read.table_names],
            answer,
        )
        for read, lookup, answer in zip(reads, lookups, answers)
    ]
    factors_Kn = [f_B[mine] for f_B in factors_KB]
    flat = dense.new_flat() if out is None else out
    for name, piece in dense.pieces(flat).items():
        dense.clipped_sum(name, factors_Kn[group[name]], out=piece)
    return Clipped(sums_of_tables, flat, counts, heard)


def release(
    clipped: Clipped,
    reads: Sequence[Read],
    dense: DenseCapture,
    recipe: StepConfig,
    ranks: Ranks,
    step: int,
) -> None:
    """Add noise, update the tables, and leave the dense gradients in `.grad`.

    g~ = clipped sum + N(0, (sigma C / expected batch)^2), both rounded to one public grid

    Guarantees: no optimizer sees anything but g~, and each row and parameter sees it once.
    """
    # Dense layers: added up over ranks, rounded, plus noise that every rank draws alike.
    flat = clipped.dense
    if flat.numel():
        ranks.sum(flat)
        if recipe.noise_stddev:
            stream = Stream("gradient", "dense layers", step)
            recipe.noise.add_(flat[None], stream, recipe.noise_stddev)
    for parameter, released in dense.gradients(flat):
        parameter.grad = released

    # Tables, where they live: the mechanism says which rows get noise.
    for read, gradients in zip(reads, clipped.tables):
        updates = []
        for stack, gradient in zip(read.layout.stacks, gradients):
            if recipe.noise_stddev:
                round_to_(gradient.values_UD, grid_of(recipe.noise_stddev))
            stream_table = read.layout.stream_table(stack.tables)
            of_stack = StackNoise(
                recipe.noise, stack, read.table_names, read.shard_offsets, stream_table
            )
            draw = _drawing(of_stack, recipe.noise_stddev, step, gradient.values_UD)
            updates.append(recipe.mechanism.updates(gradient, stack.num_rows, draw))
        for parts in zip_longest(*updates):
            read.apply([part or g.empty() for part, g in zip(parts, gradients)])


def _drawing(noise: StackNoise, stddev: float, step: int, like_UD: Tensor) -> Draw:
    """How a mechanism draws this step's noise for rows of one stack."""

    def draw(rows_U: Tensor, part: int) -> Tensor:
        out_UD = like_UD.new_empty(rows_U.numel(), like_UD.shape[1])
        if stddev == 0:
            return out_UD.zero_()
        return noise.fill_(out_UD, "gradient", step, rows_U, part=part, stddev=stddev)

    return draw


def _groups(reads: Sequence[Read], dense: DenseCapture, clipping: Clipping) -> dict[str, int]:
    names = [*(name for read in reads for name in read.table_names), *dense.parameters]
    return dict(zip(names, clipping.groups_of(names)))


def _sums_of_rows(
    lookup: Lookup, factors_KB: Tensor, group_of_table: list[int], answer: RowChoice | None
) -> list[RowGradient]:
    """Clipped sums on the rows that take part; on rows that nobody read they are zero."""
    if answer is None:
        return clipped_row_gradients(lookup, factors_KB, group_of_table)
    sums = clipped_row_gradients(lookup, factors_KB, group_of_table, answer.kept)
    others = lookup.layout.by_stack(answer.unread_rows_V)
    return [gradient.with_rows(rows) for gradient, rows in zip(sums, others)]


def _count(squares_KB: Tensor, factors_KB: Tensor, first_of_unit_B: Tensor | None) -> Tensor:
    """Units that were clipped, and units whose gradient is not zero, to speak of."""
    is_unit_B = (squares_KB > torch.finfo(squares_KB.dtype).tiny).any(0)
    if first_of_unit_B is not None:
        is_unit_B &= first_of_unit_B == torch.arange(
            first_of_unit_B.numel(), device=first_of_unit_B.device
        )
    is_clipped_B = (factors_KB < 1).any(0) & is_unit_B
    return torch.stack([is_clipped_B.sum(), is_unit_B.sum()])

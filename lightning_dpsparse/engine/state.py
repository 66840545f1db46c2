"""What a mechanism keeps while it runs, and when it is called.

A `Mechanism` (mechanism.py) is a frozen description. When training begins it opens a
`MechanismState` on every rank, which owns everything that changes: one `TableState` for every
kernel that holds tables, and the noise of the dense layers. A batch meets a `TableState` in the
order in which its methods stand below:

    before_read    The ids of the batch are known, and their rows were not read yet.
    after_read     The rows were read. What was read may still be corrected.
    updates        The clipped sums are known. They come back with noise, each row once.
    apply          One of these updates reaches the weights.
    pending_work   Something is about to be released: what was put off must be done first.

If weights are averaged (`averaging.py`), the average of a row is brought up to date in `apply`,
before the row moves. Every method has a default, and the defaults together are a mechanism: noise
on the rows that take part in the step, at once. `mechanisms/dpsgd.py` overrides one method,
`mechanisms/lazydp/` most. The step that makes these calls is `step.py`; the reads come from
`sharded/cut.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from lightning_dpsparse.engine.averaging import AverageClock, AverageOfRest, RowAverage
from lightning_dpsparse.engine.draws import StackNoise
from lightning_dpsparse.engine.lookups import Bags, Layout
from lightning_dpsparse.engine.rows import RowGradient
from lightning_dpsparse.noise.keys import Stream
from lightning_dpsparse.noise.sources import NoiseSource
from lightning_dpsparse.refused import Refused

if TYPE_CHECKING:
    from lightning_dpsparse.engine.mechanism import BatchReads, Mechanism, RowChoice

# N numbers of all dense layers, U rows, D width of a table, B examples, E width of a kernel

Progress = Callable[[Sequence[Any]], Iterable[Any]]
"""A wrapper around a sequence of work that shows how far it got."""

Draw = Callable[[Tensor, int], Tensor]
"""draw(rows, part) draws the step's noise for these rows. `part` numbers the calls of a step."""


class Reading(Enum):
    """Why a kernel reads rows."""

    WHOLE_BATCH = "the only read of a private step"
    PART = "one of several reads of a private step, whose batch was cut into parts"
    IDS = "a read of a private step for its ids alone: nothing comes of what was read"
    OUTSIDE = "a read outside private steps, in evaluation for instance"

    @property
    def is_private(self) -> bool:
        """Whether what was read leads to an update."""
        return self in (Reading.WHOLE_BATCH, Reading.PART)


class TableKernel(Protocol):
    """The tables of one kernel on this rank, as a mechanism sees them."""

    @property
    def layout(self) -> Layout: ...
    @property
    def table_names(self) -> Sequence[str]:
        """Path of the weight of each table in the module."""
        ...

    @property
    def shard_offsets(self) -> Sequence[tuple[int, int]]:
        """First row and first column of each table's piece on this rank."""
        ...

    @property
    def has_whole_rows(self) -> bool:
        """Whether no table's columns are spread over several pieces."""
        ...

    @property
    def device(self) -> torch.device: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    def weights(self) -> list[Tensor]:
        """The tables of each stack as one matrix. Writes to it change the tables."""
        ...

    def apply(self, gradients: list[RowGradient]) -> None:
        """Give the fused optimizer a gradient on rows of each stack, in one call."""
        ...

    def writing(self) -> AbstractContextManager[None]:
        """Surrounds writes to `weights()` by the mechanism, which are not somebody else's."""
        ...


@dataclass(frozen=True)
class StepNoise:
    """The noise of every step of a run."""

    source: NoiseSource
    stddev: float
    """Standard deviation of the noise on each number of the mean gradient."""
    dense_scale: float = 1.0
    """What the mean gradient of dense layers, noise included, is multiplied by when it is released:
    it was divided by as much before it was clipped."""

    @property
    def dense_stddev(self) -> float:
        """Standard deviation of the noise on each number of a dense gradient that is released."""
        return self.stddev * self.dense_scale


class TableState:
    """What a mechanism keeps for the tables of one kernel on this rank.

    Guarantees: `apply` is called with what `updates` gave and nothing else, so that whatever is in
    these updates is all that the weights, and through them the user, get to see of a step.
    """

    def __init__(self, kernel: TableKernel, noise: StepNoise) -> None:
        self.kernel, self.noise = kernel, noise
        self.average: RowAverage | None = None
        """The average of the rows, once somebody has asked for one."""
        layout = kernel.layout
        self.draws = [
            StackNoise(
                noise.source,
                stack,
                kernel.table_names,
                kernel.shard_offsets,
                layout.stream_table(stack.tables),
            )
            for stack in layout.stacks
        ]

    def before_read(self, bags: Bags, reading: Reading) -> None:
        """The kernel is about to read the rows of these bags."""

    def after_read(self, bags: Bags, output_BE: Tensor, reading: Reading) -> None:
        """The kernel has read the rows of these bags. `output_BE` may be changed in place."""

    def updates(self, sums: Sequence[RowGradient], step: int) -> Iterator[list[RowGradient]]:
        """The step's private gradient on rows of each stack, in one or more calls of `apply`.

        `sums` holds, for each stack, the clipped sums on the rows that take part in the step. Over
        all calls every row occurs at most once. `step` names the noise.
        """
        by_stack = [
            self.with_noise(clipped, stack.num_rows, self._drawing(draws, clipped, step))
            for clipped, stack, draws in zip(sums, self.kernel.layout.stacks, self.draws)
        ]
        for parts in zip_longest(*by_stack):
            yield [part or clipped.empty() for part, clipped in zip(parts, sums)]

    def with_noise(self, clipped: RowGradient, num_rows: int, draw: Draw) -> Iterator[RowGradient]:
        """The updates of one stack, which has `num_rows` rows in all.

        By default noise on every row that takes part, and on no other.
        """
        if clipped.rows_U.numel():
            noise_UD = draw(clipped.rows_U, 0)
            yield RowGradient(clipped.rows_U, noise_UD.add_(clipped.values_UD))

    def apply(self, update: list[RowGradient]) -> None:
        """Have the fused optimizer make one of the step's updates."""
        if self.average is not None:
            self.average.before_update([gradient.rows for gradient in update])
        self.kernel.apply(update)

    def open_average(self, clock: AverageClock) -> RowAverage:
        """Average the rows from the next tick of the clock on.

        By default rows rest unless `apply` moves them. A mechanism that moves rows in another way
        overrides this, too.
        """
        if type(self).apply is not TableState.apply:
            raise Refused(
                f"Expected a mechanism whose rows can be averaged, found {type(self).__name__}, "
                "which moves rows in a way of its own. Leave AverageWeights out, or give it an "
                "open_average."
            )
        self.average = AverageOfRest(self.kernel, clock)
        return self.average

    def public_rows(self, sums: Sequence[RowGradient]) -> list[Tensor] | None:
        """The rows of each stack that the step moves, or None where they are a secret."""
        return None

    def pending_work(self) -> Iterator[Callable[[], None]]:
        """What must be done before the tables may be seen, in pieces for several threads."""
        return iter(())

    def note_work_done(self) -> None:
        """All pieces of `pending_work` have been done."""

    def _drawing(self, draws: StackNoise, like: RowGradient, step: int) -> Draw:
        stddev, width = self.noise.stddev, like.values_UD.shape[1]

        def draw(rows_U: Tensor, part: int) -> Tensor:
            out_UD = like.values_UD.new_empty(rows_U.numel(), width)
            if stddev == 0:
                return out_UD.zero_()
            return draws.fill_(out_UD, "gradient", step, rows_U, part=part, stddev=stddev)

        return draw


class PublicRows(TableState):
    """For mechanisms that choose the rows of a step privately: anybody may know these rows."""

    def public_rows(self, sums: Sequence[RowGradient]) -> list[Tensor]:
        return [clipped.rows_U for clipped in sums]


class MechanismState:
    """What a mechanism keeps during a run, on this rank.

    A mechanism whose noise depends on earlier noise overrides this class and shares what its
    `tables` and `add_dense_noise_` need between them.
    """

    def __init__(
        self, mechanism: Mechanism, tables: Sequence[TableState], noise: StepNoise
    ) -> None:
        self.mechanism, self.tables, self.noise = mechanism, tables, noise

    def choose_rows(self, batch: BatchReads) -> Sequence[RowChoice | None]:
        """The rows that take part in the step, for every read. None means every row read.

        All kernels and ranks decide together: one unit's reads are bounded over all of them.
        """
        return self.mechanism.choose_rows(batch) or [None] * len(batch.reads)

    def add_dense_noise_(self, flat_N: Tensor, step: int) -> None:
        """Add the step's noise to the clipped sums of all dense layers, equally on every rank.

        They are in the unit in which they were clipped: `noise.dense_scale` comes afterwards.
        """
        if self.noise.stddev and flat_N.numel():
            stream = Stream("gradient", "dense layers", step)
            self.noise.source.add_(flat_N[None], stream, self.noise.stddev)

    def before_release(self, progress: Progress | None = None) -> None:
        """Do what was put off, because the tables are about to be seen."""
        finish(self.tables, progress)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must keep, in plain Python values and tensors.

        It is saved once for all ranks, after `before_release`. So it must be the same on every
        rank, must speak of whole tables only (the next run may shard them otherwise), and must be
        no secret.
        """
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave when the checkpoint was written."""


@torch.no_grad()
def finish(states: Sequence[TableState], progress: Progress | None = None) -> None:
    """Do all pending work of some tables, on as many threads as torch may use.

    Guarantees: when it is interrupted and called again, it goes on where it was, and nothing is
    done twice. A piece of work is done by a worker thread, which no signal interrupts.
    """
    work = [piece for state in states for piece in state.pending_work()]
    if not work:
        return
    with ExitStack() as writes:
        for state in states:
            writes.enter_context(state.kernel.writing())
        do_in_threads(work, progress)
    for state in states:
        state.note_work_done()


def do_in_threads(work: Sequence[Callable[[], None]], progress: Progress | None = None) -> None:
    """Do pieces of work, in any order, on as many threads as torch may use."""
    threads = torch.get_num_threads()
    workers = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    try:
        done = workers.map(_without_grad, work)
        for _, _ in zip(progress(work) if progress else work, done):
            pass
    finally:
        workers.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # theirs would be every later thread's


@torch.no_grad()
def _without_grad(work: Callable[[], None]) -> None:
    """Every thread switches gradients off for itself."""
    work()

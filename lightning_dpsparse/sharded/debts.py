"""Rows of sharded tables that owe noise: they pay before they are read, and before they leave."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_dpsparse.engine.deferred import Clock
from lightning_dpsparse.engine.draws import StackNoise
from lightning_dpsparse.engine.lookups import Bags, Layout
from lightning_dpsparse.engine.rows import RowGradient, add_to_bags
from lightning_dpsparse.mechanisms.lazydp import (
    Bill,
    Debts,
    LazyDP,
    has_room,
    is_felt,
    largest_of,
    payment_grid,
)
from lightning_dpsparse.noise.grid import grid_of
from lightning_dpsparse.noise.sources import NoiseSource
from lightning_dpsparse.sharded.update import matrix_of, version_of

Progress = Callable[[Sequence[Any]], Iterable[Any]]
"""Wraps a sequence of work, and shows how far it got."""


class KernelDebts:
    """What the rows of one kernel's tables owe, stack by stack."""

    def __init__(
        self,
        kernel: Any,
        layout: Layout,
        table_names: Sequence[str],
        shard_offsets: Sequence[tuple[int, int]],
        mechanism: LazyDP,
        noise: NoiseSource,
        noise_stddev: float,
    ) -> None:
        self._tbe = kernel.emb_module
        self._clock = Clock(self._tbe.current_device)
        weights = [matrix_of(self._tbe, stack) for stack in layout.stacks]
        grid = payment_grid(weights, noise_stddev * self._tbe.get_learning_rate())
        self._weights, self._noise_stddev = weights, noise_stddev
        self._debts = [
            Debts(
                mechanism,
                weight,
                StackNoise(
                    noise, stack, table_names, shard_offsets, layout.stream_table(stack.tables)
                ),
                self._clock,
                grid,
            )
            for stack, weight in zip(layout.stacks, weights)
        ]
        self._put_on(grid)
        self._bills: list[Bill] = []
        self._all_paid_through = 0
        self.is_resting = False
        """Whether this step leaves the tables alone."""
        self.own_writes = 0
        """How often payments wrote to the tables, as torch counts."""

    def _put_on(self, grid: float | None) -> None:
        self.grid = grid
        for debts in self._debts:
            debts.grid = grid
            debts.put_on_grid()

    @property
    def is_paid(self) -> bool:
        """Whether nothing is owed by any row, for certain."""
        return self._all_paid_through == self._clock.now

    def owe_for(self, step: int, noise_stddev: float) -> None:
        """Every row owes the noise of one step more. To be called before its gradient is applied:
        an interruption in between leaves too much noise, not too little.

        Where the learning rate is so small that the step's noise would be lost in rounding, the
        tables rest: nothing is applied, and nothing is owed.
        """
        self._noise_stddev = noise_stddev
        args, learning_rate = self._tbe.optimizer_args, self._tbe.get_learning_rate()
        self.is_resting = not is_felt(noise_stddev * learning_rate, self.grid)
        if not self.is_resting:
            self._clock.tick(step, noise_stddev, learning_rate, float(args.weight_decay))

    @contextmanager
    def paying(self) -> Iterator[None]:
        """Around writes to the tables that belong to payments."""
        before = version_of(self._tbe)
        yield
        self.own_writes += version_of(self._tbe) - before

    @torch.no_grad()
    def pay_before_reading(self, bags: Bags, *, only_owing: bool) -> None:
        """The rows of these bags pay, each once, however often it is read.

        `only_owing` leaves out those that have paid, as most have in evaluation.
        """
        if self.is_paid:
            return
        with self.paying():
            for debts, rows_U in zip(self._debts, bags.rows_of_stacks()):
                owing_U = debts.owing(rows_U) if only_owing else rows_U
                if owing_U.numel():
                    debts.pay(debts.bill(owing_U))

    @torch.no_grad()
    def read_on_credit(self, bags: Bags, output_BE: Tensor) -> None:
        """Make `output_BE`, read from these bags, what it were had their rows paid before.

        The bill lies open until the step's update pays it in the same write, or until any other
        read or payment, whichever comes first.
        """
        if not self.is_paid:
            self._bills = [
                debts.bill(rows_U) for debts, rows_U in zip(self._debts, bags.rows_of_stacks())
            ]
            add_to_bags(output_BE, bags, [bill.noise_UD for bill in self._bills])

    @property
    def bills(self) -> list[Tensor] | None:
        """Noise that rows of each stack owe for a read on credit, if there was one."""
        return [bill.noise_UD for bill in self._bills] if self._bills else None

    def scale_(self, stack: int, gradient: RowGradient, scale: float) -> None:
        """Of this step, whose noise lies on its own grid."""
        spacing = grid_of(self._noise_stddev) if self._noise_stddev else 0.0
        self._debts[stack].land(gradient.rows_U, gradient.values_UD, spacing, scale)

    def note_updated(self, gradients: Sequence[RowGradient]) -> None:
        """These rows got the step's noise with their gradient, and what they were read on."""
        for debts, gradient in zip(self._debts, gradients):
            debts.note(gradient.rows_U, self._clock.now)
        self._bills = []

    def pay_bills(self) -> None:
        """What was read on credit is paid by itself."""
        with self.paying():
            for debts, bill in zip(self._debts, self._bills):
                debts.pay(bill)
        self._bills = []

    @property
    def gives_credit(self) -> bool:
        """Rows that decay must be rewritten, not only added to: they pay before they are read."""
        return float(self._tbe.optimizer_args.weight_decay) == 0.0

    def chunks(self) -> Iterator[Callable[[], None]]:
        """All that is owed, as pieces of work that can be done side by side."""
        self.pay_bills()
        if not self.is_paid:
            for debts in self._debts:
                for chunk in debts.chunks():
                    yield partial(debts.pay_chunk, *chunk)

    def note_all_paid(self) -> None:
        """Weights that have outgrown their grid, and now can be shown, get a coarser one."""
        self._all_paid_through = self._clock.now
        if self.grid is None:
            return
        largest, grid = largest_of(self._weights), self.grid
        while not has_room(largest, grid):
            grid *= 2.0
        if grid != self.grid:
            with self.paying():
                self._put_on(grid)


@torch.no_grad()
def pay_all(owing: Sequence[KernelDebts], progress: Progress | None = None) -> None:
    """Every row pays what it owes, chunk by chunk, on as many threads as torch may use.

    Guarantees: interrupted and called again, it goes on where it was, and no row pays twice. A
    chunk is paid by a worker thread, which no signal interrupts between noise and note.
    """
    work = [chunk for debts in owing for chunk in debts.chunks()]
    if not work:
        return
    threads = torch.get_num_threads()
    workers = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    try:
        with ExitStack() as writes:
            for debts in owing:
                writes.enter_context(debts.paying())
            done = workers.map(_without_grad, work)
            for _, _ in zip(progress(work) if progress else work, done):
                pass
    finally:
        workers.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # theirs would be every later thread's
    for debts in owing:
        debts.note_all_paid()


@torch.no_grad()
def _without_grad(work: Callable[[], None]) -> None:
    """Whether gradients are on is each thread's own matter."""
    work()

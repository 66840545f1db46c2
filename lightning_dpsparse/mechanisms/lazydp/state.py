"""LazyDP on the tables of one kernel: when rows owe noise, and when they pay it.

A batch goes through `LazyTables` from top to bottom. Usually its rows are *read on credit*: what
they owe is drawn and added to what was read, but not yet to the tables. The step's own update then
writes both at once, which halves the writes. Until then the *bill* lies open, and any other read or
payment pays it first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_dpsparse.engine.averaging import AverageClock, RowAverage
from lightning_dpsparse.engine.lookups import Bags
from lightning_dpsparse.engine.rows import RowGradient, add_to_bags
from lightning_dpsparse.engine.state import (
    Reading,
    StepNoise,
    TableKernel,
    TableState,
    finish,
)
from lightning_dpsparse.mechanisms.lazydp.averages import LazyAverage
from lightning_dpsparse.mechanisms.lazydp.clock import Clock
from lightning_dpsparse.mechanisms.lazydp.debts import Bill, Debts
from lightning_dpsparse.mechanisms.lazydp.weight_grid import (
    has_room,
    is_felt,
    largest_of,
    payment_grid,
)

# B examples, E width of a kernel, U rows, D width of a table

_LONG, _LONGEST = 1 << 12, 1 << 18
"""Number of steps after which the clock starts anew when all rows have paid, and number of steps
after which all rows pay for that: ten megabytes of memory for each kernel."""


class LazyTables(TableState):
    """What the rows of one kernel's tables owe, stack by stack."""

    def __init__(
        self, kernel: TableKernel, noise: StepNoise, *, aggregate: bool, chunk_rows: int
    ) -> None:
        super().__init__(kernel, noise)
        self.clock = Clock(kernel.device)
        self._weights = kernel.weights()
        grid = payment_grid(self._weights, noise.stddev * kernel.learning_rate)
        self.debts = [
            Debts(weight, draws, self.clock, aggregate=aggregate, chunk_rows=chunk_rows)
            for weight, draws in zip(self._weights, self.draws)
        ]
        self._put_on(grid)
        self._bills: list[Bill] = []
        self._all_paid_through = 0

    def open_average(self, clock: AverageClock) -> RowAverage:
        self.clock.follow_averages()
        self.average = LazyAverage(self)
        return self.average

    def _put_on(self, grid: float | None) -> None:
        self.grid = grid
        for debts in self.debts:
            debts.grid = grid
            debts.put_on_grid()

    @property
    def _is_paid(self) -> bool:
        """Whether it is certain that no row owes noise."""
        return self._all_paid_through == self.clock.now

    # ---- a batch is read ------------------------------------------------------------------------

    @torch.no_grad()
    def before_read(self, bags: Bags, reading: Reading) -> None:
        """Rows pay before they are read, unless they can be read on credit.

        However often a row is read, it pays once. Outside training most rows have paid already, and
        are left out.
        """
        self._pay_bills()  # of a step that was interrupted, or of this step's first read
        if self._is_on_credit(reading) or self._is_paid:
            return
        with self.kernel.writing():
            for debts, rows_U in zip(self.debts, bags.rows_of_stacks()):
                owing_U = rows_U if reading.is_private else debts.owing(rows_U)
                if owing_U.numel():
                    debts.pay(debts.bill(owing_U))

    @torch.no_grad()
    def after_read(self, bags: Bags, output_BE: Tensor, reading: Reading) -> None:
        """Make `output_BE` what it would be if these rows had received their noise before."""
        if self._is_on_credit(reading) and not self._is_paid:
            self._bills = [
                debts.bill(rows_U) for debts, rows_U in zip(self.debts, bags.rows_of_stacks())
            ]
            add_to_bags(output_BE, bags, [bill.noise_UD for bill in self._bills])

    def _is_on_credit(self, reading: Reading) -> bool:
        # Rows that decay must be rewritten, not only added to: they pay before they are read.
        return reading is Reading.WHOLE_BATCH and self.kernel.weight_decay == 0.0

    # ---- the step is released -------------------------------------------------------------------

    def updates(self, sums: Sequence[RowGradient], step: int) -> Iterator[list[RowGradient]]:
        """Put noise on the rows that were read. All other rows owe it from now on.

        They owe it before any gradient is applied: an interruption in between leaves too much
        noise, not too little. If the learning rate is so small that the step's noise would be lost
        in rounding, the step leaves the tables alone: nothing is applied, and nothing is owed.
        """
        kernel, stddev = self.kernel, self.noise.stddev
        if isinstance(self.average, LazyAverage):
            self.average.go_on()
        if self.clock.now >= _LONGEST:
            finish([self])
        if not is_felt(stddev * kernel.learning_rate, self.grid):
            self._pay_bills()
            return
        self.clock.tick(step, stddev, kernel.learning_rate, kernel.weight_decay)
        yield from super().updates(sums, step)

    @torch.no_grad()
    def apply(self, update: list[RowGradient]) -> None:
        """Make an SGD step on the grid, w <- (1 - lr decay) w - lr g~, and pay the open bills."""
        rate = self.kernel.learning_rate
        keep = 1.0 - rate * self.kernel.weight_decay
        for i, (debts, gradient) in enumerate(zip(self.debts, update)):
            if gradient.rows_U.numel():
                bill = self._bills[i] if self._bills else None
                debts.descend(gradient, rate, keep, self.noise.stddev, bill)
        self._bills = []

    # ---- the tables are about to be seen --------------------------------------------------------

    def pending_work(self) -> Iterator[Callable[[], None]]:
        """Every row pays what it owes, chunk by chunk."""
        self._pay_bills()
        if not self._is_paid:
            for debts in self.debts:
                for chunk in debts.chunks():
                    yield partial(debts.pay_chunk, *chunk)

    def note_work_done(self) -> None:
        """Forget the steps that all rows have paid for, and see to the grid of the weights.

        Weights that have outgrown their grid get a coarser one, now that they may be seen.
        """
        self._all_paid_through = self.clock.now
        if self.clock.now >= _LONG:
            # Rows first: stopped in between, they would owe more than they do, and not less.
            for debts in self.debts:
                debts.start_anew()
            self.clock.start_anew()
            self._all_paid_through = 0
        if self.grid is None:
            return
        largest, grid = largest_of(self._weights), self.grid
        while not has_room(largest, grid):
            grid *= 2.0
        if grid != self.grid:
            with self.kernel.writing():
                self._put_on(grid)

    def _pay_bills(self) -> None:
        """Pay what was read on credit by itself, without the update of a step."""
        with self.kernel.writing():
            for debts, bill in zip(self.debts, self._bills):
                debts.pay(bill)
        self._bills = []

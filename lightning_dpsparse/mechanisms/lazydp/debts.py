"""What the rows of one stack of tables owe, and how they pay it.

What rows owe is not stored. For every row only the last step is kept through which it has paid,
which takes four bytes. The clock (`clock.py`) tells how much a row owes since then, and its noise
is drawn when it pays. When rows pay is decided in `state.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from lightning_dpsparse.engine.averaging import Rows
from lightning_dpsparse.engine.draws import StackNoise
from lightning_dpsparse.engine.rows import RowGradient, add_to_rows, weighted_runs
from lightning_dpsparse.mechanisms.lazydp.averages import StackAverage
from lightning_dpsparse.mechanisms.lazydp.clock import Clock
from lightning_dpsparse.mechanisms.lazydp.gap_maps import Gap
from lightning_dpsparse.noise.grid import grid_of, round_to_
from lightning_dpsparse.noise.regrid import regrid_

# R rows of a stack, U rows that pay, K pairs of a row and a step that it owes, D width


@dataclass(frozen=True)
class Bill:
    """What some rows owe. They pay it by theta <- decay * theta + noise."""

    rows_U: Tensor
    noise_UD: Tensor
    decay_U: Tensor | None
    """The factor by which each row has decayed; None means no decay."""
    through: int
    """The last step that this bill pays for."""
    gap: Gap | None = None
    """What these steps did to the rows' averages; None if nothing is averaged."""
    averaged_UD: Tensor | None = None
    """What the same draws add to the averages; None if rows pay with one draw for all steps."""


class Debts:
    """What the rows of one stack of tables owe. It is secret, and so are weights that owe noise.

    Guarantees: a row pays for every step exactly once. An interruption can at worst make a row
    that was about to be read pay twice, never less than it owes. With a grid, weights are multiples
    of it once `put_on_grid` was called, and stay so.
    """

    def __init__(
        self,
        weight_RD: Tensor,
        noise: StackNoise,
        clock: Clock,
        grid: float | None = None,
        *,
        aggregate: bool = True,
        chunk_rows: int = 1 << 14,
    ) -> None:
        self._weight_RD, self._noise, self._clock, self.grid = weight_RD, noise, clock, grid
        self._aggregate, self._chunk_rows = aggregate, chunk_rows
        self._paid_through_R = torch.zeros(
            len(weight_RD), dtype=torch.int32, device=weight_RD.device
        )
        self.parts = count(1)
        """Names of draws that share a step."""
        self.average: StackAverage | None = None
        """The average of these rows, if weights are averaged. It moves when they pay."""

    def put_on_grid(self) -> None:
        for some_rows in self._weight_RD.split(self._chunk_rows):
            self._round_(some_rows)

    def _round_(self, values: Tensor) -> Tensor:
        return values if self.grid is None else round_to_(values, self.grid)

    def descend(
        self, gradient: RowGradient, rate: float, keep: float, stddev: float, bill: Bill | None
    ) -> None:
        """Make an SGD step on the grid, w <- keep * w - rate * g, and pay the rows' open bill.

        `stddev` is that of the noise in the gradient.
        """
        rows_U, weight_RD = gradient.rows_U, self._weight_RD
        spacing = grid_of(stddev) if stddev else 0.0
        step_UD = self._land(rows_U, gradient.values_UD, spacing, -rate, next(self.parts))
        if keep != 1.0:
            assert bill is None  # rows that decay pay before they are read
            old_UD = weight_RD.index_select(0, rows_U)
            new_UD = self._round_(step_UD.add_(old_UD, alpha=keep))
            _tell(self.average, rows_U, new_UD - old_UD)
            weight_RD.index_copy_(0, rows_U, new_UD)
        else:
            if bill is not None:
                step_UD += bill.noise_UD
            _tell(self.average, rows_U, step_UD, bill)
            add_to_rows(weight_RD, rows_U, step_UD)
        self.note(rows_U, self._clock.now)

    def _land(
        self, rows_U: Tensor, values_UD: Tensor, spacing: float, scale: float | Tensor, part: int
    ) -> Tensor:
        if self.grid is None:
            return values_UD.mul_(scale[:, None] if isinstance(scale, Tensor) else scale)
        dither_UD = torch.empty_like(values_UD)
        self._noise.dither_(dither_UD, "landing", self._clock.last_step, rows_U, part=part)
        return regrid_(values_UD, spacing, scale, self.grid, dither_UD)

    def bill(self, rows_U: Tensor) -> Bill:
        """Draw what these rows owe. They must increase, and the bill must be paid as drawn."""
        since_U = self._paid_through_R.index_select(0, rows_U)
        return self._draw(rows_U, since_U, next(self.parts))

    def pay(self, bill: Bill) -> None:
        if bill.decay_U is None:
            _tell(self.average, bill.rows_U, bill.noise_UD, bill)
            add_to_rows(self._weight_RD, bill.rows_U, bill.noise_UD)
        else:
            old_UD = self._weight_RD.index_select(0, bill.rows_U)
            new_UD = (old_UD * bill.decay_U.float()[:, None]).add_(bill.noise_UD)
            self._round_(new_UD)
            _tell(self.average, bill.rows_U, new_UD - old_UD, bill, old_UD)
            self._weight_RD.index_copy_(0, bill.rows_U, new_UD)
        self.note(bill.rows_U, bill.through)

    def note(self, rows_U: Tensor, through: int) -> None:
        """Note that these rows have paid through a step."""
        self._paid_through_R.index_fill_(0, rows_U, through)

    def start_anew(self) -> None:
        """All rows have paid, and the clock is about to start anew."""
        self._paid_through_R.zero_()

    def owing(self, rows_U: Tensor) -> Tensor:
        """Those of the given rows that owe noise."""
        return rows_U[self._paid_through_R.index_select(0, rows_U) < self._clock.now]

    def chunks(self) -> Iterator[tuple[int, int, int]]:
        """First row, end and name of each chunk that `pay_chunk` must pay, in any order."""
        for start in range(0, len(self._weight_RD), self._chunk_rows):
            stop = min(start + self._chunk_rows, len(self._weight_RD))
            yield start, stop, next(self.parts)

    def pay_chunk(self, start: int, stop: int, part: int) -> None:
        """Have all rows from `start` to `stop` pay. Nothing is written before all is drawn."""
        since_U = self._paid_through_R[start:stop]
        if bool((since_U == self._clock.now).all()):
            return
        rows_U = torch.arange(start, stop, device=since_U.device)
        bill = self._draw(rows_U, since_U, part)
        rows, weight_UD = slice(start, stop), self._weight_RD[start:stop]
        if bill.decay_U is None:
            _tell(self.average, rows, bill.noise_UD, bill)
            weight_UD.add_(bill.noise_UD)
        else:
            new_UD = self._round_(weight_UD * bill.decay_U.float()[:, None]).add_(bill.noise_UD)
            _tell(self.average, rows, new_UD - weight_UD, bill, weight_UD)
            weight_UD.copy_(new_UD)
        since_U.fill_(self._clock.now)

    def _draw(self, rows_U: Tensor, since_U: Tensor, part: int) -> Bill:
        """Draw the noise that each row owes by now."""
        clock, width = self._clock, self._weight_RD.shape[1]
        decay_U = clock.decay(since_U)
        gap = None if clock.gaps is None else clock.gaps.since(since_U)
        if self._aggregate:
            owed_UD = self._weight_RD.new_empty(len(rows_U), width)
            self._noise.fill_(owed_UD, "owed", clock.last_step, rows_U, part=part)
            self._land(rows_U, owed_UD, grid_of(1.0), clock.stddev(since_U), part)
            return Bill(rows_U, owed_UD, decay_U, clock.now, gap)
        owed = clock.steps_since(since_U)
        drawn_KD = self._weight_RD.new_empty(len(owed.position_K), width)
        self._noise.fill_(
            drawn_KD,
            "gradient",
            clock.last_step,
            rows_U[owed.position_K],
            part=part,
            steps_U=owed.step_K,
        )
        count_U = torch.bincount(owed.position_K, minlength=len(rows_U))
        start_U = count_U.cumsum(0) - count_U
        index_K = torch.arange(len(drawn_KD), device=rows_U.device)
        # Sums are in units of the last step's coefficient. So what a row owes for one step keeps
        # the spacing of its draw.
        last_U = torch.ones_like(since_U, dtype=torch.float64)
        is_owing_U = count_U > 0
        last_U[is_owing_U] = owed.coefficient_K[(start_U + count_U - 1)[is_owing_U]]
        weight_K = (owed.coefficient_K / last_U[owed.position_K]).to(drawn_KD.dtype)
        owed_UD = weighted_runs(drawn_KD, index_K, start_U, weight_K)
        self._land(rows_U, owed_UD, grid_of(1.0), last_U, part)
        averaged_UD = None
        if owed.averaged_K is not None:
            weight_K = owed.averaged_K.to(drawn_KD.dtype)
            averaged_UD = weighted_runs(drawn_KD, index_K, start_U, weight_K)
        return Bill(rows_U, owed_UD, decay_U, clock.now, gap, averaged_UD)


def _tell(
    average: StackAverage | None,
    rows: Rows,
    moved_UD: Tensor,
    bill: Bill | None = None,
    old_UD: Tensor | None = None,
) -> None:
    """Tell the average that these rows are about to move, and to pay a bill with that."""
    if average is None:
        return
    if bill is None or bill.gap is None:
        average.note_move(rows, moved_UD)
    else:
        average.note_move(rows, moved_UD, bill.gap, bill.noise_UD, bill.averaged_UD, old_UD)

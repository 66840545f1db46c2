"""The average of rows that move while they wait: exactly what DP-SGD's average would be.

When a row pays, it is told where it is now, and its average must be told where the row was on the
way. Given e1, the noise that the row pays, the average is normal (`gap_maps.py`):

    m_n = B m_h + D theta_h + r e1 + N(0, T)

The last term has no part in training: no row depends on it. So it is not drawn when the row pays.
Its variance is kept, and grows from payment to payment. Before the average is released, it is drawn
once. A payment costs no further draw.

What is kept for a row is not m but its *lag*, how far m is behind the row, in a scale that grows as
averages catch up:

    c = f (theta - m),    f <- f / (1 - b) after every step

When an average follows a row that rests, theta - m shrinks by 1 - b, and c stays. So c changes only
when the row itself is written, and by what is known there: the row's old value and its average need
not be read. Of the variance, v is kept in the same scale. Before a release lags become averages,
and after it they become lags again, with f = 1.

An average costs a copy of the table and four bytes a row for v; the step through which it is up to
date is the one through which the row has paid.

Guarantees: whatever is released of an average is, given what is released of the weights, a draw
from the distribution that it has with DP-SGD. Three things are needed for that.

- *Only noised values go in.* theta_h is a weight after its step's noise, e1 is noise, and what a
  row still owes enters with e1 when it pays. Nothing sees an average before `bring_up_to_date`,
  which has all rows pay first.
- *v is drawn before a release*, and only then is the average distributed as it should be. Until
  then averages are secret, as weights are that owe noise.
- *Nobody can tell when a row has paid.* B, D, r and T depend on when the row was read, and that is
  a secret. In real numbers the distribution of (theta_n, m_n) does not depend on it. In floating
  point, low bits would: the average of two steps on the weights' grid is a multiple of half its
  spacing, and that of a row that was not read in between is not. So a released average lies on
  the weights' grid, where it is rounded to after a move at random by up to half of a spacing to
  either side (of the grid, or of the draw of v if that is wider), as payments are
  (`noise/regrid.py`). Averages of all rows are then multiples of one number, and where they lie
  between two of them is forgotten. What was released stays the average: moved anew from the same
  place time after time, it could be averaged out. This costs an error of at most one spacing, an
  eighth of one step's noise or less.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_dpsparse.engine.averaging import RowAverage, Rows
from lightning_dpsparse.engine.draws import StackNoise
from lightning_dpsparse.engine.rows import add_to_rows
from lightning_dpsparse.engine.state import do_in_threads, finish
from lightning_dpsparse.mechanisms.lazydp.gap_maps import Gap
from lightning_dpsparse.noise.grid import grid_of, round_to_

if TYPE_CHECKING:
    from lightning_dpsparse.mechanisms.lazydp.state import LazyTables

# R rows of a stack, U rows that pay, D width

_CHUNK_ROWS = 1 << 14
"""Number of rows that are released at a time."""

_LARGEST_SCALE = 2.0**40
"""When f has grown beyond this, all lags are written anew with f = 1: their squares would leave the
range of float32. Averages of steps that count alike never come to that, and those with a half-life
of h steps come to it every 40 h steps."""


class StackAverage:
    """The lags of one stack's averages behind its rows. They are secret."""

    def __init__(self, weight_RD: Tensor, lag_RD: Tensor, noise: StackNoise) -> None:
        self._weight_RD, self._lag_RD, self._noise = weight_RD, lag_RD, noise
        self._owed_R = torch.zeros(len(weight_RD), device=weight_RD.device)
        """v: the variance of what is still to be drawn for each row's average."""
        self._scale = 1.0
        self._released: set[int] = set()
        """First rows of the chunks whose lags are averages now."""

    def catch_up(self, share: float) -> None:
        """All averages move by this share towards their rows."""
        if share < 1.0:  # the first step's average is its weights, and lags are zero
            self._scale /= 1.0 - share
        if self._scale > _LARGEST_SCALE:
            self._lag_RD.mul_(1.0 / self._scale)
            self._owed_R.mul_(self._scale**-2)
            self._scale = 1.0

    def note_move(
        self,
        rows: Rows,
        moved_UD: Tensor,
        gap: Gap | None = None,
        noise_UD: Tensor | None = None,
        drawn_UD: Tensor | None = None,
        old_UD: Tensor | None = None,
    ) -> None:
        """Rows are about to move by `moved_UD`, and have paid for a gap with that.

        `noise_UD` is e1, what they pay of it. `drawn_UD` is e2, if rows pay with a draw for every
        step. None means that e2 is r e1 for now, and that T is owed. `old_UD` are the rows before,
        if they decay.
        """
        lag_UD = moved_UD * self._scale
        if gap is not None:
            if drawn_UD is not None:
                lag_UD.sub_(drawn_UD, alpha=self._scale)
            else:
                assert noise_UD is not None
                lag_UD.addcmul_(noise_UD, _column(gap.slope_U), value=-self._scale)
                _add(self._owed_R, rows, (gap.spread_U * self._scale**2).float())
            if old_UD is not None:
                lag_UD.addcmul_(old_UD, _column(gap.gain_U), value=-self._scale)
        _add(self._lag_RD, rows, lag_UD)

    def release(self, start: int, stop: int, part: int, step: int, grid: float | None) -> None:
        """Make averages of lags: draw what they owe, and put them on the grid of the weights.

        `step` and `part` name the draws.
        """
        if start in self._released:
            return
        average_UD, owed_U = self._lag_RD[start:stop], self._owed_R[start:stop]
        rows_U = torch.arange(start, stop, device=average_UD.device)
        stddev_UD = owed_U.to(torch.float64).sqrt_().div_(self._scale)[:, None]
        exact_UD = self._weight_RD[start:stop].to(torch.float64)
        exact_UD.sub_(average_UD, alpha=1.0 / self._scale)
        drawn_UD = torch.empty_like(average_UD)
        if grid is not None:  # there is noise
            if bool((owed_U > 0).any()):
                self._noise.fill_(drawn_UD, "average", step, rows_U, part=part)
                exact_UD.addcmul_(drawn_UD, stddev_UD)
            self._noise.dither_(drawn_UD, "average landing", step, rows_U, part=part)
            exact_UD.addcmul_(drawn_UD, stddev_UD.mul_(grid_of(1.0)).clamp_min_(grid))
            round_to_(exact_UD, grid)
        average_UD.copy_(exact_UD)
        owed_U.zero_()
        self._released.add(start)

    def chunks(self) -> list[tuple[int, int]]:
        """First row and end of each chunk that is released at a time."""
        ends = [*range(0, len(self._lag_RD), _CHUNK_ROWS), len(self._lag_RD)]
        return list(pairwise(ends))

    def take_as_released(self) -> None:
        """The memory for lags holds averages of an earlier run."""
        self._released = {start for start, _ in self.chunks()}

    def go_on(self) -> None:
        """Have averages that were released become lags again: all, if no release was cut short."""
        if not self._released:  # as before most steps: there may be many chunks
            return
        chunks = self.chunks()
        if len(self._released) == len(chunks):
            self._scale = 1.0
        for start, stop in chunks:
            if start in self._released:
                self._lag_RD[start:stop].neg_().add_(self._weight_RD[start:stop]).mul_(self._scale)
                self._released.remove(start)


class LazyAverage(RowAverage):
    """The average of the rows of one kernel's tables, which pay for it when they pay their noise.

    Args:
        state: What the rows owe. Its clock must follow averages.
    """

    def __init__(self, state: LazyTables) -> None:
        super().__init__(state.kernel)
        self._state = state
        self._stacks = [
            StackAverage(weight_RD, average_RD, draws)
            for weight_RD, average_RD, draws in zip(self.weights, self.averages, state.draws)
        ]
        for debts, stack in zip(state.debts, self._stacks):
            debts.average = stack
        self._is_released = False
        """Whether all of `averages` are averages, and not lags."""

    def start_from(self, averages: Sequence[Tensor]) -> None:
        super().start_from(averages)
        for stack in self._stacks:
            stack.take_as_released()

    @torch.no_grad()
    def go_on(self) -> None:
        """Rows are about to move again, or averages to follow them."""
        assert not self.is_swapped  # training goes on with the weights themselves
        for stack in self._stacks:
            stack.go_on()
        self._is_released = False

    @torch.no_grad()
    def note_step(self, share: float) -> None:
        self.go_on()
        self._state.clock.note_average(share)
        for stack in self._stacks:
            stack.catch_up(share)

    @torch.no_grad()
    def bring_up_to_date(self) -> None:
        """Have all rows pay and all averages follow them, and draw what averages still owe."""
        if self.is_swapped:  # it was done then, and no step has been taken since
            return
        finish([self._state])
        if self._is_released:
            return
        work = []
        for stack, debts in zip(self._stacks, self._state.debts):
            for chunk in stack.chunks():
                name = (next(debts.parts), self._state.clock.last_step)
                work.append(partial(stack.release, *chunk, *name, self._state.grid))
        do_in_threads(work)
        self._is_released = True


def _add(values_R: Tensor, rows: Rows, more_U: Tensor) -> None:
    if isinstance(rows, slice):
        values_R[rows] += more_U
    elif values_R.dim() == 1:
        values_R.index_add_(0, rows, more_U)
    else:
        add_to_rows(values_R, rows, more_U)


def _column(values_U: Tensor) -> Tensor:
    return values_U.float()[:, None]

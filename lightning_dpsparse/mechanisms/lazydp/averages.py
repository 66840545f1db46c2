"""The average of rows that move while they wait: exactly what DP-SGD's average would be.

When a row pays, it is told where it is now, and its average must be told where the row was on the
way. Given e1, the noise that the row pays, the average is normal (`gap_maps.py`):

    m_n = B m_h + D theta_h + r e1 + N(0, T)

The last term has no part in training: no row depends on it. So it is not drawn when the row pays.
Its variance is kept, and grows from payment to payment as v <- B^2 v + T. Before the average is
released, it is drawn once. An average costs a copy of the table and four bytes a row for v; the
step through which it is up to date is the one through which the row has paid. A payment costs no
further draw.

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

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_dpsparse.engine.averaging import RowAverage, Rows
from lightning_dpsparse.engine.draws import StackNoise
from lightning_dpsparse.engine.state import do_in_threads, finish
from lightning_dpsparse.mechanisms.lazydp.gap_maps import Gap
from lightning_dpsparse.noise.grid import grid_of

if TYPE_CHECKING:
    from lightning_dpsparse.mechanisms.lazydp.state import LazyTables

# R rows of a stack, U rows that pay, D width

_CHUNK_ROWS = 1 << 14
"""Number of rows that are released at a time."""


class StackAverage:
    """The averages of one stack of tables. They are secret until `release` was called."""

    def __init__(self, weight_RD: Tensor, average_RD: Tensor, noise: StackNoise) -> None:
        self._weight_RD, self._average_RD, self._noise = weight_RD, average_RD, noise
        self._owed_R = torch.zeros(len(weight_RD), device=weight_RD.device)
        """v: the variance of what is still to be drawn for each row's average."""

    def follow(
        self,
        rows: Rows,
        gap: Gap,
        noise_UD: Tensor,
        drawn_UD: Tensor | None = None,
        *,
        is_decaying: bool,
    ) -> None:
        """Move the averages of these rows through the steps of a gap, before the rows pay for it.

        `noise_UD` is e1, what the rows pay. `drawn_UD` is e2, if rows pay with a draw for every
        step. None means that e2 is r e1 for now, and that T is owed.
        """
        old_UD = _at(self._average_RD, rows)
        # B + D = 1 without decay: the average moves towards its row, and not a bit if it is there.
        new_UD = (_at(self._weight_RD, rows) - old_UD).mul_(_column(gap.share_U))
        if is_decaying:
            new_UD.addcmul_(old_UD, _column(gap.kept_U + gap.share_U - 1.0))
        owed_U = gap.kept_U.square() * _at(self._owed_R, rows)
        if drawn_UD is None:
            new_UD.addcmul_(noise_UD, _column(gap.slope_U))
            owed_U += gap.spread_U
        else:
            new_UD += drawn_UD
        new_UD += old_UD
        if isinstance(rows, slice):
            self._average_RD[rows], self._owed_R[rows] = new_UD, owed_U.float()
        else:
            self._average_RD.index_copy_(0, rows, new_UD)
            self._owed_R.index_copy_(0, rows, owed_U.float())

    def release(self, start: int, stop: int, part: int, step: int, grid: float | None) -> None:
        """Draw what the averages of these rows owe, and put them on the grid of the weights.

        `step` and `part` name the draws.
        """
        if grid is None:  # there is no noise
            return
        average_UD, owed_U = self._average_RD[start:stop], self._owed_R[start:stop]
        rows_U = torch.arange(start, stop, device=average_UD.device)
        stddev_UD = owed_U.to(torch.float64).sqrt_()[:, None]
        exact_UD = average_UD.to(torch.float64)
        drawn_UD = torch.empty_like(average_UD)
        if bool((owed_U > 0).any()):
            self._noise.fill_(drawn_UD, "average", step, rows_U, part=part)
            exact_UD.addcmul_(drawn_UD, stddev_UD)
        self._noise.dither_(drawn_UD, "average landing", step, rows_U, part=part)
        exact_UD.addcmul_(drawn_UD, stddev_UD.mul_(grid_of(1.0)).clamp_min_(grid))
        average_UD.copy_(exact_UD.mul_(1.0 / grid).round_()).mul_(grid)
        owed_U.zero_()


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
        self._is_released = True

    def note_step(self, share: float) -> None:
        self._state.clock.note_average(share)
        self._is_released = False

    @torch.no_grad()
    def bring_up_to_date(self) -> None:
        """Have all rows pay and all averages follow them, and draw what averages still owe."""
        if self.is_swapped:  # it was done then, and no step has been taken since
            return
        finish([self._state])
        if self._is_released:
            return
        work = []
        for stack, average_RD, debts in zip(self._stacks, self.averages, self._state.debts):
            for start in range(0, len(average_RD), _CHUNK_ROWS):
                stop = min(start + _CHUNK_ROWS, len(average_RD))
                name = (next(debts.parts), self._state.clock.last_step)
                work.append(partial(stack.release, start, stop, *name, self._state.grid))
        do_in_threads(work)
        self._is_released = True


def _at(values_R: Tensor, rows: Rows) -> Tensor:
    return values_R[rows] if isinstance(rows, slice) else values_R.index_select(0, rows)


def _column(values_U: Tensor) -> Tensor:
    return values_U.float()[:, None]

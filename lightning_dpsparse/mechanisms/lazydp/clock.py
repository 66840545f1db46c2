"""How much a row owes: what many steps do to a row that nobody reads, in closed form.

A row that waits for many steps need not go through them one by one. At every step, a row without a
gradient goes through

    theta <- (1 - eta lambda) theta - eta n,    n ~ N(0, s^2)

with the step's learning rate, weight decay and noise. From step h to step t that is

    theta_t = (A_t / A_h) theta_h + N(0, A_t^2 (R_t - R_h))
    A_t = prod_{u <= t} (1 - eta_u lambda),    R_t = sum_{u <= t} (eta_u s_u / A_u)^2

Any optimizer that is linear, with coefficients that do not depend on data, has such a form. Adagrad
has none, because its step size depends on past noise. `debts.py` has the rows that owe.

The clock remembers A and R of every step since all rows have paid. When that has become long, all
rows pay, and the clock starts anew: its memory does not grow with the length of a run.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_dpsparse.refused import Refused

# T steps, U rows, K pairs of a row and a step that it owes

_SMALLEST_LOG_DECAY = -200.0
"""When log A falls below this, A is set back to one: 1 / A^2 would leave the range of float64."""
_SHORTEST = 256
"""Number of steps that there is room for at first."""


class Clock:
    """The steps taken so far, numbered from one, and what each of them does to a row that waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.last_step = 0
        """The name under which the latest step's noise is drawn."""
        self._is_decaying = False
        self.start_anew()

    def start_anew(self) -> None:
        """Number steps from one again: no row owes anything for the steps so far."""
        self.now = 0
        # The latest entries of the tensors below. To read them there would wait for a GPU.
        self._log_decay, self._owed, self._owed_low = 0.0, 0.0, 0.0
        self._log_decay_T = torch.zeros(_SHORTEST, dtype=torch.float64, device=self._device)
        # R is kept with what rounding left out of it. Otherwise late steps with a small learning
        # rate would be lost beside early ones, and their noise with them.
        self._owed_T = torch.zeros_like(self._log_decay_T)
        self._owed_low_T = torch.zeros_like(self._log_decay_T)
        self._scale_T = torch.zeros_like(self._log_decay_T)
        self._step_T = torch.zeros_like(self._log_decay_T, dtype=torch.int64)

    def tick(
        self, step: int, noise_stddev: float, learning_rate: float, weight_decay: float = 0.0
    ) -> None:
        """Note one more step. `step` is the name under which its noise is drawn."""
        shrink = learning_rate * weight_decay
        if not shrink < 1:
            raise Refused(
                f"Expected learning rate x weight decay below 1, found {learning_rate} x "
                f"{weight_decay}: rows would change sign at every step. Lower one of them."
            )
        self._is_decaying |= shrink > 0
        scale = learning_rate * noise_stddev
        now = self.now + 1
        if now == self._owed_T.numel():
            self._grow()
        self._log_decay += math.log1p(-shrink)
        self._owed, rounding = _exact_sum(self._owed, (scale * math.exp(-self._log_decay)) ** 2)
        self._owed_low += rounding
        self._log_decay_T[now] = self._log_decay
        self._owed_T[now], self._owed_low_T[now] = self._owed, self._owed_low
        self._scale_T[now], self._step_T[now] = scale, step
        self.now, self.last_step = now, step
        if self._log_decay < _SMALLEST_LOG_DECAY:
            # A and R start anew from here. That leaves every A_t^2 (R_t - R_h) as it is.
            self._owed_T.sub_(self._owed).add_(self._owed_low_T.sub_(self._owed_low))
            self._owed_T.mul_(math.exp(2 * self._log_decay))
            self._owed_low_T.zero_()
            self._log_decay_T.sub_(self._log_decay)
            self._log_decay, self._owed, self._owed_low = 0.0, 0.0, 0.0

    def stddev(self, since_U: Tensor) -> Tensor:
        """Standard deviation of what rows owe now if they have paid through step `since_U`."""
        owed_U = self._owed - self._owed_T.index_select(0, since_U)
        owed_U += self._owed_low - self._owed_low_T.index_select(0, since_U)
        return owed_U.sqrt_().mul_(math.exp(self._log_decay))

    def decay(self, since_U: Tensor) -> Tensor | None:
        """The factor by which rows have decayed since step `since_U`; None means no decay."""
        if not self._is_decaying:
            return None
        return (self._log_decay - self._log_decay_T.index_select(0, since_U)).exp_()

    def steps_since(self, since_U: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All pairs of a row and a step that it owes: position of the row, step, coefficient.

        A row owes the sum of coefficient * n over its steps, with n standard normal.
        """
        count_U = self.now - since_U.long()
        position_K = torch.repeat_interleave(count_U)
        first_U = since_U.long() + 1 - (count_U.cumsum(0) - count_U)
        tick_K = torch.arange(position_K.numel(), device=since_U.device) + first_U[position_K]
        fade_K = (self._log_decay - self._log_decay_T[tick_K]).exp_()
        return position_K, self._step_T[tick_K], fade_K.mul_(self._scale_T[tick_K]).neg_()

    def _grow(self) -> None:
        for name in ("_log_decay_T", "_owed_T", "_owed_low_T", "_scale_T", "_step_T"):
            short = getattr(self, name)
            setattr(self, name, torch.cat([short, torch.zeros_like(short)]))


def _exact_sum(large: float, small: float) -> tuple[float, float]:
    """The sum of two floats as rounded, and the rounding error (Knuth's two-sum)."""
    total = large + small
    back = total - large
    return total, (large - (total - back)) + (small - back)

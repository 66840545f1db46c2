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

If weights are averaged, the clock also ticks when the average follows the weights, and knows what
both kinds of ticks do to a row and its average together (`gap_maps.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dpsparse.mechanisms.lazydp.gap_maps import GapMaps
from lightning_dpsparse.refused import Refused

# T steps, U rows, K pairs of a row and a step that it owes

_SMALLEST_LOG_DECAY = -200.0
"""When log A falls below this, A is set back to one: 1 / A^2 would leave the range of float64."""
_SHORTEST = 256
"""Number of steps that there is room for at first."""


@dataclass(frozen=True)
class Owed:
    """What rows owe, step by step: the sum of coefficient * n over their steps, n standard normal.

    Noise is part of a gradient, and gradients are descended: coefficients are negative.
    """

    position_K: Tensor
    """Which of the rows owes."""
    step_K: Tensor
    """The name under which the step's noise is drawn."""
    coefficient_K: Tensor
    averaged_K: Tensor | None
    """The same for what averages owe; None if nothing is averaged."""


class Clock:
    """The steps taken so far, numbered from one, and what each of them does to a row that waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.last_step = 0
        """The name under which the latest step's noise is drawn."""
        self._is_decaying = False
        self.gaps: GapMaps | None = None
        """What ticks do to rows and their averages; None if nothing is averaged."""
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
        if self.gaps is not None:
            self.follow_averages()

    def follow_averages(self) -> None:
        """From now on averages follow the rows, whenever `note_average` is called."""
        so_far = torch.arange(self.now + 1, device=self._device)
        decay = self.decay(so_far)
        decay_P = torch.ones_like(self._owed_T[: self.now + 1]) if decay is None else decay
        self.gaps = GapMaps(decay_P, self.stddev(so_far).square_())

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
        self._log_decay += math.log1p(-shrink)
        self._owed, rounding = _exact_sum(self._owed, (scale * math.exp(-self._log_decay)) ** 2)
        self._owed_low += rounding
        self._append(step, scale)
        if self.gaps is not None:
            self.gaps.add_noise(1.0 - shrink, scale * scale)
        if self._log_decay < _SMALLEST_LOG_DECAY:
            # A and R start anew from here. That leaves every A_t^2 (R_t - R_h) as it is.
            self._owed_T.sub_(self._owed).add_(self._owed_low_T.sub_(self._owed_low))
            self._owed_T.mul_(math.exp(2 * self._log_decay))
            self._owed_low_T.zero_()
            self._log_decay_T.sub_(self._log_decay)
            self._log_decay, self._owed, self._owed_low = 0.0, 0.0, 0.0

    def note_average(self, share: float) -> None:
        """Note that all averages have moved by this share towards their rows, which stay."""
        assert self.gaps is not None
        self._append(self.last_step, 0.0)
        self.gaps.add_average(share)

    def _append(self, step: int, scale: float) -> None:
        now = self.now + 1
        if now == self._owed_T.numel():
            self._grow()
        self._log_decay_T[now] = self._log_decay
        self._owed_T[now], self._owed_low_T[now] = self._owed, self._owed_low
        self._scale_T[now], self._step_T[now] = scale, step
        self.now, self.last_step = now, step

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

    def steps_since(self, since_U: Tensor) -> Owed:
        """All pairs of a row and a step that it owes noise for, row by row."""
        count_U = self.now - since_U.long()
        position_K = torch.repeat_interleave(count_U)
        first_U = since_U.long() + 1 - (count_U.cumsum(0) - count_U)
        tick_K = torch.arange(position_K.numel(), device=since_U.device) + first_U[position_K]
        is_noisy_K = self._scale_T[tick_K] != 0
        position_K, tick_K = position_K[is_noisy_K], tick_K[is_noisy_K]
        fade_K = (self._log_decay - self._log_decay_T[tick_K]).exp_()
        scale_K = self._scale_T[tick_K].neg()
        averaged_K = None if self.gaps is None else self.gaps.since(tick_K).share_U * scale_K
        return Owed(position_K, self._step_T[tick_K], fade_K.mul_(scale_K), averaged_K)

    def _grow(self) -> None:
        for name in ("_log_decay_T", "_owed_T", "_owed_low_T", "_scale_T", "_step_T"):
            short = getattr(self, name)
            setattr(self, name, torch.cat([short, torch.zeros_like(short)]))


def _exact_sum(large: float, small: float) -> tuple[float, float]:
    """The sum of two floats as rounded, and the rounding error (Knuth's two-sum)."""
    total = large + small
    back = total - large
    return total, (large - (total - back)) + (small - back)

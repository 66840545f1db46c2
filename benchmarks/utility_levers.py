"""Levers that were tried and are not offered, as little as it takes to measure them.

Neither is private as it stands, and nothing here is for other use: see docs/utility.md for what
they bring.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dpsparse import DPSGD
from lightning_dpsparse.engine.clipping import Clipping
from lightning_dpsparse.engine.rows import RowGradient
from lightning_dpsparse.engine.state import StepNoise, TableKernel
from lightning_dpsparse.mechanisms.dpsgd import NoiseOnAllRows

# B examples, R rows, D width of a table


class QuantileClipping(Clipping):
    """A clip norm C_t that follows a quantile of the norms (Andrew et al. 2021, arXiv:1905.03871).

    C_{t+1} = C_t exp(-speed (share of examples with a norm below C_t - quantile))

    Gradients are clipped to C_t and scaled to the plan's C, so that the noise is that of C in every
    step. The learning rate that the schedule multiplies by `rate` = C_t / C then gives the noise
    sigma C_t that the method asks for. With `keeps_steps` the rate stays 1: a step is as long while
    norms are small as it is later, as if the learning rate were divided by C_t.

    The share is read without noise, and not charged: a private count could only do worse. So this
    shows the most that the method can bring.
    """

    def __init__(
        self,
        quantile: float = 0.5,
        start: float = 0.5,
        speed: float = 0.2,
        keeps_steps: bool = False,
    ) -> None:
        self.quantile, self.speed, self.keeps_steps = quantile, speed, keeps_steps
        self._bound, self.rate = start, 1.0

    @override
    def factors(self, squares_KB: Tensor, clip_norm: float | Tensor) -> Tensor:
        norms_KB = squares_KB.sqrt().clamp_min(torch.finfo(squares_KB.dtype).tiny)
        factors_KB = (clip_norm / norms_KB).clamp_max(clip_norm / self._bound)
        most = float(torch.as_tensor(clip_norm).max())
        below = float((norms_KB <= self._bound).float().mean())
        self.rate = 1.0 if self.keeps_steps else self._bound / most
        self._bound *= math.exp(-self.speed * (below - self.quantile))
        return factors_KB.nan_to_num(0.0)


@dataclass(frozen=True)
class Momentum(DPSGD):
    """DP-SGD on all rows of tables, with momentum: m <- beta m + (1 - beta) g~, w <- w - lr m."""

    beta: float = 0.9

    def __init__(self, beta: float = 0.9) -> None:
        super().__init__()
        object.__setattr__(self, "beta", beta)

    @override
    def open_table(self, kernel: TableKernel, noise: StepNoise) -> MomentumOnAllRows:
        return MomentumOnAllRows(kernel, noise, self.chunk_rows, self.beta)


class MomentumOnAllRows(NoiseOnAllRows):
    """The tables of one kernel, and their momentum."""

    def __init__(self, kernel: TableKernel, noise: StepNoise, chunk_rows: int, beta: float) -> None:
        super().__init__(kernel, noise, chunk_rows)
        self._beta = beta
        self._momentum = [torch.zeros_like(weight) for weight in kernel.weights()]

    @override
    def updates(self, sums: Sequence[RowGradient], step: int) -> Iterator[list[RowGradient]]:
        for update in super().updates(sums, step):
            yield [self._moved(m_RD, part) for m_RD, part in zip(self._momentum, update)]

    def _moved(self, momentum_RD: Tensor, part: RowGradient) -> RowGradient:
        rows_U = part.rows_U
        moved_UD = momentum_RD[rows_U].lerp_(part.values_UD, 1.0 - self._beta)
        momentum_RD[rows_U] = moved_UD
        return RowGradient(rows_U, moved_UD, first_row=part.first_row)

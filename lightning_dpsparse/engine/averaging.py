"""The average of the weights over many steps, at the cost of the rows that move.

After every step the average m follows the weights theta:

    W_t = fade * W_{t-1} + 1,    m_t = m_{t-1} + (theta_t - m_{t-1}) / W_t

With fade = 1 that is the mean of all steps so far. With fade = 2^(-1/h) a step counts half of one
that came h steps later. The first step has W = 1, so that the average begins as the weights.

A batch moves few rows, and the average of all others moves towards weights that stay where they
are. From step h to step n that is

    m_n = theta + K (m_h - theta),    K = fade^(n-h) W_h / W_n

So a row's average waits until the row is about to move, or until somebody wants to see it. For
every row the last step is kept through which its average was brought up to date: four bytes, beside
the average itself. Rows of LazyDP move while they wait, and have another law
(`mechanisms/lazydp/averages.py`).

Guarantees: an average is made of weights that were released after every step, so that it costs no
privacy. (For LazyDP that is an argument of its own.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_dpsparse.engine.state import TableKernel

# R rows of a stack, U rows, D width of a table

_CHUNK_ROWS = 1 << 14
"""Number of rows that are looked at together when all rows are."""

Rows = Tensor | slice
"""Distinct rows of a stack: their numbers, or a run of them."""


class AverageClock:
    """The steps of an average so far, numbered from one, and how much each of them left of it.

    Args:
        half_life: Number of steps after which a step counts half; None means that all count alike.
        total: W before the first step. Zero begins a new average.
    """

    def __init__(self, half_life: float | None = None, total: float = 0.0) -> None:
        self._rate = 0.0 if half_life is None else math.log(2.0) / half_life
        self._first_total = total
        self.now = 0

    def tick(self) -> float:
        """Count one more step. Returns 1 / W, the weight that it has in the average.

        >>> clock = AverageClock()
        >>> [round(clock.tick(), 3) for _ in range(4)]
        [1.0, 0.5, 0.333, 0.25]
        """
        self.now += 1
        return 1.0 / self.total

    @property
    def total(self) -> float:
        """W now: what all steps weigh together if the latest weighs one."""
        ticks = torch.tensor(float(self.now), dtype=torch.float64)
        return float(self._total_at(ticks))

    def kept(self, since_U: Tensor) -> Tensor:
        """K for rows whose averages were brought up to date through step `since_U`."""
        ticks_U = since_U.to(torch.float64)
        fade_U = torch.exp((ticks_U - self.now) * self._rate)
        return fade_U.mul_(self._total_at(ticks_U)).div_(self.total)

    def _total_at(self, ticks: Tensor) -> Tensor:
        if self._rate == 0:
            return ticks + self._first_total
        geometric = torch.expm1(-self._rate * ticks) / math.expm1(-self._rate)
        return torch.exp(-self._rate * ticks) * self._first_total + geometric


class RowAverage:
    """The average of the rows of one kernel's tables on this rank.

    Averages lie beside the weights in memory of the same shape. `swap` lets them change places.
    """

    def __init__(self, kernel: TableKernel) -> None:
        self.kernel = kernel
        self.weights = kernel.weights()
        """The tables of each stack as one matrix, which the kernel reads."""
        self.averages = [torch.zeros_like(weight) for weight in self.weights]
        """The same of the averages, or of the weights while both are swapped."""
        self.is_swapped = False

    def start_from(self, averages: Sequence[Tensor]) -> None:
        """Go on from averages of an earlier run, before the first step."""
        for mine, given in zip(self.averages, averages, strict=True):
            mine.copy_(given)

    def before_update(self, rows_of_stacks: Sequence[Rows]) -> None:
        """These rows of each stack are about to move."""
        raise NotImplementedError

    def note_step(self, share: float) -> None:
        """A step has been taken, and has this weight in the average."""
        raise NotImplementedError

    def bring_up_to_date(self) -> None:
        """The averages of all rows are about to be seen."""
        raise NotImplementedError

    @torch.no_grad()
    def swap(self) -> None:
        """Let averages and weights change places, bit by bit."""
        with self.kernel.writing():
            for weight_RD, average_RD in zip(self.weights, self.averages):
                for one, other in zip(*(x.split(_CHUNK_ROWS) for x in (weight_RD, average_RD))):
                    before = one.clone()
                    one.copy_(other)
                    other.copy_(before)
        self.is_swapped = not self.is_swapped


class AverageOfRest(RowAverage):
    """The average of rows that stay where they are unless a step moves them.

    Args:
        clock: Counts the steps of the average, for all tables alike.
    """

    def __init__(self, kernel: TableKernel, clock: AverageClock) -> None:
        super().__init__(kernel)
        self._clock = clock
        self._through = [
            torch.zeros(len(weight), dtype=torch.int32, device=weight.device)
            for weight in self.weights
        ]

    def note_step(self, share: float) -> None:
        """The clock has counted the step. Nothing else is to be done before a row moves."""

    @torch.no_grad()
    def before_update(self, rows_of_stacks: Sequence[Rows]) -> None:
        assert not self.is_swapped  # training goes on with the weights themselves
        now = self._clock.now
        if now == 0:  # nothing was averaged yet
            return
        for weight_RD, average_RD, through_R, rows in zip(
            self.weights, self.averages, self._through, rows_of_stacks
        ):
            if isinstance(rows, slice):
                self._follow_(average_RD[rows], weight_RD[rows], through_R[rows])
                through_R[rows] = now
            elif rows.numel():
                average_UD = average_RD.index_select(0, rows)
                weight_UD, since_U = (
                    weight_RD.index_select(0, rows),
                    through_R.index_select(0, rows),
                )
                average_RD.index_copy_(0, rows, self._follow_(average_UD, weight_UD, since_U))
                through_R.index_fill_(0, rows, now)

    def bring_up_to_date(self) -> None:
        if self.is_swapped:  # it was done then, and no step has been taken since
            return
        for i, weight_RD in enumerate(self.weights):
            nothing: list[Rows] = [slice(0, 0)] * len(self.weights)
            for start in range(0, len(weight_RD), _CHUNK_ROWS):
                nothing[i] = slice(start, start + _CHUNK_ROWS)
                self.before_update(nothing)

    def _follow_(self, average_UD: Tensor, weight_UD: Tensor, since_U: Tensor) -> Tensor:
        """Move averages, in place, to where weights that rested since then have led them."""
        kept_U = self._clock.kept(since_U).to(average_UD.dtype)
        return torch.lerp(weight_UD, average_UD, kept_U[:, None], out=average_UD)

"""LazyDP: DP-SGD whose noise waits until a row is read (Lim et al. 2024, arXiv:2404.08847).

A row that takes part in a step gets the step's noise with its gradient, at once, as in DP-SGD. All
other rows owe it. What they owe says nothing of anybody; it only must not show that they owed. So
what lands late, in one piece or several, lands on a grid of its own, on which weights add up
without rounding. A step's noise lands there too, and neither leaves a trace of where it came from
(`noise/regrid.py`): nobody can tell a row that was read, and paid in between, from one that was
not.
(The paper defers the noise of rows that were read, too. Their gradient is then rounded to float32
before its noise arrives, and low bits of a weight tell how many examples there were.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_dpsparse.engine.deferred import Clock
from lightning_dpsparse.engine.draws import StackNoise
from lightning_dpsparse.engine.mechanism import Draw, Mechanism, noise_on_rows
from lightning_dpsparse.engine.rows import RowGradient, add_to_rows, weighted_runs
from lightning_dpsparse.noise.grid import grid_of, round_to_
from lightning_dpsparse.noise.regrid import regrid_
from lightning_dpsparse.refused import Refused

# R rows of a stack, U rows that pay, K pairs of a row and a step that it owes, D width


@dataclass(frozen=True)
class LazyDP(Mechanism):
    """DP-SGD's released model, at the price of the rows that are read.

    A row pays what it owes before it is read, in training and in evaluation, and all rows pay
    before anything leaves: what can be seen has the distribution that DP-SGD gives it. SGD only.
    """

    aggregate: bool = True
    """Draw what a row owes at once. Otherwise step by step: as slow as it sounds, with memory for
    every step that the rows of a batch or chunk owe, and with noise_source=row_keyed the very draws
    of DP-SGD. For study."""

    chunk_rows: int = 1 << 14
    """Rows that pay at a time when all do."""

    is_private: ClassVar[bool] = True
    defers: ClassVar[bool] = True
    reaches_all_rows: ClassVar[bool] = True
    threat_model: ClassVar[str] = (
        "The adversary sees what is released (checkpoints, the final model, evaluations) and knows "
        "all other data. Not covered: one who watches the memory of the running job, where rows "
        "still owe noise."
    )

    def updates(self, clipped: RowGradient, num_rows: int, draw: Draw) -> Iterator[RowGradient]:
        return noise_on_rows(clipped, draw)


_LEAST_NOISE = 8
"""Spacings of the grid in the standard deviation of one step. With as many, rounding adds less than
a part in 700 to the variance of a payment, and several payments have the law of one."""

_ENOUGH_NOISE = 1 << 16
"""A finer grid gains nothing: learning rates may fall to a ten-thousandth."""

_HELD = 24
"""Binary digits that float32 holds."""


def payment_grid(weights: list[Tensor], noise_stddev: float) -> float | None:
    """The spacing of weights that owe noise, or None where there is none to owe.

    As fine as leaves room for weights four times the largest, and at least for one: float32 holds
    2^24 multiples exactly.
    """
    if noise_stddev == 0:
        return None
    largest = largest_of(weights)
    fine = math.ldexp(1.0, math.floor(math.log2(noise_stddev / _ENOUGH_NOISE)))
    least = math.ldexp(1.0, math.ceil(math.log2(max(1.0, 4.0 * largest))) - _HELD)
    grid = max(least, fine)
    if not is_felt(noise_stddev, grid):
        raise Refused(
            f"Expected noise of at least {_LEAST_NOISE * grid:.2g} on the weights in a step, found "
            f"{noise_stddev:.2g} (learning rate x noise multiplier x clip norm / batch): float32 "
            f"weights of up to {largest:.2g} have no digits left for it. Raise the learning rate "
            "or the clip norm, or use DPSGD."
        )
    return grid


def largest_of(weights: list[Tensor]) -> float:
    extremes = [torch.stack(w.aminmax()) for w in weights if w.numel()]
    return float(torch.cat(extremes).abs().max()) if extremes else 0.0


def has_room(largest: float, grid: float) -> bool:
    """Whether weights on this grid may double and still add up exactly."""
    return 2.0 * largest <= math.ldexp(grid, _HELD)


def is_felt(noise_stddev: float, grid: float | None) -> bool:
    """Whether a step's noise on the weights is large enough for their grid."""
    return grid is None or noise_stddev >= _LEAST_NOISE * grid


@dataclass(frozen=True)
class Bill:
    """theta <- decay * theta + noise on some rows, and they owe nothing through a step."""

    rows_U: Tensor
    noise_UD: Tensor
    decay_U: Tensor | None
    through: int


class Debts:
    """What the rows of one stack of tables owe. Secret, as are the weights until all is paid.

    Guarantees: a row pays for every step exactly once. An interruption can at worst make a row
    that was about to be read pay twice, never less than it owes. With a grid, weights are multiples
    of it once `put_on_grid` was called, and stay so.
    """

    def __init__(
        self,
        mechanism: LazyDP,
        weight_RD: Tensor,
        noise: StackNoise,
        clock: Clock,
        grid: float | None = None,
    ) -> None:
        self._mechanism, self._weight_RD, self._noise = mechanism, weight_RD, noise
        self._clock, self.grid = clock, grid
        self._paid_through_R = torch.zeros(
            len(weight_RD), dtype=torch.int32, device=weight_RD.device
        )
        self._payments = 0

    def put_on_grid(self) -> None:
        for some_rows in self._weight_RD.split(self._mechanism.chunk_rows):
            self._round_(some_rows)

    def _round_(self, values: Tensor) -> Tensor:
        return values if self.grid is None else round_to_(values, self.grid)

    def land(self, rows_U: Tensor, values_UD: Tensor, spacing: float, scale: float) -> Tensor:
        """A step on these rows, scaled and on the grid; values are multiples of `spacing`."""
        return self._land(rows_U, values_UD, spacing, scale, self._next_part())

    def _land(
        self, rows_U: Tensor, values_UD: Tensor, spacing: float, scale: float | Tensor, part: int
    ) -> Tensor:
        if self.grid is None:
            return values_UD.mul_(scale[:, None] if isinstance(scale, Tensor) else scale)
        dither_UD = torch.empty_like(values_UD)
        self._noise.dither_(dither_UD, "landing", self._clock.last_step, rows_U, part=part)
        return regrid_(values_UD, spacing, scale, self.grid, dither_UD)

    def bill(self, rows_U: Tensor) -> Bill:
        """What these rows owe: each listed once, in increasing order. It must be paid as drawn."""
        since_U = self._paid_through_R.index_select(0, rows_U)
        owed_UD = self._draw(rows_U, since_U, self._next_part())
        return Bill(rows_U, owed_UD, self._clock.decay(since_U), self._clock.now)

    def pay(self, bill: Bill) -> None:
        if bill.decay_U is None:
            add_to_rows(self._weight_RD, bill.rows_U, bill.noise_UD)
        else:
            old_UD = self._weight_RD.index_select(0, bill.rows_U)
            new_UD = old_UD.mul_(bill.decay_U.float()[:, None]).add_(bill.noise_UD)
            self._weight_RD.index_copy_(0, bill.rows_U, self._round_(new_UD))
        self.note(bill.rows_U, bill.through)

    def note(self, rows_U: Tensor, through: int) -> None:
        """These rows have paid through a step."""
        self._paid_through_R.index_fill_(0, rows_U, through)

    def owing(self, rows_U: Tensor) -> Tensor:
        """Those of the rows that owe anything."""
        return rows_U[self._paid_through_R.index_select(0, rows_U) < self._clock.now]

    def chunks(self) -> Iterator[tuple[int, int, int]]:
        """Pieces of work that `pay_chunk` does, in any order: first row, end, name."""
        for start in range(0, len(self._weight_RD), self._mechanism.chunk_rows):
            stop = min(start + self._mechanism.chunk_rows, len(self._weight_RD))
            yield start, stop, self._next_part()

    def pay_chunk(self, start: int, stop: int, part: int) -> None:
        """All rows from `start` to `stop` pay. Nothing is written before all is drawn."""
        since_U = self._paid_through_R[start:stop]
        if bool((since_U == self._clock.now).all()):
            return
        rows_U = torch.arange(start, stop, device=since_U.device)
        owed_UD = self._draw(rows_U, since_U, part)
        decay_U = self._clock.decay(since_U)
        weight_UD = self._weight_RD[start:stop]
        if decay_U is not None:
            self._round_(weight_UD.mul_(decay_U.float()[:, None]))
        weight_UD.add_(owed_UD)
        since_U.fill_(self._clock.now)

    def _draw(self, rows_U: Tensor, since_U: Tensor, part: int) -> Tensor:
        """The noise that each row owes, by now."""
        clock, width = self._clock, self._weight_RD.shape[1]
        if self._mechanism.aggregate:
            owed_UD = self._weight_RD.new_empty(len(rows_U), width)
            self._noise.fill_(owed_UD, "owed", clock.last_step, rows_U, part=part)
            return self._land(rows_U, owed_UD, grid_of(1.0), clock.stddev(since_U), part)
        position_K, step_K, coefficient_K = clock.steps_since(since_U)
        drawn_KD = self._weight_RD.new_empty(len(position_K), width)
        self._noise.fill_(
            drawn_KD, "gradient", clock.last_step, rows_U[position_K], part=part, steps_U=step_K
        )
        count_U = clock.now - since_U.long()
        start_U = count_U.cumsum(0) - count_U
        index_K = torch.arange(len(position_K), device=rows_U.device)
        # In units of the last step's coefficient: what one step owes has its spacing.
        last_U = torch.ones_like(since_U, dtype=torch.float64)
        is_owing_U = count_U > 0
        last_U[is_owing_U] = coefficient_K[(start_U + count_U - 1)[is_owing_U]]
        weight_K = (coefficient_K / last_U[position_K]).to(drawn_KD.dtype)
        owed_UD = weighted_runs(drawn_KD, index_K, start_U, weight_K)
        return self._land(rows_U, owed_UD, grid_of(1.0), last_U, part)

    def _next_part(self) -> int:
        self._payments += 1
        return self._payments

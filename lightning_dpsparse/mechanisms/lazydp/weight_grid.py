"""The grid of weights that owe noise: how far apart the numbers are that a weight may take.

Payments and steps are added to weights as multiples of one power of two, which float32 adds up
without rounding. So the sum of several payments is the same number whatever their order, and no low
bit of a weight tells when its row paid.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_dpsparse.refused import Refused

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

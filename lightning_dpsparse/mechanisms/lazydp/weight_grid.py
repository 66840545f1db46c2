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
"""Least number of grid spacings in the standard deviation of one step's noise. With so many,
rounding adds less than a part in 700 to the variance of a payment, and the sum of several payments
has the distribution of one."""

_ENOUGH_NOISE = 1 << 16
"""Number of grid spacings in the first step's noise that is always enough: the learning rate may
then fall to about a ten-thousandth."""

_HELD = 24
"""Number of binary digits that float32 holds."""


def payment_grid(weights: list[Tensor], noise_stddev: float) -> float | None:
    """The spacing of weights that owe noise; None means that there is no noise.

    It leaves room for weights four times as large as the largest now, and at least for 1.0: float32
    holds 2^24 multiples of the spacing exactly. It is no finer than is of use.
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

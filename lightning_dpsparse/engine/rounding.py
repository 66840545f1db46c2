"""How much arithmetic in float32 adds to a unit's sensitivity. It is taken off the clip norm.

A clipped sum X is made in float32 and rounded to the noise's grid (`noise/grid.py`). Without one
unit it would be X', and |X - X'| may exceed what that unit put in:

    grid    Every number that the unit touches may round one way with it and the other way without:
            up to one spacing each, sqrt(numbers) spacings in norm. Dense layers count whole, tables
            with the numbers of the rows that the unit read.
    sums    The sum of B clipped gradients has an error of about B 2^-24 C in norm, and another
            batch has another error. Four times that is allowed for. It is no proof: a proof that
            assumes nothing of how errors fall would need float64. The largest error that a search
            over aligned, cancelling and random gradients found is in `tests/engine/test_grid.py`.
    norms   Clip factors come from norms in float32, and terms that cancel within a unit leave a
            rest of sqrt(2^-23) C at most (`norms.not_below_rounding`).
    noise   A draw is the sum of a Gaussian part and of a small part that is not Gaussian
            (`noise/keystream.py`). Only the Gaussian part is relied on.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_dpsparse.noise.grid import grid_of
from lightning_dpsparse.noise.keystream import hidden_share
from lightning_dpsparse.refused import Refused

# B examples

_NORMS = 2.0**-11
"""Part of the sensitivity that is set aside for errors of norms."""
_SUMS = 2.0**-22
"""Part of the sensitivity that is set aside for errors of sums, for each example of a batch."""
_MOST = 0.25
"""Largest part of the clip norm that rounding may take."""


def price(noise_stddev: float, sensitivity: float, expected_batch: float, numbers: float) -> float:
    """Compute what rounding may add to the sensitivity, as a part of it.

    `numbers` is how many numbers a unit touches.
    `noise_stddev` and `sensitivity` are those of the sum that is released, in the same units.

    >>> round(price(0.001, 0.001, expected_batch=2048, numbers=461_000), 5)
    0.00255
    """
    by_grid = grid_of(noise_stddev) / sensitivity
    return fixed_price(noise_stddev, expected_batch) + by_grid * math.sqrt(numbers)


def room_left(
    noise_stddev: float, sensitivity: float, expected_batch: float, numbers_B: Tensor
) -> Tensor:
    """Compute the part of the clip norm that rounding leaves to each unit: one minus the price."""
    by_grid = grid_of(noise_stddev) / sensitivity
    fixed = fixed_price(noise_stddev, expected_batch)
    return torch.rsub(numbers_B.sqrt().mul_(by_grid), 1.0 - fixed)


def fixed_price(noise_stddev: float, expected_batch: float) -> float:
    """Compute the part of the price that does not come from a grid.

    It is the whole price where only comparisons with a threshold are released.
    """
    return 1.0 - hidden_share(noise_stddev) + _NORMS + _SUMS * expected_batch


def check_price(found: float) -> None:
    if found > _MOST:
        raise Refused(
            f"Expected rounding to float32 to take at most {_MOST:.0%} of the clip norm, found "
            f"{found:.0%}: the batch or the dense layers are too large for the noise. Use a "
            "smaller batch, or a smaller noise multiplier."
        )

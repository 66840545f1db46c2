"""What arithmetic in float32 adds to a unit's sensitivity. It is taken off the clip norm.

A clipped sum X is made in float32 and rounded to the noise's grid (`noise/grid.py`). Without one
unit it would be X', and |X - X'| may exceed what that unit put in:

    grid    Every number that the unit touches may round one way with it and the other way without:
            up to one spacing each, sqrt(numbers) spacings in norm. Dense layers count whole, tables
            with the numbers of the rows that the unit read.
    sums    Adding up B clipped gradients errs by about B 2^-24 C in norm, and another batch errs
            otherwise. Four times that is allowed for. It is no proof: a proof that assumes nothing
            of how errors fall would need float64. The worst that a search over aligned, cancelling
            and random gradients found is in `tests/engine/test_grid.py`.
    norms   Clip factors come from norms in float32, and terms that cancel within a unit leave a
            rest of sqrt(2^-23) C at most (`norms.not_below_rounding`).
    noise   A draw is the sum of a Gaussian and of a little that is not (`noise/keystream.py`). Only
            the Gaussian part is relied on.
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
_SUMS = 2.0**-22
"""For every example of a batch."""
_MOST = 0.25


def price(noise_stddev: float, sensitivity: float, expected_batch: float, numbers: float) -> float:
    """The part of the sensitivity that rounding may add, where a unit touches so many numbers.

    `noise_stddev` and `sensitivity` are those of the sum that is released, in the same units.

    >>> round(price(0.001, 0.001, expected_batch=2048, numbers=461_000), 5)
    0.00255
    """
    by_grid = grid_of(noise_stddev) / sensitivity
    return fixed_price(noise_stddev, expected_batch) + by_grid * math.sqrt(numbers)


def room_left(
    noise_stddev: float, sensitivity: float, expected_batch: float, numbers_B: Tensor
) -> Tensor:
    """One minus the price, for every unit."""
    by_grid = grid_of(noise_stddev) / sensitivity
    fixed = fixed_price(noise_stddev, expected_batch)
    return torch.rsub(numbers_B.sqrt().mul_(by_grid), 1.0 - fixed)


def fixed_price(noise_stddev: float, expected_batch: float) -> float:
    """The part of it that does not come from a grid. All, where only comparisons are released."""
    return 1.0 - hidden_share(noise_stddev) + _NORMS + _SUMS * expected_batch


def check_price(found: float) -> None:
    if found > _MOST:
        raise Refused(
            f"Expected rounding to float32 to take at most {_MOST:.0%} of the clip norm, found "
            f"{found:.0%}: the batch or the dense layers are too large for the noise. Use a "
            "smaller batch, or a smaller noise multiplier."
        )

"""One public grid for noise and for what it hides.

A float32 sum x + n tells more than its value. Which numbers it can take depends on x, so that its
low bits may give x away however much noise n there is (Mironov 2012, CCS). Two whole numbers have
no such bits: if X and N are multiples of one public spacing, X + N can be any multiple, whatever X
was. If N is a normal draw that was rounded to the grid, X + N is X plus the draw itself, rounded
afterwards, and so it is as private as X plus the draw. What rounding does to X before that is a
matter of sensitivity (`engine/rounding.py`).
"""

from __future__ import annotations

import math

from torch import Tensor

_LEVELS = 20
"""Number of binary digits of a standard deviation, in units of the grid. Draws of up to 9.3
standard deviations then have at most 24 digits, which float32 holds exactly."""


def grid_of(stddev: float) -> float:
    """Return the grid spacing for noise with this standard deviation: a power of two.

    Guarantees: the standard deviation is at least 2^19 and below 2^20 spacings.

    >>> grid_of(1.0) == 2.0**-19, grid_of(0.75) == 2.0**-20
    (True, True)
    """
    return math.ldexp(1.0, math.frexp(stddev)[1] - _LEVELS)


def round_to_(values: Tensor, grid: float) -> Tensor:
    """Round values to the nearest multiples of `grid`, in place.

    `grid` is a power of two, so that scaling is exact. Beyond 2^24 spacings every float32 number is
    a multiple already.
    """
    return values.mul_(1.0 / grid).round_().mul_(grid)

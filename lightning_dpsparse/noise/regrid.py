"""Rounding from one grid to another without a trace of the first.

Noise on one grid, scaled by a learning rate, lies on a spacing that no other grid is a multiple of.
If it were rounded as it is, some numbers of the new grid would be reached more often than their
neighbours, and some never. Which ones these are tells what the noise was before. So each number is
first moved at random within its own spacing. The number that is rounded may then lie anywhere with
equal probability, to 16 more bits. `mechanisms/lazydp/debts.py` uses this for deferred noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

# U rows, D width of a table

_CHUNK = 1 << 17
"""Numbers that are rounded at a time. They stay in cache."""


def regrid_(
    values_UD: Tensor, spacing: float, scale: float | Tensor, grid: float, dither_UD: Tensor
) -> Tensor:
    """Multiply the values by `scale` and round them to multiples of `grid`, in place.

    The values are multiples of `spacing`. `scale` may be a number for each row. `dither_UD` is
    uniform between -1/2 and 1/2. The work is done in float64, because products in float32 would
    have spacings of their own.
    """
    rows = max(1, _CHUNK // max(1, values_UD.shape[1]))
    for start in range(0, len(values_UD), rows):
        some = values_UD[start : start + rows]
        each = scale[start : start + rows, None] if isinstance(scale, Tensor) else scale
        moved = some.to(torch.float64).add_(dither_UD[start : start + rows], alpha=spacing)
        some.copy_(moved.mul_(each / grid).round_()).mul_(grid)
    return values_UD

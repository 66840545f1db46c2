"""Terms of a gradient that nearly cancel, where rounding in float32 is at its worst."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = torch.finfo(torch.float32).eps


def nearly_cancelling(
    positions: int, width: int, seed: int, size: float = 1e5
) -> tuple[Tensor, Tensor]:
    """a and g of one example, whose gradient is 1e-5 to 1e-2 of what it is a sum of."""
    generator = torch.Generator().manual_seed(seed)
    rest = 10 ** float(-5 + 3 * torch.rand(1, generator=generator))
    a = torch.randn(width, generator=generator) + rest * torch.randn(
        1, positions, width, generator=generator
    )
    sign = 1.0 - 2.0 * (torch.arange(positions) % 2)
    return a, size * sign[:, None] * torch.randn(1, 1, width, generator=generator)


def padded(value: Tensor, positions: int) -> Tensor:
    return F.pad(value, (0, 0, 0, positions - value.shape[1]))

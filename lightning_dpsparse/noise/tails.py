"""Normal draws that reach as far as normal draws do.

A generator that makes a normal draw of a number with b random bits never leaves +-sqrt(2 b ln 2):
5.8 standard deviations for torch's 24 bits on CPU, 6.7 for 32. That is too near. An example that
moves a coordinate by 1 / sigma standard deviations can push it to where no other data set's noise
ever reaches, in a share P(z > 5.8 - 1 / sigma) of the steps that it is in: at sigma = 0.8 in three
of a million. Whoever sees that knows for certain, and delta is often smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

TAIL = 5.0
"""Standard deviations beyond which draws are made anew: one draw of 1.7 million."""

_CHUNK = 1 << 17
"""Numbers looked at together on CPUs: few enough that mostly none is beyond. GPUs take 128 times as
many, so that they rarely wait for an answer."""


def deepen_tails_(
    drawn: Tensor, stddev: float, uniform: Callable[[int], Tensor], tail: float = TAIL
) -> Tensor:
    """Replace draws of N(0, stddev^2) beyond `tail` by such as have no end that matters.

    z <- sign(z) Psi^-1(u Psi(tail)) where |z| > tail, with u uniform in (0, 1]

    Guarantees: what was normal up to `tail`, with the right share beyond it, is normal as far as
    9.8 standard deviations. Mostly it costs one look for the largest draw.

    Args:
        drawn: Contiguous.
        uniform: uniform(count) gives fresh float64 numbers in (0, 1], with 53 bits.
    """
    size = _CHUNK if drawn.device.type == "cpu" else 128 * _CHUNK
    for piece in drawn.view(-1).split(size) if drawn.numel() else ():
        least, most = piece.aminmax()
        if max(-float(least), float(most)) > tail * stddev:
            is_beyond = piece.abs() > tail * stddev
            found = piece[is_beyond]
            share = 0.5 * math.erfc(tail / math.sqrt(2.0))
            new = torch.special.ndtri(uniform(found.numel()).to(found.device).mul_(share))
            piece[is_beyond] = new.mul_(-stddev).to(found.dtype).copysign_(found)
    return drawn

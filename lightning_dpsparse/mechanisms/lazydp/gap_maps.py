"""What many steps do to a row that waits and to its average, together, in closed form.

While a row waits, noise and decay move it, and after every step its average follows:

    theta <- a theta + s z,    m <- (1 - b) m + b theta

Each of the two is an *event*. Over a gap of events (h, n] they make one affine map with Gaussian
noise, the same for all coordinates of a row:

    theta_n = A theta_h + e1,    m_n = B m_h + D theta_h + e2
    e1 ~ N(0, S),    e2 = r e1 + N(0, T), independent of e1

The part r of e1 that has reached the average, and the variance T that e1 leaves open, say all that
a covariance would. Prefix sums would give the same numbers as differences of large ones: late in a
run, what a gap of two steps leaves open is a 10^-12th of a sum of squares, and float64 would lose
it. So maps are never divided by one another. They are composed: the first gap, then the second,

    A = A1 A2,  B = B1 B2,  D = A1 D2 + B2 D1,  S = A2^2 S1 + S2,  k = B2 r1 + D2 - r2 A2
    r = r2 + k A2 S1 / S,   T = k^2 S1 S2 / S + B2^2 T1 + T2

which is how variances of two samples are merged (Chan, Golub and LeVeque 1979). Everything but k is
a sum of terms that are not negative. In k two numbers of at most about one are subtracted, so that
its error is that of float64 near one, 10^-16, beside the difference of two steps' weights in the
average, 10^-6 after a million steps.

All gaps end now. The latest events form an open block, in which the map from every position to now
is kept up to date, event by event. Earlier blocks are closed: their maps lead to the block's end,
and one map for each block leads on to now. So an event costs a few operations on one block, and the
map of a row is composed of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# P positions (a position lies after each event, and one before the first), U rows

_BLOCK = 512
"""Number of events in a block."""

_IDENTITY = (1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
"""A, B, D, S, r and T of a gap without events."""


@dataclass(frozen=True)
class Gap:
    """What happened to the average of each of some rows while they waited, in float64."""

    share_U: Tensor
    """D: the part of the row of then that is in the average."""
    gain_U: Tensor
    """B + D - 1: what is missing of the two together. It is zero without decay."""
    slope_U: Tensor
    """r: the part of the row's noise that has reached the average."""
    spread_U: Tensor
    """T: the variance of the average that the row's noise leaves open."""


class GapMaps:
    """The maps from every position to now.

    Args:
        decay_P: A of the gaps from each position so far to now, when the first event is yet to be
            averaged. The last of them is one.
        variance_P: S of the same gaps.
    """

    def __init__(self, decay_P: Tensor, variance_P: Tensor) -> None:
        zero, one = torch.zeros_like(decay_P), torch.ones_like(decay_P)
        self._maps = torch.stack([decay_P, one, zero, variance_P, zero, zero])
        self._first = self._open = self._now = len(decay_P) - 1
        # Everything before the first position of a block is a closed block of its own.
        self._tails = _identity(decay_P, 1)
        """From the end of each closed block to the beginning of the open one."""
        self._each: Tensor | None = None
        """What `_since` gives for every position, until the next event."""
        self._grow()

    def _grow(self) -> None:
        more = _identity(self._maps, max(_BLOCK, self._maps.shape[1]))
        self._maps = torch.cat([self._maps, more], dim=1)

    def add_noise(self, decay: float, variance: float) -> None:
        """A step's noise has reached all rows that wait: theta <- a theta + s z."""
        a, b, d, before, r, t = self._open_maps
        total = (before * (decay * decay)).add_(variance)
        part = torch.where(total > 0, before / total, 0.0)
        spread = (r * r).mul_(variance).mul_(part).add_(t)
        self._write(torch.stack([a * decay, b, d, total, (r * decay).mul_(part), spread]))

    def add_average(self, share: float) -> None:
        """All averages have followed their rows: m <- (1 - b) m + b theta."""
        keep = 1.0 - share
        a, b, d, s, r, t = self._open_maps
        slope = (r * keep).add_(share).masked_fill_(s == 0, 0.0)
        self._write(
            torch.stack([a, b * keep, (d * keep).add_(a * share), s, slope, t * (keep * keep)])
        )

    @property
    def _open_maps(self) -> Tensor:
        """A, B, D, S, r and T of the open block. Most of an event is zero or one: what is written
        instead is `compose_gaps` with it, to the bit, in a third of the operations."""
        return self._maps[:, self._open : self._now + 1]

    def _write(self, maps: Tensor) -> None:
        """An event has happened: these are the maps of the open block."""
        self._open_maps.copy_(maps)
        self._each = None
        self._now += 1
        if self._now == self._maps.shape[1]:
            self._grow()
        if self._now - self._open == _BLOCK:
            total = self._maps[:, self._open : self._open + 1]
            self._tails = torch.cat([compose_gaps(self._tails, total), _identity(total, 1)], dim=1)
            self._open = self._now

    def since(self, position_U: Tensor) -> Gap:
        """The gaps from these positions to now."""
        if self._now + 1 < position_U.numel():  # each position once is less
            each = self._each  # by a name of its own: other threads ask, too
            if each is None:
                positions = torch.arange(self._now + 1, device=position_U.device)
                each = self._each = self._since(positions)
            return Gap(*(values_P.index_select(0, position_U) for values_P in each))
        return Gap(*self._since(position_U.long()))

    def _since(self, position_U: Tensor) -> Tensor:
        """D, B + D - 1, r and T, along the first axis."""
        is_open = _identity(self._tails, 1)
        total = self._maps[:, self._open : self._open + 1]
        tails = torch.cat([compose_gaps(self._tails, total), is_open], dim=1)
        block_U = (position_U - self._first).div_(_BLOCK, rounding_mode="floor").add_(1)
        block_U.clamp_min_(0)
        maps = compose_gaps(self._maps.index_select(1, position_U), tails.index_select(1, block_U))
        _, kept_U, share_U, _, slope_U, spread_U = maps
        return torch.stack([share_U, kept_U + share_U - 1.0, slope_U, spread_U])


def compose_gaps(first: Sequence[Tensor] | Tensor, then: Sequence[float] | Tensor) -> Tensor:
    """The maps of gaps that are followed by other gaps: (A, B, D, S, r, T) along the first axis."""
    a1, b1, d1, s1, r1, t1 = first
    a2, b2, d2, s2, r2, t2 = then
    total = a2 * a2 * s1 + s2
    part = torch.where(total > 0, s1 / total, 0.0)  # without noise there is nothing to share
    k = b2 * r1 + d2 - r2 * a2
    slope = r2 + k * a2 * part
    spread = k * k * s2 * part + b2 * b2 * t1 + t2
    return torch.stack([a1 * a2, b1 * b2, a1 * d2 + b2 * d1, total, slope, spread])


def _identity(like: Tensor, count: int) -> Tensor:
    return like.new_tensor(_IDENTITY)[:, None].repeat(1, count)

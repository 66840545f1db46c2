"""Privacy losses on a grid of equally spaced points, rounded so that epsilon is never too small.

A pair of distributions (P, Q) with losses between two points of the grid is replaced by one that
has them on the two points, with the same mass under P and under Q. That raises delta(epsilon)
everywhere, and by as little as the grid allows ("connecting the dots", Doroshenko et al. 2022,
arXiv:2207.04380). Here masses are computed interval by interval, and not as differences of values
of delta: rounding errors stay relative to each interval's own mass.
"""

from __future__ import annotations

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf, PLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from numpy.typing import NDArray

Array = NDArray[np.float64]

MOST_POINTS = 1 << 22
"""Most points of a grid. More take minutes, and then more memory than there is."""

_TAIL = 36.0  # log(2 / 1e-15)

# K intervals between K + 1 points of the grid


class TooManyPointsError(Exception):
    """A grid would have more than `MOST_POINTS` points. A coarser one gives an upper bound too."""


def check_points(count: float) -> None:
    """Refuse to compute on so many points, before memory is asked for."""
    if not count <= MOST_POINTS:
        raise TooManyPointsError


def points_after(pmf: PLDPmf, count: int) -> float:
    """About how many points the loss of `count` runs has, whose single loss this is.

    dp-accounting cuts the tails by Chernoff's bound, at orders t of 1 to 20 over the number of
    points: (count log E exp(t (X - EX)) + log(2 / tail)) / t on either side. With the variance v of
    the loss, log E exp(t (X - EX)) is about v t^2 / 2.
    """
    probabilities = np.asarray(pmf.to_dense_pmf()._probs)
    places, total = np.arange(probabilities.size), max(float(probabilities.sum()), 1e-300)
    mean = float(places @ probabilities) / total
    variance = float(np.square(places - mean) @ probabilities) / total
    order = np.arange(1, 21) / probabilities.size
    return float(2.0 * np.min(count * variance * order / 2.0 + _TAIL / order))


def both_ways(
    first: int, p_K: Array, q_K: Array, p_above: float, q_above: float, grid: float
) -> PrivacyLossDistribution:
    """The loss when a unit is removed (P against Q) and when it is added (Q against P).

    Args:
        first: The lowest point, in units of the grid.
        p_K: Mass of P between neighbouring points.
        q_K: Mass of Q between the same points.
        p_above: Mass of P above the highest point: counted as an infinite loss.
        q_above: Mass of Q above the highest point, where the loss of Q against P is lowest.
        grid: Distance between neighbouring points.
    """
    removed = one_way(first, p_K, q_K, p_above, grid)
    below = np.append(q_above, q_K[::-1])  # one interval more: its loss is at most its upper end
    added = one_way(-first - p_K.size - 1, below, np.append(0.0, p_K[::-1]), 0.0, grid)
    return PrivacyLossDistribution(removed, added)


def one_way(first: int, p_K: Array, q_K: Array, infinite: float, grid: float) -> PLDPmf:
    """The loss of P against Q."""
    point_K = (first + np.arange(p_K.size)) * grid
    upper_K = np.clip((p_K - q_K * np.exp(point_K)) / -np.expm1(-grid), 0.0, p_K)
    mass = np.append(p_K - upper_K, 0.0)
    mass[1:] += upper_K
    return DensePLDPmf(grid, first, mass, infinite, pessimistic_estimate=True)


def from_losses(loss: Array, mass: Array, infinite: float, grid: float) -> PLDPmf:
    """The distribution of any losses, the mass of each moved to the two points beside it."""
    below = np.floor(loss / grid).astype(np.int64)
    first = int(below.min())
    count = int(below.max()) - first + 1
    upper = mass * np.clip(np.expm1(below * grid - loss) / np.expm1(-grid), 0.0, 1.0)
    lower_K = np.bincount(below - first, weights=mass - upper, minlength=count)
    upper_K = np.bincount(below - first, weights=upper, minlength=count)
    points = np.append(lower_K, 0.0)
    points[1:] += upper_K
    return DensePLDPmf(grid, first, points, infinite, pessimistic_estimate=True)

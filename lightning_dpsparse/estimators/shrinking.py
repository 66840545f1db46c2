"""The nearest points of two balls.

Both move every coordinate towards zero by the same amount, as far as it goes. `projection.py` needs
the nearest point of an l1 ball in l2, and `output.py` that of an l2 ball in l_inf.
"""

from __future__ import annotations

import math

import numpy as np

from lightning_dpsparse.estimators.rows import Array


def shrink(point_D: Array, threshold: float) -> Array:
    """sign(x) max(0, |x| - t), which is in every norm the smallest point within t of x in l_inf."""
    shrunk_D: Array = np.sign(point_D) * np.maximum(np.abs(point_D) - threshold, 0.0)
    return shrunk_D


def project_onto_l1_ball(point_D: Array, radius: float) -> Array:
    """argmin ||z - x||_2 over ||z||_1 <= radius.

    With sizes a_1 >= a_2 >= ..., t = (sum_{j<=k} a_j - radius) / k for the largest k with
    sum_{j<=k} (a_j - a_k) < radius.

    >>> project_onto_l1_ball(np.array([3.0, -1.0]), 2.0).tolist()
    [2.0, -0.0]
    """
    sizes_D = -np.sort(-np.abs(point_D))
    sums_D = np.cumsum(sizes_D)
    if sums_D[-1] <= radius:
        return np.array(point_D)
    ranks_D = np.arange(1, sizes_D.size + 1)
    k = int(np.count_nonzero(sums_D - ranks_D * sizes_D < radius))
    return shrink(point_D, float(sums_D[k - 1] - radius) / k)


def nearest_in_l2_ball(point_D: Array, radius: float) -> Array:
    """argmin ||z - x||_inf over ||z||_2 <= radius, and of those the one of least norm.

    Within t of x in l_inf, the smallest point is shrink(x, t): t is the least with
    ||shrink(x, t)||_2 <= radius, the smaller root of k t^2 - 2 t sum a_j + sum a_j^2 = radius^2
    over the k largest sizes.

    >>> nearest_in_l2_ball(np.array([3.0, -1.0]), 2.0).tolist()
    [2.0, -0.0]
    """
    sizes_D = -np.sort(-np.abs(point_D))
    sums_D, squares_D = np.cumsum(sizes_D), np.cumsum(sizes_D**2)
    if squares_D[-1] <= radius**2:
        return np.array(point_D)
    ranks_D = np.arange(1, sizes_D.size + 1)
    norms_D = (
        squares_D - 2.0 * sizes_D * sums_D + ranks_D * sizes_D**2
    )  # of shrink(x, a_k), squared
    k = int(np.count_nonzero(norms_D < radius**2))
    total, square = float(sums_D[k - 1]), float(squares_D[k - 1])
    inside = max(0.0, total**2 - k * (square - radius**2))
    return shrink(point_D, (total - math.sqrt(inside)) / k)

"""Noise and statistic on one public grid. Nothing else in `estimators/` draws noise.

A float64 sum x + n tells more than its value: which numbers it can take depends on x, and its low
bits may give x away (Mironov 2012; `noise/grid.py`). Here the statistic and the noise are whole
numbers of one public spacing, and are added as 64-bit integers. The noise is a draw n, rounded.
Since X + round(n) = round(X + n) for a whole number X, the release is as private as X + n is.
What is left is how far one example moves X:

    sums    Every number of a clipped row is rounded towards zero before it is added. No row grows
            longer by that, and a sum of integers has no error, in whatever order. Only the clip
            errs, since it is computed in float64: by (D + 16) 2^-52 of the clip norm at most.
    points  A point, such as a minimum, is rounded to the nearest. Each of its D numbers may round
            one way with an example and the other way without: sqrt(D) spacings more in l2, and D
            spacings more in l1.

Both are added to the sensitivity before the noise is scaled. Integers wrap around at 2^63 spacings,
which takes 2^25 rows at the least and costs no privacy: what is then released is X + N modulo 2^64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lightning_dpsparse.checks import check_choice, check_kind
from lightning_dpsparse.estimators.rows import Array, Rows, sum_of
from lightning_dpsparse.noise.grid import grid_of

Kind = Literal["gaussian", "laplace"]
"""Gaussian noise is for an l2 bound and a delta; Laplace noise for an l1 bound, and pure DP."""
Whole = NDArray[np.int64]

_FINER = 2.0**-10
"""The spacing here divided by that of `grid_of`, whose numbers have to fit into float32."""
_LEAST = 2.0**-8
"""The smallest noise multiplier that makes the grid finer."""
_LARGEST = 2.0**62
"""Largest coordinate of a point, in spacings, to fit an integer. Cutting moves no two apart."""
_CLIP_ERROR = 2.0**-52
"""Relative error of the norm of a clipped row, for each of its numbers and 16 more."""
_FAR = 32
"""Number of halvings after which the next ones are drawn anew."""

# D numbers


def spacing_of(sensitivity: float, noise_multiplier: float) -> float:
    """The spacing of the grid: a power of two, 2^-30 to 2^-29 of the noise's scale.

    It is so fine that a million columns add two millionths of the noise to an l2 sensitivity, and
    so coarse that float64 draws of a generator leave no whole number out: some 2^20 of numpy's
    normal draws lead to each number within 4 standard deviations, and at least one within 8. Below
    a noise multiplier of 2^-8 the spacing stays as it is at 2^-8, so that large sums fit.

    >>> spacing_of(1.0, 1.0) == 2.0**-29, spacing_of(0.5, 1.5) == 2.0**-30
    (True, True)
    """
    return grid_of(max(noise_multiplier, _LEAST) * sensitivity) * _FINER


def release_sum(
    parts: Iterable[Rows],
    num_columns: int,
    *,
    clip_norm: float,
    noise_multiplier: float,
    kind: Kind = "gaussian",
    noise: np.random.Generator | None = None,
) -> Array:
    """The sum of all rows of all parts, with noise of scale noise_multiplier * priced clip norm.

    Rows come from `clip_rows`, and each depends on its own example alone.

    Guarantees: what is released is a multiple of `spacing_of(clip_norm, noise_multiplier)`; one
    example moves the sum by at most `priced_clip_norm`, in the norm of the noise. Without noise the
    sum is as it is.
    """
    if noise_multiplier == 0:
        return sum((sum_of(part) for part in parts), np.zeros(num_columns))
    spacing = spacing_of(clip_norm, noise_multiplier)
    total_D = np.zeros(num_columns, np.int64)
    for part in parts:
        np.add.at(total_D, part.indices, np.trunc(part.data / spacing).astype(np.int64))
    scale = noise_multiplier * priced_clip_norm(clip_norm, num_columns)
    return _add_noise(total_D, spacing, scale, kind, noise)


def release_point(
    point_D: Array,
    *,
    sensitivity: float,
    noise_multiplier: float,
    kind: Kind = "gaussian",
    noise: np.random.Generator | None = None,
) -> Array:
    """A point with noise of the scale noise_multiplier * priced sensitivity.

    Guarantees: what is released is a multiple of `spacing_of(sensitivity, noise_multiplier)`; an
    example that moves the point by `sensitivity` moves the rounded point by at most
    `priced_sensitivity`, in the norm of the noise. Without noise the point is as it is.
    """
    if noise_multiplier == 0:
        return np.array(point_D)
    spacing = spacing_of(sensitivity, noise_multiplier)
    inside_D = np.clip(point_D, -_LARGEST * spacing, _LARGEST * spacing)
    whole_D = np.rint(inside_D / spacing).astype(np.int64)
    priced = priced_sensitivity(sensitivity, noise_multiplier, point_D.size, kind)
    return _add_noise(whole_D, spacing, noise_multiplier * priced, kind, noise)


def priced_clip_norm(clip_norm: float, num_columns: int) -> float:
    """The most that one row of `clip_rows` adds to a sum: (1 + (D + 16) 2^-52) clip_norm."""
    return clip_norm * (1.0 + (num_columns + 16) * _CLIP_ERROR)


def priced_sensitivity(
    sensitivity: float, noise_multiplier: float, size: int, kind: Kind = "gaussian"
) -> float:
    """The sensitivity of a rounded point: sqrt(D) spacings more in l2, D spacings more in l1.

    >>> priced_sensitivity(1.0, 1.0, size=1_000_000) - 1.0 < 2e-6
    True
    """
    numbers = math.sqrt(size) if kind == "gaussian" else float(size)
    return sensitivity + numbers * spacing_of(sensitivity, noise_multiplier)


def check_release(kind: object, noise: object = None) -> None:
    """Refuse a kind of noise that there is none of, and what draws no noise."""
    check_choice("kind", kind, get_args(Kind))
    if noise is not None:
        check_kind("noise", noise, np.random.Generator, remedy="Leave it out.")


def fresh(noise: np.random.Generator | None) -> np.random.Generator:
    """The generator given, or one seeded by the operating system.

    Giving one is for tests. Whoever can rebuild it can take the noise off again: the release is
    then not private, whatever its `event_of_...` says, which is for noise that nobody knows.
    """
    return np.random.default_rng() if noise is None else noise


def laplace(source: np.random.Generator, size: int) -> Array:
    """Draws of density exp(-|x|) / 2: a number of halvings, and a rest below one, with a sign.

    The logarithm of one uniform number would leave out most whole numbers beyond 15 scales, and
    end at 37: it has few values there. Here every stretch of length ln 2 has as many as the first.
    """
    rest_D = -np.log1p(-source.random(size) / 2.0)
    sizes_D = math.log(2.0) * _halvings(source, size) + rest_D
    return np.where(source.random(size) < 0.5, -sizes_D, sizes_D)


def _halvings(source: np.random.Generator, size: int) -> Whole:
    """How often a fair coin shows heads before it shows tails; numpy's own draws end at 53."""
    found_D = np.minimum(source.geometric(0.5, size) - 1, _FAR)
    far_D = np.flatnonzero(found_D == _FAR)
    if far_D.size:
        found_D[far_D] += _halvings(source, far_D.size)
    return found_D


def _add_noise(
    whole_D: Whole, spacing: float, scale: float, kind: Kind, noise: np.random.Generator | None
) -> Array:
    source, size = fresh(noise), whole_D.size
    drawn_D = source.standard_normal(size) if kind == "gaussian" else laplace(source, size)
    noise_D = np.rint(drawn_D * (scale / spacing)).astype(np.int64)
    # The conversion to float64 may round a number beyond 2^53: after the noise, that is harmless.
    noisy_D: Array = (whole_D + noise_D).astype(np.float64) * spacing
    return noisy_D

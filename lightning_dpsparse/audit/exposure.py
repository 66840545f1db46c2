"""How well a model remembers what it should not: exposure (Carlini et al. 2019, "Secret Sharer").

A canary is a random example that was put into the training data. Its exposure says how far its loss
stands out from the losses of random examples that were not put in (references). It is computed by
the rank of the canary among the references (interpolation), or by a distribution that is fitted to
them (extrapolation), which can tell more bits than the number of references allows.
Reference: arXiv:1802.08232, sections 4.2 and 4.3.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.stats import skewnorm

Losses = NDArray[np.float64]

# C canaries, R references


def exposure_by_rank(canary_C: Losses, reference_R: Losses) -> Losses:
    """log2 of (R + 1) over the canary's rank among the references, lowest loss first.

    The canary with the highest loss of all has exposure 0, the one with the lowest log2(R + 1). A
    tie counts half: a model with the same loss everywhere gives about 1 for all canaries.

    >>> exposure_by_rank(np.array([0.0, 9.0]), np.array([1.0, 2.0, 3.0])).tolist()
    [2.0, 0.0]
    """
    ordered_R = np.sort(reference_R)
    below_C = np.searchsorted(ordered_R, canary_C, side="left")
    ties_C = np.searchsorted(ordered_R, canary_C, side="right") - below_C
    found: Losses = math.log2(len(ordered_R) + 1) - np.log2(below_C + ties_C / 2 + 1)
    return found


def exposure_by_fit(canary_C: Losses, reference_R: Losses) -> Losses:
    """-log2 P(loss <= canary's) under a skew-normal distribution fitted to the references.

    The fit matches mean, variance and skewness. (Maximum likelihood finds other optima from other
    starts, and takes seconds.)
    """
    shape, location, scale = _skew_normal(reference_R)
    found: Losses = -skewnorm.logcdf(canary_C, shape, location, scale) / math.log(2.0)
    return np.maximum(found, 0.0)


def _skew_normal(values_R: Losses) -> tuple[float, float, float]:
    """Shape, location and scale with these values' first three moments.

    The skewness of a skew-normal distribution is below 0.9953; larger ones are cut to 0.99.
    """
    mean, stddev = float(values_R.mean()), float(values_R.std())
    if stddev == 0.0:
        return 0.0, mean, 1e-12
    skewness = float((((values_R - mean) / stddev) ** 3).mean())
    limit = min(abs(skewness), 0.99) ** (2.0 / 3.0)
    other = ((4.0 - math.pi) / 2.0) ** (2.0 / 3.0)
    d = math.copysign(math.sqrt(math.pi / 2.0 * limit / (limit + other)), skewness)
    scale = stddev / math.sqrt(1.0 - 2.0 * d * d / math.pi)
    return d / math.sqrt(1.0 - d * d), mean - scale * d * math.sqrt(2.0 / math.pi), scale

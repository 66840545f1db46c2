"""A clipped sum with noise: the plain mechanism, and what the others start from."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from lightning_dpsparse.accounting.events import DpEvent, gaussian, not_private, poisson
from lightning_dpsparse.accounting.losses import LaplaceDpEvent
from lightning_dpsparse.estimators.rows import Array, Rows, clip_rows, sum_of

Kind = Literal["gaussian", "laplace"]
"""Gaussian noise is for an l2 bound and a delta; Laplace noise for an l1 bound, and pure DP."""


def noisy_mean(
    vectors_ND: Rows,
    *,
    divisor: float,
    clip_norm: float,
    noise_multiplier: float,
    kind: Kind = "gaussian",
    noise: np.random.Generator | None = None,
) -> Array:
    """(sum_i clip(z_i) + noise) / divisor, for clip_norm in l2 (Gaussian) or l1 (Laplace).

    `divisor` is a public constant: the number of examples, or how many a sample has on average.
    Noise has the scale noise_multiplier * clip_norm. Dense in the D columns.

    Guarantees: one example moves the sum by at most `clip_norm`, in the norm of the noise.
    Error: L sqrt(d ln(1/delta)) / (epsilon n) for Gaussian noise and l2 norms of L; with l1 norms
    of L sqrt(s), L sqrt(s d) / (epsilon n) for Laplace noise.
    Reference: the poster, Table 1, last terms.
    """
    if not (divisor > 0 and clip_norm > 0 and noise_multiplier >= 0):
        raise ValueError(
            "Expected divisor > 0, clip_norm > 0 and noise_multiplier >= 0, found "
            f"{divisor}, {clip_norm} and {noise_multiplier}. Give each as a public constant."
        )
    total_D = sum_of(clip_rows(vectors_ND, clip_norm, 2 if kind == "gaussian" else 1))
    scale = noise_multiplier * clip_norm
    return (total_D + draw(total_D.size, scale, kind, noise)) / divisor


def draw(size: int, scale: float, kind: Kind, noise: np.random.Generator | None) -> Array:
    """Noise of this standard deviation (Gaussian) or scale (Laplace)."""
    source = fresh(noise)
    if kind == "gaussian":
        return source.normal(0.0, scale, size)
    return source.laplace(0.0, scale, size)


def fresh(noise: np.random.Generator | None) -> np.random.Generator:
    """The generator given, or one seeded by the operating system.

    Giving one is for tests. Whoever can rebuild it can take the noise off again: the release is
    then not private, whatever its `event_of_...` says, which is for noise that nobody knows.
    """
    return np.random.default_rng() if noise is None else noise


def event_of_mean(
    noise_multiplier: float, *, kind: Kind = "gaussian", rate: float = 1.0
) -> DpEvent:
    """Of one `noisy_mean` on all examples, or on a Poisson sample of them, its noise kept secret.

    Laplace noise of scale b / Delta costs Delta / b for every l1 bound Delta, in any dimension.

    >>> event_of_mean(2.0)
    GaussianDpEvent(noise_multiplier=2.0)
    """
    if math.isnan(noise_multiplier) or noise_multiplier < 0:
        raise ValueError(f"Expected noise_multiplier >= 0, found {noise_multiplier}. Add noise.")
    if kind == "gaussian":
        whole = gaussian(noise_multiplier)
    else:
        whole = LaplaceDpEvent(float(noise_multiplier)) if noise_multiplier else not_private()
    return whole if rate == 1.0 else poisson(rate, whole)

"""The projection mechanism: a noisy mean, moved to the nearest point where a sparse mean can be.

Means of sparse, bounded examples lie in a small l1 ball. The noise of `mean.py` leaves the ball in
nearly all of the D columns; the nearest point in the ball has lost most of that noise, and finding
it costs no privacy.
"""

from __future__ import annotations

import math

import numpy as np

from lightning_dpsparse.accounting.events import DpEvent
from lightning_dpsparse.checks import check_number, check_whole
from lightning_dpsparse.estimators.mean import event_of_mean, noisy_mean
from lightning_dpsparse.estimators.release import Kind
from lightning_dpsparse.estimators.rows import Array, Rows
from lightning_dpsparse.estimators.shrinking import project_onto_l1_ball


def projected_mean(
    vectors_ND: Rows,
    *,
    divisor: float,
    clip_norm: float,
    max_nonzeros: int,
    noise_multiplier: float,
    kind: Kind = "gaussian",
    noise: np.random.Generator | None = None,
) -> Array:
    """argmin ||z - (mean + noise)||_2 over ||z||_1 <= L sqrt(s), L = clip_norm, s = max_nonzeros.

    A vector with s non-zeros and l2 norm L has an l1 norm of at most L sqrt(s), and so has a mean
    of such. Gaussian noise is for a clip to L in l2; Laplace noise for one to L sqrt(s) in l1. A
    vector with more non-zeros costs accuracy, never privacy. Dense in the D columns.

    Error, in l2: L (s ln(d) ln(1/delta))^(1/4) / sqrt(epsilon n) for Gaussian noise, and
    L sqrt(s ln(d) / (epsilon n)) for Laplace noise, or the plain mechanism's if that is less.
    Reference: the poster, Projection Mechanism; Nikolov, Talwar and Zhang 2013 (arXiv:1212.0297).
    """
    check_number("clip_norm", clip_norm, above=0)
    check_whole("max_nonzeros", max_nonzeros)
    radius = clip_norm * math.sqrt(max_nonzeros)
    noisy_D = noisy_mean(
        vectors_ND,
        divisor=divisor,
        clip_norm=clip_norm if kind == "gaussian" else radius,
        noise_multiplier=noise_multiplier,
        kind=kind,
        noise=noise,
    )
    return project_onto_l1_ball(noisy_D, radius)


def event_of_projection(
    noise_multiplier: float, *, kind: Kind = "gaussian", rate: float = 1.0
) -> DpEvent:
    """The privacy event of the noisy mean. The projection after it is post-processing."""
    return event_of_mean(noise_multiplier, kind=kind, rate=rate)

"""The plain mechanism: a clipped sum with noise, divided by a public number.

Its error grows with the square root of the number of columns. `projection.py`, `sketch.py` and
`bias_reduced.py` start from it and do better on sparse examples.
"""

from __future__ import annotations

import numpy as np

from lightning_dpsparse.accounting.events import DpEvent, gaussian, not_private, poisson
from lightning_dpsparse.accounting.privacy_loss import LaplaceDpEvent
from lightning_dpsparse.checks import check_number, check_share
from lightning_dpsparse.estimators.release import Kind, check_release, release_sum
from lightning_dpsparse.estimators.rows import Array, Rows, clip_rows, numbers
from lightning_dpsparse.refused import Refused


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
    Noise has the scale noise_multiplier * clip_norm, up to rounding. Dense in the D columns.

    Guarantees: before noise and division, the sum is on a public grid, and one example moves it by
    at most the clip norm that the noise is for (`release.py`).
    Error: L sqrt(d ln(1/delta)) / (epsilon n) for Gaussian noise and l2 norms of L; with l1 norms
    of L sqrt(s), L sqrt(s d) / (epsilon n) for Laplace noise.
    Reference: the poster, Table 1, last terms.
    """
    remedy = "Give it as a public constant."
    check_number("divisor", divisor, above=0, remedy=remedy)
    check_number("clip_norm", clip_norm, above=0, remedy=remedy)
    check_number("noise_multiplier", noise_multiplier, least=0, remedy=remedy)
    check_release(kind, noise)
    vectors_ND = numbers(vectors_ND, "vectors_ND")
    if vectors_ND.ndim != 2:
        raise Refused(
            f"Expected a row for each example, found {vectors_ND.ndim} dimensions. Give an array "
            "of examples and columns."
        )
    rows_ND = clip_rows(vectors_ND, clip_norm, 2 if kind == "gaussian" else 1)
    noisy_D = release_sum(
        [rows_ND],
        rows_ND.shape[1],
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        kind=kind,
        noise=noise,
    )
    return noisy_D / divisor


def event_of_mean(
    noise_multiplier: float, *, kind: Kind = "gaussian", rate: float = 1.0
) -> DpEvent:
    """The privacy event of one `noisy_mean`, of all examples or of a Poisson sample of them.

    It holds if the noise is kept secret.

    Laplace noise of scale b / Delta costs Delta / b for every l1 bound Delta, in any dimension.

    >>> event_of_mean(2.0)
    GaussianDpEvent(noise_multiplier=2.0)
    """
    check_number("noise_multiplier", noise_multiplier, least=0, remedy="Add noise.")
    check_share("rate", rate, remedy="Without sampling it is 1.")
    check_release(kind)
    if kind == "gaussian":
        whole = gaussian(noise_multiplier)
    else:
        whole = LaplaceDpEvent(float(noise_multiplier)) if noise_multiplier else not_private()
    return whole if rate == 1.0 else poisson(rate, whole)

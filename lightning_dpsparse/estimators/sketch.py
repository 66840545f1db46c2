"""Gaussian l1 recovery: a mean from fewer noisy numbers than it has columns.

A random matrix (the sketch) maps every example to a few measurements, and only these get noise. The
mean is then the vector of least l1 norm with these measurements, which is found by a linear program
(basis pursuit) and is close to the true mean if that is nearly sparse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from scipy.optimize import linprog

from lightning_dpsparse.accounting.events import DpEvent
from lightning_dpsparse.checks import check_number, check_whole
from lightning_dpsparse.estimators.mean import event_of_mean
from lightning_dpsparse.estimators.release import fresh, release_sum
from lightning_dpsparse.estimators.rows import Array, Rows, as_rows, clip_rows
from lightning_dpsparse.refused import Refused

MOST_ENTRIES = 1 << 26
"""Of a sketch, which is dense: half a gigabyte. The linear program needs twice that again."""
_CHUNK = 1 << 22  # entries of sketched examples at a time

# N examples, D columns, M measurements


def sketch_size(
    *, num_columns: int, max_nonzeros: int, divisor: float, noise_multiplier: float
) -> int:
    """Number of measurements, M = n / sigma sqrt(s ln(d/s)), at most the columns; n is the divisor.

    Basis pursuit from M Gaussian measurements errs by at most a constant times

        ||noise||_2 + (distance to the nearest k-sparse vector in l1) / sqrt(k), k ~ M / ln(d/M).

    Noise of sigma L / n on each measurement makes the first L sigma sqrt(M) / n: more measurements,
    more noise. The mean's l1 norm is at most L sqrt(s), so the second is at most
    L sqrt(s ln(d/M) / M): more measurements, better recovery. This M makes both alike, and with
    sigma = sqrt(ln(1/delta)) / epsilon it is the poster's, epsilon n sqrt(s ln(d/s) / ln(1/delta)).
    sigma is that of *one* release: a step of many has a larger one, and a smaller sketch.

    If M is the number of columns, a sketch gains nothing: take the plain mechanism.
    Reference: the poster, Gaussian l1-Recovery; Wojtaszczyk 2010 for the error.
    """
    spread = max_nonzeros * math.log(max(math.e, num_columns / max_nonzeros))
    # At no noise the quotient is infinite, and all columns are measured.
    size = divisor * math.sqrt(spread) / max(noise_multiplier, 1e-300)
    return max(1, math.ceil(min(num_columns, size)))


def draw_sketch(
    num_measurements: int, num_columns: int, noise: np.random.Generator | None = None
) -> Array:
    """A dense matrix of independent N(0, 1/M) entries. It depends on no data."""
    check_whole("num_measurements", num_measurements)
    check_whole("num_columns", num_columns)
    if num_measurements >= num_columns:
        raise Refused(
            f"Expected fewer measurements than columns, found {num_measurements} and "
            f"{num_columns}. Use noisy_mean: a sketch would gain nothing."
        )
    if num_measurements * num_columns > MOST_ENTRIES:
        raise Refused(
            f"Expected a sketch of at most {MOST_ENTRIES:,} entries, found {num_measurements:,} x "
            f"{num_columns:,}. Use projected_mean, which needs a few vectors of that many columns."
        )
    shape = (num_measurements, num_columns)
    return fresh(noise).normal(0.0, num_measurements**-0.5, shape)


def sketched_clip_norm(clip_norm: float, num_measurements: int) -> float:
    """Norm to which sketched examples are clipped: three standard deviations above their own.

    ||A z|| / ||z|| has mean 1 and standard deviation (2M)^(-1/2), nearly.
    """
    return clip_norm * (1.0 + 3.0 / math.sqrt(2.0 * num_measurements))


def sketched_rows(vectors_ND: Rows, sketch_MD: Array, clip_norm: float) -> Iterator[Rows]:
    """clip(A z_i) of every example, some at a time. The clip is after the sketch: any A will do.

    Guarantees: no row is longer than sketched_clip_norm(clip_norm, M) in l2, up to rounding.
    """
    rows_ND = as_rows(vectors_ND)
    size, bound = sketch_MD.shape[0], sketched_clip_norm(clip_norm, sketch_MD.shape[0])
    step = max(1, _CHUNK // size)
    for start in range(0, rows_ND.shape[0], step):
        part_NM = clip_rows(rows_ND[start : start + step], clip_norm) @ sketch_MD.T
        yield clip_rows(part_NM, bound)


def sketched_mean(
    vectors_ND: Rows,
    sketch_MD: Array,
    *,
    divisor: float,
    clip_norm: float,
    noise_multiplier: float,
    noise: np.random.Generator | None = None,
) -> Array:
    """argmin ||z||_1 over A z = b, where b = (sum_i clip(A z_i) + N(0, sigma^2 C^2 I)) / divisor.

    C is sketched_clip_norm(clip_norm, M). The poster trusts A to keep all norms (RIP), which holds
    only with high probability; here the sketched examples are clipped, and privacy holds for all A.

    Error, in l2: L sqrt(sigma / n) (s ln(d/s))^(1/4) at M = sketch_size(...), for vectors of l2
    norm L = clip_norm with s non-zeros: L (s ln(d/s) ln(1/delta))^(1/4) / sqrt(epsilon n).
    Memory: M x D for the sketch, dense; the linear program takes seconds from a thousand columns.
    Reference: the poster, Gaussian l1-Recovery.
    """
    check_number("divisor", divisor, above=0)
    check_number("clip_norm", clip_norm, above=0)
    check_number("noise_multiplier", noise_multiplier, least=0)
    noisy_M = release_sum(
        sketched_rows(vectors_ND, sketch_MD, clip_norm),
        sketch_MD.shape[0],
        clip_norm=sketched_clip_norm(clip_norm, sketch_MD.shape[0]),
        noise_multiplier=noise_multiplier,
        noise=noise,
    )
    return recover(sketch_MD, noisy_M / divisor)


def recover(sketch_MD: Array, measured_M: Array) -> Array:
    """Basis pursuit, argmin ||z||_1 over A z = b: z = u - v with u, v >= 0 is a linear program."""
    largest = float(np.abs(measured_M).max())
    if largest == 0.0:
        return np.zeros(sketch_MD.shape[1])
    found = linprog(
        np.ones(2 * sketch_MD.shape[1]),
        A_eq=np.hstack([sketch_MD, -sketch_MD]),
        b_eq=measured_M / largest,  # the solver's tolerances are absolute
        bounds=(0, None),
        method="highs",
    )
    if found.status != 0:
        raise Refused(
            f"Expected a solved linear program, found {found.message!r}. Draw another sketch, with "
            "fewer measurements."
        )
    above_D, below_D = np.split(found.x, 2)
    recovered_D: Array = (above_D - below_D) * largest
    return recovered_D


def event_of_sketch(noise_multiplier: float, *, rate: float = 1.0) -> DpEvent:
    """The privacy event of a Gaussian. The clip after the sketch bounds its sensitivity."""
    return event_of_mean(noise_multiplier, rate=rate)

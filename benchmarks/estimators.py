"""How does the error of a private mean grow with n, d and s? The rates of the poster, measured.

n vectors of l2 norm 1 with s non-zeros each, all positive, in the first columns of d: how many
columns they share is varied, and the worst of these is reported. Budget: epsilon 1 for every
estimator, delta 1e-6 (0 for laplace), one example added or removed, noise by this package's
accounting.

gaussian      the plain mechanism
projection    Gaussian noise, then the l1 ball
laplace       Laplace noise, then the l1 ball: pure DP
output        output perturbation of the loss -<z, x> over the unit ball: its excess risk
sketch        l1 recovery: a linear program each, so on smaller sizes, others beside it
bias_reduced  one estimate, charged with every level it may draw; its error is a root mean square
              over levels and does not fall with n, since small batches come most often

All errors but output's are in l2: root mean squares over seeds, with their standard errors. Slopes
are least squares in log-log, with standard errors that follow from those; beside each is that of
the bound on the same sizes, logarithms and the plain mechanism's bound included, the poster's
"1 and no more" left out. Bounds are worst cases over all data and have no constants: slopes on this
data may lie on either side. The poster has no rate for one estimate of bias_reduced: the bound
beside it is this package's own.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse
from scipy.optimize import brentq
from scipy.stats import norm as normal

from benchmarks.harness import print_table, write_json_lines
from benchmarks.rates import Panels, Row, plot, slopes
from lightning_dpsparse.estimators.bias_reduced import (
    Levels,
    bias_reduced_mean,
    event_of_bias_reduced,
)
from lightning_dpsparse.estimators.calibration import noise_multiplier_for
from lightning_dpsparse.estimators.mean import Kind, event_of_mean, noisy_mean
from lightning_dpsparse.estimators.output import (
    l2_sensitivity,
    perturbed_minimiser,
    regularisation_for,
)
from lightning_dpsparse.estimators.projection import projected_mean
from lightning_dpsparse.estimators.rows import Array, sum_of
from lightning_dpsparse.estimators.sketch import draw_sketch, sketch_size, sketched_mean

EPSILON, DELTA = 1.0, 1e-6
Sizes = tuple[int, int, int]
"""n, d and s."""
Measure = Callable[[Any, Sizes, float, np.random.Generator], float]
"""The squared error, or the risk, on vectors of these sizes with this noise multiplier."""

GRIDS: dict[str, dict[str, list[Sizes]]] = {
    "large": {
        "n": [(n, 16_384, 4) for n in (256, 512, 1_024, 2_048, 4_096)],
        "d": [(1_024, d, 4) for d in (4_096, 8_192, 16_384, 32_768, 65_536)],
        "s": [(1_024, 16_384, s) for s in (1, 2, 4, 8, 16)],
    },
    "small": {
        "n": [(n, 1_024, 2) for n in (40, 80, 160, 320)],
        "d": [(96, d, 2) for d in (256, 512, 1_024, 2_048)],
        "s": [(96, 1_024, s) for s in (1, 2, 4, 8)],
    },
}


def vectors(sizes: Sizes, active: int, source: np.random.Generator) -> Any:
    """Runs of s neighbouring columns, of the first `active` ones, from a random start."""
    n, d, s = sizes
    columns = (source.integers(0, active, (n, 1)) + np.arange(s)) % active
    row = np.repeat(np.arange(n), s)
    return sparse.csr_array((np.full(n * s, s**-0.5), (row, columns.ravel())), (n, d))


def squared_error(found_D: Array, vectors_ND: Any) -> float:
    return float(np.sum((found_D - sum_of(vectors_ND) / vectors_ND.shape[0]) ** 2))


def gaussian(z_ND: Any, sizes: Sizes, sigma: float, source: np.random.Generator) -> float:
    found_D = noisy_mean(
        z_ND, divisor=sizes[0], clip_norm=1.0, noise_multiplier=sigma, noise=source
    )
    return squared_error(found_D, z_ND)


def projection(
    z_ND: Any,
    sizes: Sizes,
    sigma: float,
    source: np.random.Generator,
    kind: Kind = "gaussian",
) -> float:
    found_D = projected_mean(
        z_ND,
        divisor=sizes[0],
        clip_norm=1.0,
        max_nonzeros=sizes[2],
        noise_multiplier=sigma,
        kind=kind,
        noise=source,
    )
    return squared_error(found_D, z_ND)


def laplace(z_ND: Any, sizes: Sizes, sigma: float, source: np.random.Generator) -> float:
    return projection(z_ND, sizes, sigma, source, kind="laplace")


def sketch(z_ND: Any, sizes: Sizes, sigma: float, source: np.random.Generator) -> float:
    n, d, s = sizes
    size = sketch_size(num_columns=d, max_nonzeros=s, divisor=n, noise_multiplier=sigma)
    sketch_MD = draw_sketch(size, d, source)
    found_D = sketched_mean(
        z_ND, sketch_MD, divisor=n, clip_norm=1.0, noise_multiplier=sigma, noise=source
    )
    return squared_error(found_D, z_ND)


def output(z_ND: Any, sizes: Sizes, sigma: float, source: np.random.Generator) -> float:
    """The risk -<mean, x> is least at mean / norm; with a penalty, at mean / lambda if shorter."""
    n, d, s = sizes
    penalty = regularisation_for(
        lipschitz=1.0,
        radius=1.0,
        num_examples=n,
        num_columns=d,
        max_nonzeros=s,
        epsilon=EPSILON,
        delta=DELTA,
        smoothness=0.0,
    )
    mean_D = sum_of(z_ND) / n
    norm = float(np.linalg.norm(mean_D))
    found_D = perturbed_minimiser(
        mean_D / max(penalty, norm),
        sensitivity=l2_sensitivity(
            lipschitz=1.0, regularisation=penalty, num_examples=n, tolerance=0.0
        ),
        radius=1.0,
        noise_multiplier=sigma,
        noise=source,
    )
    return norm - float(mean_D @ found_D)


def bias_reduced(z_ND: Any, sizes: Sizes, sigma: float, source: np.random.Generator) -> float:
    """One estimate at every level, weighted by its chance."""
    levels = levels_of(sizes[0])
    total = 0.0
    for level, chance in enumerate(levels.chances()):
        found_D = bias_reduced_mean(
            z_ND,
            level,
            levels,
            clip_norm=1.0,
            max_nonzeros=sizes[2],
            noise_multiplier=sigma,
            noise=source,
        )
        total += float(chance) * squared_error(found_D, z_ND)
    return total


def levels_of(n: int) -> Levels:
    """From one example to all."""
    return Levels(num_examples=n, last=n.bit_length() - 2)


# ---- noise for epsilon 1, and bounds -------------------------------------------------------------


@cache
def plain_noise(n: int) -> float:
    return noise_multiplier_for(event_of_mean, EPSILON, DELTA)


@cache
def pure_noise(n: int) -> float:
    return noise_multiplier_for(partial(event_of_mean, kind="laplace"), EPSILON, 0.0)


@cache
def noise_of_levels(n: int) -> float:
    return noise_multiplier_for(partial(event_of_bias_reduced, levels=levels_of(n)), EPSILON, DELTA)


def plain_bound(n: int, d: int, s: int) -> float:
    return math.sqrt(d * math.log(1 / DELTA)) / (EPSILON * n)


def sparse_bound(n: int, d: int, s: int) -> float:
    bound = (s * math.log(d) * math.log(1 / DELTA)) ** 0.25 / math.sqrt(EPSILON * n)
    return min(bound, plain_bound(n, d, s))


def sketch_bound(n: int, d: int, s: int) -> float:
    bound = (s * math.log(d / s) * math.log(1 / DELTA)) ** 0.25 / math.sqrt(EPSILON * n)
    return min(bound, plain_bound(n, d, s))


def pure_bound(n: int, d: int, s: int) -> float:
    return min(math.sqrt(s * math.log(d) / (EPSILON * n)), math.sqrt(s * d) / (EPSILON * n))


def own_bound(n: int, d: int, s: int) -> float:
    """sum_k p_k (the bound at 2^k / p_k)^2 is the same at all of ln(n) levels."""
    return (s * math.log(d) * math.log(1 / DELTA)) ** 0.25 * math.sqrt(math.log2(n) / EPSILON)


def expected_output(n: float, d: float, s: int, sigma: float) -> float:
    """The risk of `output` where all vectors are the same, which is where it is worst here.

    The mean is s^(-1/2) on s columns, and every column has noise nu = sigma / (lambda n). The
    projection takes t from all sizes, with t the least that brings the point into the ball,
    d E[(|nu g| - t)_+^2] + s ((s^(-1/2) - t)_+^2 + nu^2) = 1, and the risk is sqrt(s) t. The bound
    has the largest of d noises in place of t: about 4 nu at these sizes, where t is 2 nu.
    """
    penalty = math.sqrt(math.sqrt(s * math.log(d) * math.log(1 / DELTA)) / (EPSILON * n))
    nu = sigma / (penalty * n)

    def excess(t: float) -> float:
        passed = 2.0 * ((1.0 + t**2) * normal.sf(t) - t * normal.pdf(t))
        left = max(0.0, s**-0.5 - t * nu)
        return float(d * nu**2 * passed + s * (left**2 + nu**2 * (left > 0)) - 1.0)

    return math.sqrt(s) * nu * float(brentq(excess, 0.0, 20.0))


@dataclass(frozen=True, kw_only=True)
class Estimator:
    measure: Measure
    bound: Callable[[int, int, int], float]
    bound_of: str
    noise: Callable[[int], float] = plain_noise
    """The noise multiplier for n examples."""
    grids: tuple[str, ...] = ("large",)
    ratio: int = 2
    """From one number of shared columns to the next; 0 where they do not matter."""
    draws: int = 1
    """Of data and noise, for every seed."""
    is_risk: bool = False


ESTIMATORS: dict[str, Estimator] = {
    "gaussian": Estimator(
        measure=gaussian,
        bound=plain_bound,
        bound_of="poster, Table 1",
        grids=("large", "small"),
        ratio=0,
    ),
    "projection": Estimator(
        measure=projection,
        bound=sparse_bound,
        bound_of="poster, Table 1, with ln(d) for ln(d/s)",
        grids=("large", "small"),
    ),
    "laplace": Estimator(
        measure=laplace, bound=pure_bound, bound_of="poster, Table 1", noise=pure_noise
    ),
    "output": Estimator(
        measure=output, bound=sparse_bound, bound_of="poster, Table 2, ERM", draws=8, is_risk=True
    ),
    "sketch": Estimator(
        measure=sketch, bound=sketch_bound, bound_of="poster, Table 1", grids=("small",), ratio=4
    ),
    "bias_reduced": Estimator(
        measure=bias_reduced,
        bound=own_bound,
        bound_of="this package",
        noise=noise_of_levels,
        ratio=4,
    ),
}


# ---- errors --------------------------------------------------------------------------------------


def worst_error(name: str, sizes: Sizes, seeds: int) -> Row:
    """Over how many columns the vectors share: the largest mean over seeds, and its error."""
    chosen, (n, d, s) = ESTIMATORS[name], sizes
    worst: Row = {"error": 0.0}
    active = s
    while active <= d:
        found = []
        for seed in range(seeds * chosen.draws):
            source = np.random.default_rng((seed, n, d, s, active))
            z_ND = vectors(sizes, active, source)
            found.append(chosen.measure(z_ND, sizes, chosen.noise(n), source))
        mean, spread = float(np.mean(found)), float(np.std(found, ddof=1)) / math.sqrt(len(found))
        # The root of a mean square has the error of the square over twice the root.
        error = mean if chosen.is_risk else math.sqrt(mean)
        if error > worst["error"]:
            worst = {"error": error, "se": spread if chosen.is_risk else spread / (2.0 * error)}
            worst["active"] = active
        if not chosen.ratio:
            break
        active *= chosen.ratio
    return worst


def table(seeds: int) -> list[Row]:
    """One row for every estimator, grid, sweep and size."""
    rows: list[Row] = []
    for name, chosen in ESTIMATORS.items():
        for grid in chosen.grids:
            for sweep, points in GRIDS[grid].items():
                print(f"{name} against {sweep}, {grid}", file=sys.stderr)
                for sizes in points:
                    found = worst_error(name, sizes, seeds)
                    rows.append(
                        {"estimator": name, "grid": grid, "sweep": sweep, **dict(zip("nds", sizes))}
                        | {"epsilon": EPSILON, "delta": 0.0 if name == "laplace" else DELTA}
                        | {"noise_multiplier": round(chosen.noise(sizes[0]), 4), "seeds": seeds}
                        | {"active": found["active"], "error": round(found["error"], 5)}
                        | {"se": round(found["se"], 6), "bound": round(chosen.bound(*sizes), 5)}
                        | {"bound_of": chosen.bound_of}
                    )
    return rows


PANELS: Panels = {
    "large sizes, epsilon 1": ("large", ("gaussian", "projection", "laplace", "output")),
    "small sizes, epsilon 1": ("small", ("gaussian", "projection", "sketch")),
    "one estimate, epsilon 1": ("large", ("bias_reduced",)),
}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.estimators",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=12, help="of data and noise: none is private")
    parser.add_argument("--json", type=Path, help="write one JSON object per size to this file")
    parser.add_argument("--slopes", type=Path, help="write one JSON object per estimator to this")
    parser.add_argument("--plot", type=Path, help="write the panels to this PNG file")
    return parser


def main() -> None:
    options = parser().parse_args()
    rows = table(options.seeds)
    found = slopes(rows)
    print_table(rows)
    print()
    print_table(found)
    if options.json:
        write_json_lines(rows, options.json)
    if options.slopes:
        write_json_lines(found, options.slopes)
    if options.plot:
        plot(rows, PANELS, options.plot)


if __name__ == "__main__":
    main()

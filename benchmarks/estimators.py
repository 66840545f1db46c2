"""How does the error of a private mean grow with n, d and s? The rates of the poster, measured.

n vectors of l2 norm 1 with s non-zeros each, all positive, in the first columns of d: how many
columns they share is varied, and the worst of these is reported. Budget: epsilon 1, delta 1e-6,
one example added or removed, noise by this package's accounting.

gaussian      the plain mechanism
projection    Gaussian noise, then the l1 ball
laplace       Laplace noise, then the l1 ball: pure DP
sketch        l1 recovery, on smaller sizes: a linear program each
output        output perturbation of the loss -<z, x> over the unit ball: its excess risk
bias_reduced  one estimate whose batches have the budget's noise each: root mean square over levels

All errors but output's are in l2. Slopes are least squares in log-log; beside each is that of the
poster's bound on the same sizes, logarithms and the plain mechanism's bound included. The bounds
are worst cases over all data and have no constants: slopes on this data may lie on either side.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from benchmarks.harness import print_table, write_json_lines
from lightning_dpsparse.estimators.bias_reduced import Levels, bias_reduced_mean
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
Row = dict[str, Any]
Sizes = tuple[int, int, int]
"""n, d and s."""
Measure = Callable[[Any, Sizes, float, np.random.Generator], float]
"""The squared error, or the risk, on vectors of these sizes with this noise multiplier."""

LARGE: dict[str, list[Sizes]] = {
    "n": [(n, 16_384, 4) for n in (256, 512, 1_024, 2_048, 4_096)],
    "d": [(1_024, d, 4) for d in (4_096, 8_192, 16_384, 32_768, 65_536)],
    "s": [(1_024, 16_384, s) for s in (1, 2, 4, 8, 16)],
}
SMALL: dict[str, list[Sizes]] = {
    "n": [(n, 512, 2) for n in (64, 128, 256)],
    "d": [(96, d, 2) for d in (256, 512, 1_024)],
    "s": [(96, 512, s) for s in (1, 2, 4, 8)],
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
    return projection(z_ND, sizes, 1.0 / EPSILON, source, kind="laplace")


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
    levels = Levels(num_examples=sizes[0], last=sizes[0].bit_length() - 2)
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


def plain_bound(n: int, d: int, s: int) -> float:
    return math.sqrt(d * math.log(1 / DELTA)) / (EPSILON * n)


def sparse_bound(n: int, d: int, s: int) -> float:
    bound = (s * math.log(d / s) * math.log(1 / DELTA)) ** 0.25 / math.sqrt(EPSILON * n)
    return min(bound, plain_bound(n, d, s))


def pure_bound(n: int, d: int, s: int) -> float:
    return min(math.sqrt(s * math.log(d) / (EPSILON * n)), math.sqrt(s * d) / (EPSILON * n))


def variance_bound(n: int, d: int, s: int) -> float:
    """sum_k p_k (the bound at 2^k / p_k)^2 is the same at all of ln(n) levels."""
    return (s * math.log(d / s) * math.log(1 / DELTA)) ** 0.25 * math.sqrt(math.log2(n) / EPSILON)


ESTIMATORS: dict[str, tuple[Measure, Callable[[int, int, int], float]]] = {
    "gaussian": (gaussian, plain_bound),
    "projection": (projection, sparse_bound),
    "laplace": (laplace, pure_bound),
    "sketch": (sketch, sparse_bound),
    "output": (output, sparse_bound),
    "bias_reduced": (bias_reduced, variance_bound),
}


def worst_error(name: str, sizes: Sizes, sigma: float, repeats: int, seed: int) -> float:
    """Over how many columns the vectors share: s, 2 s, 4 s, ..."""
    measure, worst = ESTIMATORS[name][0], 0.0
    active = sizes[2]
    while active <= sizes[1]:
        source = np.random.default_rng((seed, active))
        found = [
            measure(vectors(sizes, active, source), sizes, sigma, source) for _ in range(repeats)
        ]
        mean = float(np.mean(found))
        worst, active = max(worst, mean if name == "output" else math.sqrt(mean)), 2 * active
    return worst


def table(repeats: int, seed: int) -> list[Row]:
    """One row for every estimator, sweep and size."""
    sigma = noise_multiplier_for(event_of_mean, EPSILON, DELTA)
    rows: list[Row] = []
    for name, (_, bound) in ESTIMATORS.items():
        for sweep, grid in (SMALL if name == "sketch" else LARGE).items():
            print(f"{name} against {sweep}", file=sys.stderr)
            for sizes in grid:
                found = dict(zip("nds", sizes))
                error = worst_error(name, sizes, sigma, repeats, seed)
                rows.append(
                    {"estimator": name, "sweep": sweep, **found}
                    | {"error": round(error, 5), "bound": round(bound(*sizes), 5)}
                )
    return rows


def slopes(rows: Sequence[Row]) -> list[Row]:
    """A row for every estimator, a pair of columns for every sweep."""

    def slope(points: Sequence[Row], sweep: str, value: str) -> float:
        x, y = (np.log([point[key] for point in points]) for key in (sweep, value))
        return round(float(np.polyfit(x, y, 1)[0]), 3)

    found: list[Row] = []
    for name in dict.fromkeys(row["estimator"] for row in rows):
        line: Row = {"estimator": name}
        for sweep in "nds":
            points = [row for row in rows if row["estimator"] == name and row["sweep"] == sweep]
            line[f"slope_{sweep}"] = slope(points, sweep, "error")
            line[f"poster_{sweep}"] = slope(points, sweep, "bound")
        found.append(line)
    return found


def plot(rows: Sequence[Row], path: Path) -> None:
    """Error against n, d and s: a panel each, with the poster's bounds dotted."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(13, 4.2), sharey=True, layout="constrained")
    names = list(dict.fromkeys(row["estimator"] for row in rows))
    for axes, sweep in zip(panels, "nds"):
        for number, name in enumerate(names):
            points = [row for row in rows if row["estimator"] == name and row["sweep"] == sweep]
            x = [point[sweep] for point in points]
            errors = [point["error"] for point in points]
            bounds = np.array([point["bound"] for point in points])
            axes.plot(x, errors, "o-", color=f"C{number}", label=name, markersize=4)
            scaled = bounds * errors[0] / bounds[0]  # the bound's constant is unknown
            axes.plot(x, scaled, ":", color=f"C{number}", linewidth=1)
        axes.set(xscale="log", yscale="log", xlabel=sweep)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("error (dotted: the bound's slope)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right", frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.estimators",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--repeats", type=int, default=3, help="of every measurement")
    parser.add_argument("--seed", type=int, default=0, help="of data and noise: none is private")
    parser.add_argument("--json", type=Path, help="write one JSON object per size to this file")
    parser.add_argument("--plot", type=Path, help="write the three panels to this PNG file")
    return parser


def main() -> None:
    options = parser().parse_args()
    rows = table(options.repeats, options.seed)
    print_table(rows)
    print()
    print_table(slopes(rows))
    if options.json:
        write_json_lines(rows, options.json)
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()

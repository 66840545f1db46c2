"""Slopes of errors in the sizes of a problem, beside those of bounds: fitted, and drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]
"""Of one estimator, grid, sweep and size: error, its standard error, and bound."""
Panels = Mapping[str, tuple[str, Sequence[str]]]
"""By title: a grid, and the estimators to draw on it."""


def slope(points: Sequence[Row], sweep: str, value: str) -> tuple[float, float]:
    """Of log value in log size, and its standard error: a sum of independent log values."""
    x, y = (np.log([point[key] for point in points]) for key in (sweep, value))
    weights = (x - x.mean()) / np.sum((x - x.mean()) ** 2)
    errors = np.array([point["se"] / point["error"] for point in points])
    return float(weights @ y), float(np.sqrt(np.sum((weights * errors) ** 2)))


def slopes(rows: Sequence[Row]) -> list[Row]:
    """A row for every estimator and grid; for every sweep its slope, standard error and bound's."""
    found: list[Row] = []
    for name, grid in dict.fromkeys((row["estimator"], row["grid"]) for row in rows):
        mine = [row for row in rows if (row["estimator"], row["grid"]) == (name, grid)]
        line: Row = {"estimator": name, "grid": grid}
        for sweep in "nds":
            points = [row for row in mine if row["sweep"] == sweep]
            fitted, error = slope(points, sweep, "error")
            numbers = (fitted, error, slope(points, sweep, "bound")[0])
            for key, number in zip(("slope", "se", "bound"), numbers):
                line[f"{key}_{sweep}"] = round(number, 3) + 0.0  # no minus zero
        line["bound_of"] = mine[0]["bound_of"]
        found.append(line)
    return found


def plot(rows: Sequence[Row], panels: Panels, path: Path) -> None:
    """Error against n, d and s, with standard errors, and the bounds dotted at their height."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    figure, grid_of_axes = plt.subplots(
        len(panels), 3, figsize=(12, 3.7 * len(panels)), sharey="row", squeeze=False,
        layout="constrained",
    )  # fmt: skip
    everyone = dict.fromkeys(row["estimator"] for row in rows)
    colors = {name: f"C{number}" for number, name in enumerate(everyone)}
    for line, (title, (grid, names)) in zip(grid_of_axes, panels.items()):
        for axes, sweep in zip(line, "nds"):
            for name in names:
                key = (name, grid, sweep)
                points = [r for r in rows if (r["estimator"], r["grid"], r["sweep"]) == key]
                curve(axes, points, sweep, name, colors[name])
            axes.set(xscale="log", yscale="log", xlabel=sweep)
            axes.set_xticks([p[sweep] for p in points], [f"{p[sweep]:,}" for p in points])
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.yaxis.set_major_locator(
                LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0), numticks=99)
            )
            axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.minorticks_off()
            axes.grid(axis="y", color="0.9", linewidth=0.8)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(
                frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0),
                title="slope fitted / of the bound", title_fontsize=8,
            )  # fmt: skip
        line[0].set_ylabel(f"{title}\nerror ± standard error (dotted: the bound)")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def curve(axes: Any, points: Sequence[Row], sweep: str, name: str, color: str) -> None:
    """Errors with bars, and the bound at the same height: its constant is unknown."""
    x, bounds = [point[sweep] for point in points], np.array([point["bound"] for point in points])
    errors = np.array([point["error"] for point in points])
    fitted, of_bound = slope(points, sweep, "error"), slope(points, sweep, "bound")[0]
    numbers = [round(number, 3) + 0.0 for number in (*fitted, of_bound)]
    label = "{} {:.3f} ± {:.3f} / {:.3f}".format(name, *numbers)
    bars = [point["se"] for point in points]
    axes.errorbar(x, errors, bars, fmt="o-", color=color, label=label, markersize=4, capsize=3)
    height = np.exp(np.mean(np.log(errors) - np.log(bounds)))
    axes.plot(x, bounds * height, ":", color=color, linewidth=1.5)

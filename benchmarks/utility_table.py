"""What the runs of `benchmarks.utility` say: a table of everything, tables by epsilon, and a plot.

Means are over seeds, with standard errors. `epsilon` is the largest that the privacy reports of a
group's runs claim. A gain is told against the variant that differs in one lever (`Variant.over`),
at the same data, target and seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import markdown
from benchmarks.tradeoff import standard_error
from benchmarks.utility_run import METRICS
from benchmarks.utility_settings import VARIANTS

Row = dict[str, Any]
SIDE_RESULTS = {"calibration": "predicted over real clicks", "log_loss": "log loss"}
PRIVATE = {name: v for name, v in VARIANTS.items() if v.privacy == "epsilon"}


def summary(rows: Sequence[Row]) -> list[Row]:
    """Means over seeds, with standard errors: (mean, error), or None where there is nothing."""
    groups: dict[tuple[str, float, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((data_name(row), row["target"] or 0.0, row["variant"]), []).append(row)
    order, table = list(VARIANTS), []
    for (data, target, variant), group in sorted(
        groups.items(), key=lambda item: (*item[0][:2], order.index(item[0][2]))
    ):
        score = "auc" if group[0]["auc"] is not None else "recall@10"
        over = VARIANTS[variant].over
        yardstick = {row["seed"]: row[score] for row in groups.get((data, target, over), ())}
        gains = [row[score] - yardstick[row["seed"]] for row in group if row["seed"] in yardstick]
        claims = [row["epsilon"] for row in group]
        table.append(
            {
                "data": data,
                "variant": variant,
                "target": target or None,
                # The largest of the claims; none if any run makes none.
                "epsilon": None if None in claims else max(claims),
                "seeds": len(group),
                "noise": mean_and_error([row["noise_multiplier"] for row in group]),
                "epochs": group[0]["epochs"],
                "steps": round(statistics.mean(row["steps"] for row in group)),
                "score": mean_and_error([row[score] for row in group]),
                **{name: mean_and_error([row[name] for row in group]) for name in METRICS},
                "gain": None if variant == over else mean_and_error(gains),
                "gain_seeds": len(gains),
                "over": "" if variant == over or not gains else over,
                "seconds": round(statistics.mean(row["seconds"] for row in group)),
            }
        )
    return table


def data_name(row: Row) -> str:
    """Data of one generator seed for all runs is told from data of a seed for each."""
    if row["generator_seed"] in (None, row["seed"]):
        return str(row["data"])
    return f"{row['data']}, generator {row['generator_seed']}"


def mean_and_error(values: Sequence[float | None]) -> tuple[float, float] | None:
    known = [value for value in values if value is not None]
    return (statistics.mean(known), standard_error(known)) if known else None


def reported(table: Sequence[Row]) -> list[Row]:
    """Without the data that settings were chosen on."""
    return [row for row in table if ", generator " not in row["data"]]


# ---- tables -------------------------------------------------------------------------------------


def as_shown(table: Sequence[Row]) -> list[Row]:
    """The summary as text. One seed has no error."""
    return [
        {
            "data": row["data"],
            "variant": row["variant"],
            "target": "" if row["target"] is None else f"{row['target']:g}",
            "epsilon": "" if row["epsilon"] is None else f"{_up(row['epsilon']):g}",
            "seeds": row["seeds"],
            "noise": "" if row["noise"] is None else f"{row['noise'][0]:.4f}",
            "epochs": row["epochs"],
            "steps": row["steps"],
            **{name: _pair(row[name], row["seeds"]) for name in METRICS},
            "gain": _pair(row["gain"], row["gain_seeds"], "+.4f"),
            "over": row["over"],
            "seconds": row["seconds"],
        }
        for row in table
    ]


def by_epsilon(table: Sequence[Row], data: str, value: str = "score") -> list[Row]:
    """One line for each variant of a data set, one column for each epsilon, as text.

    What costs no epsilon has the same number in every column. Means of fewer than three seeds say
    how many.
    """
    here = [row for row in table if row["data"] == data]
    targets = sorted({row["target"] for row in here if row["target"] is not None})
    cells = {(row["variant"], row["target"]): row for row in here}
    lines = []
    for variant in VARIANTS:
        found = [cells.get((variant, target)) or cells.get((variant, None)) for target in targets]
        if any(found):
            lines.append(
                {"variant": f"`{variant}`"}
                | {f"ε = {target:g}": _cell(row, value) for target, row in zip(targets, found)}
            )
    return lines


BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def in_document(table: Sequence[Row], text: str) -> str:
    """The text with its tables of results written anew, between `BEGIN` and `END`."""
    lines: list[str] = []
    for data in dict.fromkeys(row["data"] for row in reported(table)):
        here = [row for row in table if row["data"] == data]
        clicks = here[0]["auc"] is not None
        lines += ["", f"**{data}**: {'AUC' if clicks else 'recall@10'}", ""]
        lines += markdown(by_epsilon(here, data))
        few = [row for row in here if row["variant"] in MAIN]
        for value, name in SIDE_RESULTS.items() if clicks else ():
            lines += ["", f"{data}: {name}", "", *markdown(by_epsilon(few, data, value))]
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return "\n".join([before + BEGIN, *lines, "", END + after])


def _cell(row: Row | None, value: str) -> str:
    if row is None or row[value] is None:
        return ""
    mean, error = row[value]
    if row["seeds"] >= 3:
        return f"{mean:.3f} ± {error:.3f}"
    return f"{mean:.3f} ({row['seeds']} seed{'s' * (row['seeds'] > 1)})"


def _pair(pair: tuple[float, float] | None, seeds: int, form: str = ".4f") -> str:
    if pair is None:
        return ""
    mean, error = pair
    return f"{mean:{form}}" + (f" ± {error:.4f}" if seeds > 1 else "")


def _up(epsilon: float) -> float:
    """Four digits, never rounded down."""
    return math.ceil(epsilon * 1e4) / 1e4


# ---- the plot -----------------------------------------------------------------------------------

MAIN = {
    "no_privacy": "#777777",
    "clipping": "#b8860b",
    "demo": "#c0392b",
    "epochs4": "#2a78b5",
    "short_scale2": "#7d3c98",
    "best": "#111111",
    "users": "#e08a7d",
    "users_epochs4": "#7fb3d9",
    "users_best": "#666666",
}
"""Variants whose scores are drawn against epsilon. All others show their gain alone."""
GAINS_AT = 8.0


def plot(table: Sequence[Row], path: Path) -> None:
    """For every data set: scores against epsilon, and what each lever brings at epsilon 8."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(row["data"] for row in table))
    figure, panels = plt.subplots(
        2, len(names), figsize=(5.6 * len(names), 9.2), layout="constrained", squeeze=False
    )
    for data, above, below in zip(names, *panels):
        here = [row for row in table if row["data"] == data]
        score = "AUC" if here[0]["auc"] is not None else "recall@10"
        _draw_scores(above, here)
        above.set(xlabel="ε", ylabel=f"validation {score}", title=data)
        _draw_gains(below, here)
        below.set(xlabel=f"{score} gained at ε = {GAINS_AT:g}, over the variant in brackets")
        for axes in (above, below):
            axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Bars are standard errors over seeds; in the legend, the number of seeds")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_scores(axes: Any, here: Sequence[Row]) -> None:
    for variant, colour in MAIN.items():
        rows = [row for row in here if row["variant"] == variant]
        if not rows:
            continue
        label = f"{variant} ({', '.join(str(n) for n in sorted({r['seeds'] for r in rows}))})"
        if variant not in PRIVATE:
            axes.axhline(rows[0]["score"][0], color=colour, linestyle="--", label=label)
            continue
        rows = [row for row in rows if row["epsilon"] is not None]
        axes.errorbar(
            [row["epsilon"] for row in rows],
            [row["score"][0] for row in rows],
            yerr=[row["score"][1] for row in rows],
            color=colour,
            marker="o",
            capsize=3,
            label=label,
        )
    targets = sorted({row["target"] for row in here if row["target"] is not None})
    if targets:
        axes.set_xscale("log")
        axes.set_xticks(targets, [f"{target:g}" for target in targets])
        axes.set_xticks([], minor=True)
        axes.set_xlim(targets[0] / 1.2, targets[-1] * 1.2)
    axes.legend(frameon=False, fontsize="small")


def _draw_gains(axes: Any, here: Sequence[Row]) -> None:
    rows = [row for row in here if row["target"] == GAINS_AT and row["over"]][::-1]
    if not rows:
        axes.set_axis_off()
        return
    places = range(len(rows))
    axes.barh(
        places,
        [row["gain"][0] for row in rows],
        xerr=[row["gain"][1] for row in rows],
        color=["#111111" if row["variant"] == "best" else "#9db7d0" for row in rows],
        error_kw={"elinewidth": 1, "capsize": 2},
    )
    axes.set_yticks(places, [f"{row['variant']} ({row['over']})" for row in rows], fontsize="small")
    axes.axvline(0.0, color="0.3", linewidth=1)

"""What does privacy cost in AUC, and which levers win some of it back at equal epsilon?

Every run trains one data set with one variant, epsilon and seed (`utility_settings.py` lists both):

demo       the DLRM and the 2 million synthetic clicks of recipes/dlrm_lazydp.yaml
pctr       the pCTR model of recipes/pctr_adafest.yaml on the same clicks, with LazyDP
movielens  the two-tower model of recipes/two_tower_movielens_lazydp.yaml: recall@10, not AUC
criteo     the demo's DLRM on logs that `lightning-dpsparse prepare criteo` wrote

Settings of a variant are chosen on data of generator seed 101 (--generator-seed 101), and reported
on data of seeds 0, 1, 2: a run's seed is its generator's too, unless told. The table and the plot
never mix the two. MovieLens and Criteo have no generator: only the seed of training changes there,
and what is tuned on them is tuned on what is reported. Use one results file for each release or
sample of them: a run does not know one from another.

Runs take minutes to hours. Each is appended to --json when it ends, and one that is there with the
same settings is not repeated, so that the command may be stopped and started again at any time.
`epsilon` is what the privacy report of the run claims, `target` what was asked for; gain is over
the variant `demo` at the same target and seed. Errors are standard errors of means over seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness import append_json_line, print_markdown
from benchmarks.step_time import get_ready
from benchmarks.tradeoff import read_json_lines, standard_error
from benchmarks.utility_run import METRICS, train
from benchmarks.utility_settings import VARIANTS, Task, tasks
from lightning_dpsparse.refused import Refused

Row = dict[str, Any]


# ---- all runs -----------------------------------------------------------------------------------


def key_of(row: Row) -> str:
    """What two runs have in common that need not both be made."""
    names = ("data", "variant", "target", "seed", "generator_seed", "settings")
    return json.dumps([row[name] for name in names], sort_keys=True)


def planned(options: argparse.Namespace, say: Callable[[str], None]) -> Iterator[tuple[Task, Row]]:
    """Every run that is asked for and possible, as the row that it will begin with."""
    known = tasks(options)
    for seed in range(options.seeds):  # outermost: all variants get a seed before the next begins
        for task in (known[name] for name in options.data):
            generator_seed = seed if options.generator_seed is None else options.generator_seed
            for name in options.variants:
                variant = VARIANTS[name]
                reason = task.why_not(variant)
                if reason is not None:
                    if seed == 0:
                        say(f"Skipped {task.name}, {name}: {reason}.")
                    continue
                targets = options.epsilons if variant.privacy == "epsilon" else [None]
                for target in targets:
                    setting = task.setting(variant, target)
                    yield (
                        task,
                        {
                            "data": task.name,
                            "variant": name,
                            "target": target,
                            "seed": seed,
                            "generator_seed": generator_seed if task.is_synthetic else None,
                            "settings": asdict(setting),
                        },
                    )


def run_all(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Make the runs that `--json` does not hold yet."""
    done = {key_of(row) for row in read_json_lines(options.json)}
    for task, begun in planned(options, say):
        if key_of(begun) in done:
            continue
        where = f"{begun['data']}, {begun['variant']}, ε {begun['target']}, seed {begun['seed']}"
        try:
            setting = task.setting(VARIANTS[begun["variant"]], begun["target"])
            found = train(task, setting, begun["target"], begun["seed"], begun["generator_seed"])
        except Refused as refusal:  # the runs after it may still be made
            say(f"Skipped {where}: {refusal}")
            continue
        append_json_line(begun | found, options.json)
        say(f"{where}: {json.dumps(found)}")


# ---- what the runs say --------------------------------------------------------------------------


def up_to_date(rows: Sequence[Row], known: Sequence[Task]) -> list[Row]:
    """Rows of settings that a variant has today, each run once: `best` may have had others."""
    by_name = {task.name: task for task in known}
    once = {key_of(row): row for row in rows}
    return [
        row
        for row in once.values()
        if row["data"] in by_name
        and row["variant"] in VARIANTS
        and row["settings"]
        == asdict(by_name[row["data"]].setting(VARIANTS[row["variant"]], row["target"]))
    ]


def data_name(row: Row) -> str:
    """Data of one generator seed for all runs is told from data of a seed for each."""
    if row["generator_seed"] in (None, row["seed"]):
        return str(row["data"])
    return f"{row['data']}, generator {row['generator_seed']}"


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
        yardstick = {row["seed"]: row[score] for row in groups.get((data, target, "demo"), ())}
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
                "gain": None if variant == "demo" else mean_and_error(gains),
                "gain_seeds": len(gains),
                "seconds": round(statistics.mean(row["seconds"] for row in group)),
            }
        )
    return table


def mean_and_error(values: Sequence[float | None]) -> tuple[float, float] | None:
    known = [value for value in values if value is not None]
    return (statistics.mean(known), standard_error(known)) if known else None


def as_shown(table: Sequence[Row]) -> list[Row]:
    """The summary as text. One seed has no error."""

    def pair(row: Row, name: str, form: str = ".4f") -> str:
        if row[name] is None:
            return ""
        mean, error = row[name]
        seeds = row["gain_seeds"] if name == "gain" else row["seeds"]
        return f"{mean:{form}}" + (f" ± {error:.4f}" if seeds > 1 else "")

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
            **{name: pair(row, name) for name in METRICS},
            "gain": pair(row, "gain", "+.4f"),
            "seconds": row["seconds"],
        }
        for row in table
    ]


def _up(epsilon: float) -> float:
    """Four digits, never rounded down."""
    return math.ceil(epsilon * 1e4) / 1e4


def plot(table: Sequence[Row], path: Path) -> None:
    """AUC (or recall) against epsilon, a panel for every data set."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(row["data"] for row in table))
    figure, panels = plt.subplots(
        1, len(names), figsize=(7.4 * len(names), 4.6), layout="constrained", squeeze=False
    )
    colours = {name: plt.get_cmap("tab20")(i % 20) for i, name in enumerate(VARIANTS)}
    colours["best"] = "black"
    for axes, data in zip(panels[0], names):
        here = [row for row in table if row["data"] == data]
        for variant, colour in colours.items():
            rows = [row for row in here if row["variant"] == variant]
            label = f"{variant} ({', '.join(str(n) for n in sorted({r['seeds'] for r in rows}))})"
            if VARIANTS[variant].privacy != "epsilon":
                for row in rows:
                    axes.axhline(row["score"][0], color=colour, linestyle="--", label=label)
                continue
            rows = [row for row in rows if row["epsilon"] is not None]
            if rows:
                axes.errorbar(
                    [row["epsilon"] for row in rows],
                    [row["score"][0] for row in rows],
                    yerr=[row["score"][1] for row in rows],
                    color=colour,
                    marker="o",
                    capsize=3,
                    label=label,
                )
        score = "AUC" if here[0]["auc"] is not None else "recall@10"
        axes.set(xscale="log", xlabel="ε", ylabel=f"validation {score}", title=data)
        targets = sorted({row["target"] for row in here if row["target"] is not None})
        if targets:
            axes.set_xticks(targets, [f"{target:g}" for target in targets])
            axes.set_xticks([], minor=True)
            axes.set_xlim(targets[0] / 1.2, targets[-1] * 1.2)
        axes.spines[["top", "right"]].set_visible(False)
        beside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
        axes.legend(frameon=False, fontsize="small", title="variant (seeds)", **beside)
    figure.savefig(path, dpi=150)
    plt.close(figure)


# ---- the command --------------------------------------------------------------------------------


def listed(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def numbers(text: str) -> list[float]:
    return [float(word) for word in listed(text)]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.utility",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=listed, default=["demo"], help="of demo,pctr,movielens,criteo")
    add("--variants", type=listed, help=f"default: all of {','.join(VARIANTS)}")
    add("--epsilons", type=numbers, default=[0.5, 1.0, 2.0, 4.0, 8.0, 16.0], help="targets")
    add("--seeds", type=int, default=3, help="runs of everything: seeds 0, 1, ...")
    add("--generator-seed", type=int, help="one for all runs; 101 to choose settings on")
    add("--movielens", type=Path, default=Path("data/ml-1m"), help="MovieLens, unpacked")
    add("--criteo", type=Path, help="a folder with examples.npy, which `prepare criteo` wrote")
    add("--json", type=Path, required=True, help="results: read first, then appended to")
    add("--table", action="store_true", help="run nothing, and print what --json holds")
    add(
        "--plot",
        type=Path,
        nargs="?",
        const=Path(__file__).parent / "results" / "utility.png",
        help="run nothing, and draw what --json holds; default: benchmarks/results/utility.png",
    )
    add("--quick", action="store_true", help="tiny data; two variants, one epsilon, one seed")
    return parser


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    found = parser()
    options = found.parse_args(words)
    if options.quick:
        options.variants = options.variants or ["demo", "best"]
        options.epsilons, options.seeds = options.epsilons[-1:], 1
    options.variants = options.variants or list(VARIANTS)
    for name, known in (("data", tasks(options)), ("variants", VARIANTS)):
        unknown = sorted(set(getattr(options, name)) - set(known))
        if unknown:
            found.error(f"expected --{name} of {', '.join(known)}, found {', '.join(unknown)}")
    return options


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    if not (options.table or options.plot):
        get_ready()
        run_all(options, lambda line: print(line, file=sys.stderr, flush=True))
    rows = read_json_lines(options.json)
    current = up_to_date(rows, list(tasks(options).values()))
    if len(current) < len(rows):
        print(f"{len(rows) - len(current)} runs, doubled or of other settings or data, left out.")
    if not current:
        print(f"No runs in {options.json} yet.")
        return
    table = summary(current)
    print_markdown(as_shown(table))
    if options.plot:
        plot(table, options.plot)


if __name__ == "__main__":
    main()

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
`epsilon` is what the privacy reports of the runs claim, `target` what was asked for; a gain is over
the variant beside it, at the same target and seeds. Errors are standard errors of means over seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness import append_json_line, markdown
from benchmarks.step_time import get_ready
from benchmarks.tradeoff import read_json_lines
from benchmarks.utility_run import train
from benchmarks.utility_settings import VARIANTS, Task, tasks
from benchmarks.utility_table import as_shown, in_document, plot, reported, summary
from lightning_dpsparse.refused import Refused

Row = dict[str, Any]
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


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
    add(
        "--json",
        type=Path,
        default=RESULTS / "utility.jsonl",
        help="results: read first, then appended to; default: %(default)s",
    )
    add("--table", action="store_true", help="run nothing, and print what --json holds")
    add("--plot", type=Path, help="run nothing, and draw what --json holds")
    add(
        "--publish",
        action="store_true",
        help="run nothing, and write what --json holds to docs/utility.md and benchmarks/results",
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


def publish(table: Sequence[Row], full: Path, document: Path, picture: Path) -> None:
    """Write all results to one file, the ones that readers want into a document, and draw them."""
    full.write_text("\n".join(markdown(as_shown(table))) + "\n")
    document.write_text(in_document(table, document.read_text()))
    plot(reported(table), picture)


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    if not (options.table or options.plot or options.publish):
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
    print(*markdown(as_shown(table)), sep="\n")
    if options.plot:
        plot(table, options.plot)
    if options.publish:
        full, picture = RESULTS / "utility.md", RESULTS / "utility.png"
        publish(table, full, ROOT / "docs" / "utility.md", picture)


if __name__ == "__main__":
    main()

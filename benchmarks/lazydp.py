"""What does LazyDP cost, and what does that depend on? Its paper's Figures 10 and 13, in shape.

The paper is Lim et al. 2024, arXiv:2404.08847. Modes, all with fused SGD on one thread:

sgd            no privacy: TorchRec through Trainer and DPSparseStrategy, the yardstick
eana           clipping, and noise on the rows that were read (not private)
lazydp         clipping, and noise on rows before they are read, drawn at once (ANS)
lazydp_no_ans  the same, drawn step by step for every step that a row owes
dpsgd          clipping, and noise on every row

Sections: batch, rows, pooling, skew (time per step) and memory (peak of the process).

ratio is CPU time over that of `sgd` in the same interleaved run (sgd_cpu_ms): one run has the quick
modes, another the slow ones, in fewer steps. speedup_over_dpsgd is dpsgd's ratio over the mode's.
Batches do not repeat. Both LazyDP modes start with the debts of a run that took `aged` steps: fresh
tables owe nothing, which would flatter lazydp_no_ans. Its draws' memory limits that number.
"""

from __future__ import annotations

import argparse
import gc
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from benchmarks.harness import interleave, print_table, write_json_lines
from benchmarks.step_time import (
    HOT_ACCESSES,
    ModeMaker,
    Workload,
    get_ready,
    peak_rss_of,
    through_lightning,
)
from lightning_dpsparse import DPSGD, EANA, LazyDP
from lightning_dpsparse.engine.mechanism import Mechanism
from lightning_dpsparse.mechanisms.lazydp.state import LazyTables
from lightning_dpsparse.plugin.callbacks import private_run
from lightning_dpsparse.sharded.collections import sharded_collections

# R rows of a stack of tables

Row = dict[str, Any]

OLDEST = 20_000
"""Steps that the oldest run is taken to have behind it."""
MOST_OWED = 25_000_000.0
"""Pairs of a row and a step that lazydp_no_ans may draw for at once: about 3 GB at width 16."""


def read_probabilities(workload: Workload) -> list[tuple[int, float]]:
    """(rows, chance that a step reads one of them), the hottest first, of one table."""
    groups = [(workload.rows, 1.0)]
    if workload.hot_rows is not None:
        cold = workload.rows - workload.hot_rows
        groups = [(workload.hot_rows, HOT_ACCESSES), (cold, 1 - HOT_ACCESSES)]
    lookups = workload.batch * workload.pooling
    return [(rows, min(1 - 1e-9, 1 - (1 - share / rows) ** lookups)) for rows, share in groups]


def age_of_run(workload: Workload) -> int:
    """Steps until each pays for 99% of what it ever will (as many as there are rows), if it can."""

    def paid_per_step(age: int) -> float:
        groups = read_probabilities(workload)
        return workload.tables * sum(rows * (1 - (1 - p) ** age) for rows, p in groups)

    most = min(MOST_OWED, 0.99 * workload.tables * workload.rows)
    return max(1, bisect_right(range(OLDEST + 1), most, key=paid_per_step) - 1)


class Aged(Callback):
    """Before training, rows owe what they would after a long run. At its end nobody pays.

    It reaches into private attributes: nothing but a benchmark wants to forge debts.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload, self._steps = workload, age_of_run(workload)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        private = private_run(trainer).stepper
        assert private is not None
        for tables in _lazy_tables(pl_module):
            for step in range(self._steps):
                tables.clock.tick(step, private.state.noise.stddev, tables.kernel.learning_rate)
            for stack in tables.debts:
                for table_R in stack._paid_through_R.split(self._workload.rows):
                    self._age(table_R)

    def _age(self, paid_through_R: Tensor) -> None:
        """Steps since a row was read are geometric."""
        age_R = torch.empty_like(paid_through_R)
        start = 0
        for rows, probability in read_probabilities(self._workload):
            age_R[start : start + rows].geometric_(probability)
            start += rows
        row_R = self._workload.row_of(torch.arange(len(age_R)))
        paid_through_R[row_R] = (self._steps - age_R).clamp_(min=0)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for tables in _lazy_tables(pl_module):
            tables.note_work_done()  # without ANS the payment would take hours

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self.on_train_end(trainer, pl_module)


def _lazy_tables(module: LightningModule) -> Iterator[LazyTables]:
    for collection in sharded_collections(module).values():
        yield from collection.states.values()


def aged(mechanism: Mechanism) -> ModeMaker:
    return lambda workload: through_lightning(mechanism, callbacks=[Aged(workload)])(workload)


MODES: dict[str, ModeMaker] = {
    "sgd": through_lightning(None),
    "eana": through_lightning(EANA()),
    "lazydp": aged(LazyDP()),
    "lazydp_no_ans": aged(LazyDP(aggregate=False)),
    "dpsgd": through_lightning(DPSGD()),
}
QUICK_MODES, SLOW_MODES = ("sgd", "eana", "lazydp"), ("sgd", "lazydp_no_ans", "dpsgd")

HOT_PER_MILLE = {"none": None, "low": 360, "medium": 100, "high": 6}
"""Of the rows of a table: they get 90% of the accesses."""

Workloads = Mapping[int | str, Workload]


def sections(base: Workload) -> dict[str, Workloads]:
    """What varies, and the workload at every value of it."""
    rows, batch = base.rows, base.batch
    batches = (batch // 8, batch // 2, batch, batch * 2)
    heights = (rows // 100, rows // 10, rows, rows * 10)  # of few tables: three copies must fit
    return {
        "batch": {size: replace(base, batch=size) for size in batches},
        "rows": {height: replace(base, tables=4, rows=height) for height in heights},
        "pooling": {ids: replace(base, batch=batch // 2, pooling=ids) for ids in (1, 10, 20, 30)},
        "skew": {
            name: replace(base, hot_rows=share and rows * share // 1000)
            for name, share in HOT_PER_MILLE.items()
        },
    }


def first_and_last(workloads: Workloads) -> Workloads:
    first, *_, last = workloads
    return {first: workloads[first], last: workloads[last]}


def measure_section(name: str, workloads: Workloads, steps: int, slow_steps: int) -> list[Row]:
    """One row per value and mode."""
    rows = []
    for value, workload in workloads.items():
        print(f"{name} {value}", file=sys.stderr)
        costs, age = measure(workload, steps, slow_steps), age_of_run(workload)
        rows += [
            {"section": name, "value": value, "mode": mode, **costs[mode], "aged": age}
            for mode in MODES
        ]
    return rows


@cache  # sections share workloads
def measure(workload: Workload, steps: int, slow_steps: int) -> dict[str, Row]:
    """What every mode costs."""
    costs = compare(SLOW_MODES, workload, slow_steps, warm_up=2)
    costs |= compare(QUICK_MODES, workload, steps, warm_up=3)
    slowest = costs["dpsgd"]["ratio"]
    return {
        mode: {**cost, "speedup_over_dpsgd": round(slowest / cost["ratio"], 4)}
        for mode, cost in costs.items()
    }


def compare(modes: Sequence[str], workload: Workload, steps: int, warm_up: int) -> dict[str, Row]:
    """What these modes cost in one interleaved run, the first being the yardstick."""
    batches = workload.batches(warm_up + steps)
    times = interleave({mode: MODES[mode](workload) for mode in modes}, batches, steps, warm_up)
    gc.collect()  # modules are full of cycles, and the next tables need the room
    medians = {mode: times[mode].medians() for mode in modes}
    first = medians[modes[0]]["cpu_ms"]
    return {
        mode: {**cost, "sgd_cpu_ms": first, "ratio": round(cost["cpu_ms"] / first, 4)}
        for mode, cost in medians.items()
    }


def growth(rows: Sequence[Row]) -> list[Row]:
    """From the first value of a section to its last, mode by mode."""

    def factor(mode: str, name: str) -> float:
        values = [row[name] for row in rows if row["mode"] == mode]
        return round(values[-1] / values[0], 3)

    return [
        {
            "section": "growth",
            "mode": mode,
            "from": rows[0]["value"],
            "to": rows[-1]["value"],
            "cpu_ms_growth": factor(mode, "cpu_ms"),
            "ratio_growth": factor(mode, "ratio"),
        }
        for mode in MODES
    ]


def measure_memory(workload: Workload) -> list[Row]:
    """Peaks of whole runs, the payment of all rows included."""
    names = {"sgd": "torchrec", "eana": "eana", "lazydp": "lazydp", "dpsgd": "dpsgd"}
    peaks = {mode: peak_rss_of(name, workload) for mode, name in names.items()}
    history = {"lazydp": 4 * workload.tables * workload.rows / 2**20}
    return [
        {
            "section": "memory",
            "mode": mode,
            "peak_rss_mb": peak,
            "ratio": round(peak / peaks["sgd"], 4),
            "history_mb": round(history.get(mode, 0.0), 1),
            "ratio_without_history": round((peak - history.get(mode, 0.0)) / peaks["sgd"], 4),
        }
        for mode, peak in peaks.items()
    ]


def plot_sections(rows: Sequence[Row], path: Path) -> None:
    """A panel per section, a line per mode."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    timed = [row for row in rows if "speedup_over_dpsgd" in row]
    names = list(dict.fromkeys(row["section"] for row in timed))
    if not names:
        raise SystemExit("Expected a section with times to plot, found memory alone.")
    figure, _ = plt.subplots(
        1, len(names), figsize=(1 + 3.2 * len(names), 3.6), sharey=True, layout="constrained"
    )
    for name, panel in zip(names, figure.axes):
        for mode in MODES:
            here = [row for row in timed if (row["section"], row["mode"]) == (name, mode)]
            values = [str(row["value"]) for row in here]
            panel.plot(values, [row["ratio"] for row in here], marker="o", label=mode)
        panel.set(title=name, yscale="log")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("CPU time per step over sgd")
    figure.legend(*panel.get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(path, dpi=150)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lazydp",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sections", default="batch,rows,pooling,skew,memory", help="which to run")
    parser.add_argument("--steps", type=int, default=30, help="measured steps of quick modes")
    parser.add_argument("--slow-steps", type=int, default=4, help="measured steps of slow modes")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small tables and batches, first and last values, few steps: under two minutes",
    )
    parser.add_argument("--json", type=Path, help="write one JSON object per row to this file")
    parser.add_argument("--plot", type=Path, help="write a plot of the ratios to this PNG file")
    return parser


def measure_all(options: argparse.Namespace) -> Iterator[list[Row]]:
    """Tables, as they get ready."""
    base = Workload(rows=1_000_000, batch=2048, dim=16)
    if options.quick:
        base = replace(base, rows=10_000, batch=512)
        options.steps, options.slow_steps = min(options.steps, 5), min(options.slow_steps, 2)
    names = options.sections.split(",")
    if not {*names} <= {*sections(base), "memory"}:
        raise SystemExit(f"Expected sections among those that --help lists, found {names}.")
    for name in names:
        if name == "memory":
            yield measure_memory(base)
            continue
        workloads = sections(base)[name]
        if options.quick:
            workloads = first_and_last(workloads)
        table = measure_section(name, workloads, options.steps, options.slow_steps)
        yield table
        if name == "rows":
            yield growth(table)


def main() -> None:
    options = parser().parse_args()
    get_ready()
    rows: list[Row] = []
    for table in measure_all(options):
        print_table(table)
        print(flush=True)
        rows += table
    if options.json:
        write_json_lines(rows, options.json)
    if options.plot:
        plot_sections(rows, options.plot)


if __name__ == "__main__":
    main()

"""How fast do SGD, EANA and DP-SGD train as the vocabulary grows? Table 3 of the EANA paper."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.harness import Feed, Mode, StepTimes, interleave
from benchmarks.step_time import trainer_for
from lightning_dpsparse import DPSGD, EANA, DPSparseStrategy, FusedOptimizer, PrivacyPlan
from lightning_dpsparse.engine.mechanism import Mechanism
from lightning_dpsparse.models import TwoTowerModule

Row = dict[str, Any]

VOCABULARIES = (27_000, 100_000, 1_000_000, 5_000_000)
CONTEXT, NEGATIVES = 20, 16
MECHANISMS: dict[str, Mechanism | None] = {"sgd": None, "eana": EANA(), "dpsgd": DPSGD()}
PAPER = {"dpsgd_over_eana": 54.0, "eana_over_sgd": 3.3}
"""At five million rows: 70 steps a second with EANA, 1.3 with DP-SGD, 232 with SGD."""


@dataclass(frozen=True)
class TwoTowers:
    """Two tables of as many rows; contexts, labels and negatives are uniform ids."""

    vocabulary: int
    batch: int = 64
    dim: int = 128

    def module(self) -> TwoTowerModule:
        return TwoTowerModule(
            self.vocabulary, self.dim, [], NEGATIVES, temperature=0.1, normalize=True
        )

    def batches(self, count: int) -> list[Batch]:
        draws = torch.Generator().manual_seed(0)
        lengths = torch.tensor([CONTEXT, 1]).repeat_interleave(self.batch)
        return [
            Batch(
                dense_features=torch.zeros(self.batch, 0),
                sparse_features=KeyedJaggedTensor(
                    keys=["context", "label"],
                    values=torch.randint(self.vocabulary, (int(lengths.sum()),), generator=draws),
                    lengths=lengths,
                ),
                labels=torch.ones(self.batch),
            )
            for _ in range(count)
        ]

    def mode(self, mechanism: Mechanism | None) -> Mode:
        """Training as users train: through Trainer and the strategy."""

        def run(feed: Feed) -> None:
            plan = None
            if mechanism is not None:
                plan = PrivacyPlan(
                    mechanism=mechanism,
                    noise_multiplier=0.8,  # any takes the same time
                    expected_batch_size=self.batch,
                    sampling="unamplified",  # the same batches for every mode
                    delta=1e-6,
                )
            strategy = DPSparseStrategy(
                privacy=plan, fused_optimizer=FusedOptimizer(kind="sgd", learning_rate=8.0)
            )
            with TemporaryDirectory() as folder:  # for the run's journal
                trainer_for(strategy, folder).fit(self.module(), feed)

        return run


def measure(towers: TwoTowers, steps: int, slow_steps: int) -> list[Row]:
    """SGD and EANA in turns; DP-SGD alone, in fewer steps.

    DP-SGD goes through all memory: whoever takes turns with it finds the caches cold, and looks
    several times slower than it is.
    """
    print(f"{towers.vocabulary:,} rows", file=sys.stderr, flush=True)
    times: dict[str, StepTimes] = {}
    for names, count, warm_up in ((("sgd", "eana"), steps, 10), (("dpsgd",), slow_steps, 2)):
        modes = {name: towers.mode(MECHANISMS[name]) for name in names}
        times |= interleave(modes, towers.batches(count), count, warm_up)
        gc.collect()  # modules are full of cycles, and the next tables need the room
    medians = {name: times[name].medians() for name in MECHANISMS}
    return [
        {
            "vocabulary": towers.vocabulary,
            "mode": name,
            "batch": towers.batch,
            "dim": towers.dim,
            "steps": len(times[name].cpu_ms),
            **found,
            "steps_per_s": round(1e3 / found["cpu_ms"], 3),
            "over_sgd": round(found["cpu_ms"] / medians["sgd"]["cpu_ms"], 3),
            "over_eana": round(found["cpu_ms"] / medians["eana"]["cpu_ms"], 3),
        }
        for name, found in medians.items()
    ]


def verdicts(rows: Sequence[Row]) -> list[Row]:
    """Whether the largest vocabulary beats what the paper found at five million rows."""
    largest = max(row["vocabulary"] for row in rows)
    by_mode = {row["mode"]: row for row in rows if row["vocabulary"] == largest}
    gain, cost = by_mode["dpsgd"]["over_eana"], by_mode["eana"]["over_sgd"]
    return [
        {
            "claim": f"EANA over {PAPER['dpsgd_over_eana']:g}x faster than DP-SGD",
            "vocabulary": largest,
            "found": f"{gain:.1f}x",
            "holds": "yes" if gain > PAPER["dpsgd_over_eana"] else "no",
        },
        {
            "claim": f"EANA less than {PAPER['eana_over_sgd']:g}x slower than SGD",
            "vocabulary": largest,
            "found": f"{cost:.2f}x",
            "holds": "yes" if cost < PAPER["eana_over_sgd"] else "no",
        },
    ]


def plot(rows: Sequence[Row], path: Path) -> None:
    """Steps per second over the vocabulary."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3.6), layout="constrained")
    for name in MECHANISMS:
        here = [row for row in rows if row["mode"] == name]
        axes.plot(
            [row["vocabulary"] for row in here],
            [row["steps_per_s"] for row in here],
            marker="o",
            label=name,
        )
    axes.set(xscale="log", yscale="log", xlabel="rows of each table", ylabel="steps per CPU second")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)

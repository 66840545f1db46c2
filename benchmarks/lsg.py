"""Do low-rank and sparse gradients learn more from one budget? The LSG paper's Table 1, in shape.

The paper is Ito et al. 2022, arXiv:2207.02699. Two tasks, every rank and sparsity on each, all with
the same epsilon, clip norm, learning rate, batch and steps:

low_rank   a network of 128, 256, 256 and 10 units whose labels come from a teacher of rank 4. It
           was trained without privacy on public data from another teacher of the same subspace,
           and is fine-tuned privately. Accuracy on fresh data.
over_arch  a DLRM on synthetic clicks, from scratch, with LazyDP for its tables; ranks and
           sparsities are those of its over-arch (512, 256, 1). AUC on the next day.

Rank "full" with sparsity 0 is DP-SGD, with more it is sparse DP-SGD; sparsity 0 with a rank is RGP;
the rest is LSG. The verdict compares the best cell of each kind, so that LSG, with nine cells, has
the most chances. The data is synthetic, and nothing was tuned for one kind alone.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import seed_everything
from scipy import stats
from torch import Tensor, nn

from benchmarks.harness import print_table, write_json_lines
from benchmarks.step_time import get_ready, trainer_for
from benchmarks.tradeoff import Data, read_json_lines, standard_error
from lightning_dpsparse import (
    LSG,
    RGP,
    DenseGaussian,
    DPSparseStrategy,
    FusedOptimizer,
    LazyDP,
    PrivacyPlan,
    SparseDPSGD,
)
from lightning_dpsparse.accounting.calibration import default_delta
from lightning_dpsparse.data.synthetic import ADAFEST_NUM_ROWS
from lightning_dpsparse.engine.dense import DenseForms, DenseMechanism
from lightning_dpsparse.engine.ghost import DenseCapture
from lightning_dpsparse.engine.step import Ranks, StepConfig, clipped_sums, release
from lightning_dpsparse.models import DLRMModule
from lightning_dpsparse.run_plan import resolve
from lightning_dpsparse.sampling.poisson import Phase

Row = dict[str, Any]
RANKS = ("2", "4", "8", "full")
SPARSITIES = (0.0, 0.1, 0.3, 0.5)


def kind(rank: str, sparsity: float) -> str:
    """What a cell of the grid is called."""
    if rank == "full":
        return "sparse" if sparsity else "dpsgd"
    return "lsg" if sparsity else "rgp"


def mechanism(rank: str, sparsity: float, layers: tuple[str, ...]) -> DenseMechanism:
    if rank == "full":
        return SparseDPSGD(sparsity, layers=layers) if sparsity else DenseGaussian()
    if sparsity == 0:
        return RGP(int(rank), layers=layers)
    return LSG(int(rank), sparsity, layers=layers)


# ---- a task of low rank -------------------------------------------------------------------------

WIDTH, HIDDEN, CLASSES, TEACHER_RANK = 128, 256, 10, 4


class Teacher:
    """Classes that depend on a few directions of the input."""

    def __init__(self, seed: int, head: int) -> None:
        directions = torch.Generator().manual_seed(seed)
        self._directions = torch.randn(WIDTH, TEACHER_RANK, generator=directions) / WIDTH**0.5
        classes = torch.Generator().manual_seed(seed * 1_000 + head)
        self._classes = torch.randn(TEACHER_RANK, CLASSES, generator=classes)
        self._random = classes

    def draw(self, examples: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(examples, WIDTH, generator=self._random)
        return x, (torch.tanh(2 * x @ self._directions) @ self._classes).argmax(1)


def pretrained(seed: int) -> nn.Sequential:
    """The student, after public data."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(WIDTH, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, CLASSES),
    )
    x, labels = Teacher(seed, head=1).draw(20_000)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(5):
        for batch in torch.randperm(len(x)).split(500):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), labels[batch]).backward()
            optimizer.step()
    return model


def low_rank(rank: str, sparsity: float, seed: int, options: argparse.Namespace) -> float:
    """Private steps on the engine itself: there are no tables here."""
    model, teacher = pretrained(seed), Teacher(seed, head=2)
    x, labels = teacher.draw(options.examples)
    test_x, test_labels = teacher.draw(10_000)
    rate, steps = options.batch / len(x), options.epochs * len(x) // options.batch
    plan = PrivacyPlan(epsilon=options.epsilon, delta=default_delta(len(x)), clip_norm=1.0)
    phase = Phase(0, len(x), rate, steps)
    run = resolve(plan, [phase], len(x), options.batch, steps)
    config = StepConfig(
        plan.mechanism,
        plan.clipping,
        plan.clip_norm,
        run.noise_multiplier,
        options.batch,
        plan.make_source(plan.make_key()),
    )
    parameters = dict(model.named_parameters())
    capture, state = DenseCapture(parameters), config.open([])
    forms = DenseForms(mechanism(rank, sparsity, ("*",)), model, parameters)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)
    for step in range(steps):
        drawn = torch.rand(len(x)) < rate
        optimizer.zero_grad()
        capture.clear()
        capture.set_forms(forms.at(step, config.noise))
        with capture:
            losses = F.cross_entropy(model(x[drawn]), labels[drawn], reduction="none")
        ranks = Ranks(losses.numel(), 0, lambda tensor: None)
        sums = clipped_sums(losses, [], capture, config, state, ranks, step)
        release(sums, [], capture, state, ranks, step)
        optimizer.step()
    with torch.no_grad():
        return float((model(test_x).argmax(1) == test_labels).float().mean())


# ---- DLRM's over-arch ---------------------------------------------------------------------------


class OverArch:
    """Runs on one data set, with noise that is calibrated once: no cell costs more than another."""

    def __init__(self) -> None:
        self._data: Data | None = None
        self._noise: float | None = None

    def __call__(self, rank: str, sparsity: float, seed: int, options: argparse.Namespace) -> float:
        if self._data is None:
            self._data = Data(options.clicks, options.click_batch)
        seed_everything(seed)
        plan = PrivacyPlan(
            mechanism=LazyDP(),
            dense=mechanism(rank, sparsity, ("net.over_arch.*",)),
            clip_norm=10.0,
            epsilon=options.epsilon,
            noise_multiplier=self._noise,
        )
        strategy = DPSparseStrategy(
            privacy=plan, fused_optimizer=FusedOptimizer(kind="sgd", learning_rate=8.0)
        )
        module = DLRMModule(
            num_rows=ADAFEST_NUM_ROWS,
            dense_arch=[128, 64, 16],
            over_arch=[512, 256, 1],
            optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=0.02),
        )
        with TemporaryDirectory() as folder:
            trainer = trainer_for(strategy, folder)
            trainer.fit(module, self._data.training(), self._data.validation())
        assert strategy.private_run is not None
        self._noise = strategy.private_run.budget.run.noise_multiplier
        return float(trainer.callback_metrics["val_auroc"])


# ---- all of it ----------------------------------------------------------------------------------


def run_all(options: argparse.Namespace) -> Iterator[Row]:
    """Every cell that `--json` does not hold yet."""
    done = read_json_lines(options.json) if options.json else []
    yield from done
    known = {(row["task"], row["rank"], row["sparsity"], row["seed"]) for row in done}
    tasks: dict[str, Callable[..., float]] = {"low_rank": low_rank, "over_arch": OverArch()}
    for task in options.task:
        for seed in range(options.seeds):
            for rank in options.ranks:
                for sparsity in options.sparsities:
                    if (task, rank, sparsity, seed) in known:
                        continue
                    score = tasks[task](rank, sparsity, seed, options)
                    row = {"task": task, "rank": rank, "sparsity": sparsity, "seed": seed}
                    row["score"] = round(score, 5)
                    print(json.dumps(row), file=sys.stderr, flush=True)
                    yield row


def summary(rows: Sequence[Row]) -> list[Row]:
    """Means over seeds, with the standard error of the mean."""
    cells: dict[tuple[str, str, float], list[float]] = {}
    for row in rows:
        cells.setdefault((row["task"], row["rank"], row["sparsity"]), []).append(row["score"])
    return [
        {
            "task": task,
            "rank": rank,
            "sparsity": sparsity,
            "seeds": len(scores),
            "score": round(statistics.mean(scores), 4),
            "error": round(standard_error(scores), 4),
        }
        for (task, rank, sparsity), scores in cells.items()
    ]


def verdict(rows: Sequence[Row]) -> list[str]:
    """The best cell of every kind, and whether LSG > RGP > DP-SGD at the 5% level.

    Differences are those at the same seed: the task is the same on both sides. With few seeds a
    gap must be many errors wide (Student's t: 4.3 for three of them).
    """
    lines = []
    for task in dict.fromkeys(row["task"] for row in rows):
        cells: dict[tuple[str, float], dict[int, float]] = {}
        for row in rows:
            if row["task"] == task:
                cells.setdefault((row["rank"], row["sparsity"]), {})[row["seed"]] = row["score"]
        best: dict[str, dict[int, float]] = {}
        for cell, scores in sorted(cells.items(), key=lambda c: statistics.mean(c[1].values())):
            best[kind(*cell)] = scores
        for name, scores in best.items():
            lines.append(f"{task}: best {name} {statistics.mean(scores.values()):.4f}")
        for one, two in (("lsg", "rgp"), ("rgp", "dpsgd"), ("lsg", "dpsgd"), ("sparse", "dpsgd")):
            if one in best and two in best:
                gaps = [best[one][seed] - best[two][seed] for seed in best[one]]
                gap, error = statistics.mean(gaps), standard_error(gaps)
                word = "shows" if gap > _errors_wide(len(gaps)) * error else "does not show"
                lines.append(f"{task}: {one} > {two} {word} ({gap:+.4f}, error {error:.4f})")
    return lines


def _errors_wide(seeds: int) -> float:
    return float(stats.t.ppf(0.975, seeds - 1)) if seeds > 1 else math.inf


def plot(table: Sequence[Row], path: Path) -> None:
    """Score against sparsity, a line for every rank, a panel for every task."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    tasks = list(dict.fromkeys(row["task"] for row in table))
    figure, panels = plt.subplots(
        1, len(tasks), figsize=(4.6 * len(tasks), 3.8), layout="constrained", squeeze=False
    )
    for axes, task in zip(panels[0], tasks):
        for rank in RANKS:
            rows = [row for row in table if row["task"] == task and row["rank"] == rank]
            rows.sort(key=lambda row: row["sparsity"])
            axes.errorbar(
                [row["sparsity"] for row in rows],
                [row["score"] for row in rows],
                yerr=[row["error"] for row in rows],
                marker="o",
                capsize=3,
                label=f"rank {rank}",
            )
        score = "accuracy" if task == "low_rank" else "validation AUC"
        axes.set(xlabel="sparsity", ylabel=score, title=task.replace("_", " "))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].legend(frameon=False)
    figure.savefig(path, dpi=150)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lsg",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--task", nargs="+", default=["low_rank", "over_arch"], help="default: both")
    add("--ranks", nargs="+", choices=RANKS, default=list(RANKS), help="default: all")
    add("--sparsities", type=float, nargs="+", default=list(SPARSITIES), help="default: all")
    add("--epsilon", type=float, default=3.0, help="default: %(default)s")
    add("--seeds", type=int, default=3, help="runs of every cell")
    add("--examples", type=int, default=20_000, help="private examples of low_rank")
    add("--batch", type=int, default=1_000, help="expected batch of low_rank")
    add("--epochs", type=int, default=10, help="of low_rank")
    add("--learning-rate", type=float, default=1e-3, help="Adam's, of low_rank")
    add("--clicks", type=int, default=500_000, help="of over_arch, once through")
    add("--click-batch", type=int, default=4_096, help="expected batch of over_arch")
    add("--json", type=Path, help="one JSON object per run; runs it already holds are not repeated")
    add("--plot", type=Path, help="write the scores to this PNG file")
    return parser


def main() -> None:
    options = parser().parse_args()
    get_ready()
    rows: list[Row] = []
    for row in run_all(options):
        rows.append(row)
        if options.json:
            write_json_lines(rows, options.json)
    table = summary(rows)
    print_table(table)
    print("\n".join(verdict(rows)))
    if options.plot:
        plot(table, options.plot)


if __name__ == "__main__":
    main()

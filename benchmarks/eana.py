"""What does EANA leak, and how fast is it? Figures 4 and 5 and Table 3 of its paper, in shape.

The paper is Ning et al. 2022. EANA puts noise on the rows that were read, and is not private.

leakage  The two-tower model of the paper (width 128, a bag of 20 watches, batches of 64) learns the
         next movie with SGD, and with DP-SGD and EANA at noise multipliers 0.001 and 0.01, each
         time with canaries in the data: 50 for each number of repeats. precision and recall are of
         users never trained on, exposure says how well canaries are remembered among 16,384
         references (no memory is about 1.4 bits). `clip` clips and adds no noise: what of the
         others is clipping's doing. Negatives are uniform and each example's own; in-batch ones,
         as the paper's may be, would couple examples. Noise this small gives no epsilon of any use.
speed    Tables with uniform ids, on one thread, through Trainer. over_sgd and over_eana are ratios
         of CPU time per step; SGD and EANA take turns, DP-SGD runs alone.

The clip norm (the paper does not say its own) and the learning rate were chosen in short trials on
the same test users, such that clipping alone costs little. One seed: what is within two standard
errors of canaries and test examples is called too close, and seeds add to that.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from lightning.pytorch import Trainer, seed_everything

from benchmarks import eana_speed
from benchmarks.harness import print_table, write_json_lines
from benchmarks.step_time import get_ready
from lightning_dpsparse import DPSGD, EANA, DPSparseStrategy, FusedOptimizer, PrivacyPlan
from lightning_dpsparse.audit.secret_sharer import REPEATS, SecretSharer
from lightning_dpsparse.data.movielens import MovieLensData, SyntheticMovieLens, WatchData
from lightning_dpsparse.engine.mechanism import Mechanism
from lightning_dpsparse.models import TwoTowerModule
from lightning_dpsparse.models.retrieval import CUTOFFS

Row = dict[str, Any]

ML_1M_ITEMS = 3706  # movies that somebody rated; used where no movies.dat says how many there are


def movielens(folder: str, **settings: Any) -> MovieLensData:
    """MovieLens, with the movies of its catalogue if that is there."""
    has_movies = any(Path(folder, f"movies.{end}").is_file() for end in ("csv", "dat"))
    return MovieLensData(folder, num_items=None if has_movies else ML_1M_ITEMS, **settings)


@dataclass(frozen=True)
class Run:
    """A way to train."""

    name: str
    mechanism: Mechanism | None
    noise: float


RUNS = (
    Run("sgd", None, 0.0),
    Run("dpsgd 0.01", DPSGD(), 0.01),
    Run("eana 0.01", EANA(), 0.01),
    Run("dpsgd 0.001", DPSGD(), 0.001),
    Run("eana 0.001", EANA(), 0.001),
    Run("clip", EANA(), 0.0),
)


@dataclass(frozen=True, kw_only=True)
class Leakage:
    """What all runs share."""

    folder: str | None
    """None makes synthetic watches."""
    examples_per_user: int | None
    users: int = 8000
    epochs: int = 1
    batch: int = 64
    dim: int = 128
    clip_norm: float = 1.0
    learning_rate: float = 8.0
    num_negatives: int = 16
    repeats: Sequence[int] = REPEATS
    canaries: int = 50
    references: int = 16_384
    seed: int = 7

    def data(self) -> WatchData:
        shared: Row = {"batch_size": self.batch, "examples_per_user": self.examples_per_user}
        if self.folder is None:
            return SyntheticMovieLens(num_users=self.users, **shared)
        return movielens(self.folder, **shared)

    def described(self) -> Row:
        """For the results: all that makes two runs comparable, and no path."""
        names = ("examples_per_user", "epochs", "batch", "dim", "clip_norm", "learning_rate")
        data = "synthetic" if self.folder is None else "movielens"
        return {"data": data, **{name: getattr(self, name) for name in names}}

    def strategy(self, run: Run) -> DPSparseStrategy:
        plan = None
        if run.mechanism is not None:
            plan = PrivacyPlan(
                mechanism=run.mechanism,
                clip_norm=self.clip_norm,
                noise_multiplier=run.noise,
                sampling="unamplified",  # the same batches for every run
                delta=1e-7,
            )
        fused = FusedOptimizer(kind="sgd", learning_rate=self.learning_rate)
        return DPSparseStrategy(privacy=plan, fused_optimizer=fused)

    def train(self, run: Run) -> Row:
        """One run, from canaries to test users."""
        seed_everything(self.seed)
        data = self.data()
        data.setup("fit")
        sharer = SecretSharer(list(self.repeats), self.canaries, self.references)
        module = TwoTowerModule(
            data.train_set.num_rows[0],
            self.dim,
            [],
            self.num_negatives,
            temperature=0.1,
            normalize=True,
        )
        started = time.perf_counter()
        with TemporaryDirectory() as folder:
            trainer = Trainer(
                strategy=self.strategy(run),
                callbacks=[sharer],
                default_root_dir=folder,
                accelerator="cpu",
                devices=1,
                max_epochs=self.epochs,
                limit_val_batches=0,
                logger=False,
                enable_progress_bar=False,
                enable_checkpointing=False,
                enable_model_summary=False,
            )
            trainer.fit(module, datamodule=data)
            steps, seconds = trainer.global_step, time.perf_counter() - started
            (found,) = trainer.test(module, datamodule=data, verbose=False)
        scores = {
            f"{name}@{k}": round(found[f"test_{name}@{k}"], 5)
            for name in ("precision", "recall")
            for k in CUTOFFS
        }
        return {
            "run": run.name,
            **self.described(),
            "steps": steps,
            "seconds": round(seconds, 1),
            "tested": len(data.test_set),
            **scores,
            "exposures": [asdict(exposure) for exposure in sharer.found],
        }


def run_all(leakage: Leakage, path: Path) -> list[Row]:
    """All runs. Those that `path` holds, with these settings, are not repeated; others stay."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines]
    others = [row for row in found if row != row | leakage.described()]
    rows = {row["run"]: row for row in found if row not in others}
    for run in RUNS:
        if run.name not in rows:
            rows[run.name] = row = leakage.train(run)
            print(json.dumps(row), file=sys.stderr, flush=True)
            write_json_lines([*others, *rows.values()], path)
    return [rows[run.name] for run in RUNS]


# ---- what the runs say --------------------------------------------------------------------------


def exposure(row: Row, kind: str) -> tuple[float, float]:
    """Mean over all canaries, in bits, and its standard error.

    The error is that by rank, from the middle half as if it were a normal's, for the fit too.
    """
    found = row["exposures"]
    errors = [(e["high"] - e["low"]) / 1.349 / math.sqrt(e["canaries"]) for e in found]
    return float(np.mean([e[kind] for e in found])), math.hypot(*errors) / len(found)


def precision(row: Row, k: int = 10) -> tuple[float, float]:
    """At k, and its standard error over test examples, which have one label each."""
    recall = row[f"recall@{k}"]
    return recall / k, math.sqrt(recall * (1 - recall) / row["tested"]) / k


def compare(higher: tuple[float, float], lower: tuple[float, float]) -> str:
    """Whether the first value is above the second, as far as their errors tell."""
    difference, error = higher[0] - lower[0], math.hypot(higher[1], lower[1])
    return "too close" if abs(difference) <= 2 * error else "yes" if difference > 0 else "no"


def verdicts(rows: Sequence[Row]) -> list[Row]:
    """The paper's findings, and whether they appear."""
    by_name = {row["run"]: row for row in rows}
    found = []
    orders = [("sgd", "eana 0.01"), ("sgd", "dpsgd 0.01")]
    orders += [(f"eana {noise}", f"dpsgd {noise}") for noise in ("0.01", "0.001")]
    # Not the paper's: is it the clipping or the noise?
    orders += [("sgd", "clip"), ("clip", "eana 0.01"), ("clip", "dpsgd 0.01")]
    for kind in ("interpolation", "extrapolation"):
        for high, low in orders:
            pair = exposure(by_name[high], kind), exposure(by_name[low], kind)
            found.append((f"exposure by {kind}: {high} above {low}", *pair))
    for high, low in (("sgd", "eana 0.01"), ("eana 0.01", "dpsgd 0.01"), ("sgd", "dpsgd 0.01")):
        pair = precision(by_name[high]), precision(by_name[low])
        found.append((f"precision@10: {high} above {low}", *pair))
    return [
        {
            "claim": claim,
            "found": f"{high[0]:.4g} and {low[0]:.4g}",
            "holds": compare(high, low),
        }
        for claim, high, low in found
    ]


def score_table(rows: Sequence[Row]) -> list[Row]:
    names = ["run", "steps", "seconds", *(f"precision@{k}" for k in CUTOFFS)]
    names += [f"recall@{k}" for k in CUTOFFS]
    return [
        {n: f"{row[n]:.4f}" if "@" in n else row[n] for n in names}  # three digits are too few
        for row in rows
    ]


def exposure_table(rows: Sequence[Row], kind: str) -> list[Row]:
    return [
        {kind: row["run"], **{f"{e['repeats']}x": f"{e[kind]:.2f}" for e in row["exposures"]}}
        for row in rows
    ]


def plot(rows: Sequence[Row], path: Path) -> None:
    """Precision over k; exposure over repeats, by rank and by fit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for row in rows:
        style = {"marker": "o", "label": row["run"], "linestyle": _LINES[row["run"].split()[0]]}
        panels[0].plot(CUTOFFS, [row[f"precision@{k}"] for k in CUTOFFS], **style)
        repeats = [e["repeats"] for e in row["exposures"]]
        for axes, kind in zip(panels[1:], ("interpolation", "extrapolation")):
            axes.plot(repeats, [e[kind] for e in row["exposures"]], **style)
    panels[0].set(xlabel="k", ylabel="precision@k", xticks=CUTOFFS, title="users not trained on")
    for axes, title in zip(panels[1:], ("by rank", "by fit")):
        axes.set(xscale="log", xlabel="times in the data", ylabel="exposure (bits)", title=title)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    panels[0].legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


_LINES = {"sgd": "-", "clip": ":", "dpsgd": "--", "eana": "-."}


def measure_leakage(leakage: Leakage, results: Path) -> None:
    rows = run_all(leakage, results / "eana.jsonl")
    tables = [score_table(rows)]
    tables += [exposure_table(rows, kind) for kind in ("interpolation", "extrapolation")]
    for table in (*tables, verdicts(rows)):
        print_table(table)
        print()
    plot(rows, results / "eana.png")


def measure_speed(
    vocabularies: Sequence[int], batch: int, dim: int, steps: int, slow_steps: int, results: Path
) -> None:
    rows: list[Row] = []
    for vocabulary in vocabularies:
        towers = eana_speed.TwoTowers(vocabulary, batch, dim)
        rows += eana_speed.measure(towers, steps, slow_steps)
        write_json_lines(rows, results / "eana_speed.jsonl")
    print_table(rows)
    print()
    print_table(eana_speed.verdicts(rows))
    eana_speed.plot(rows, results / "eana_speed.png")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.eana",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--part", choices=["leakage", "speed", "both"], default="both")
    add("--folder", default="data/ml-1m", help="leakage: MovieLens, unpacked")
    add("--synthetic", action="store_true", help="leakage: synthetic watches instead")
    add("--examples-per-user", type=int, default=80, help="leakage: windows drawn every epoch")
    add("--epochs", type=int, default=1, help="leakage: how often the data is gone through")
    add("--batch", type=int, default=64, help="examples per step")
    add("--dim", type=int, default=128, help="width of the tables")
    add("--clip-norm", type=float, default=1.0, help="leakage: of every example's gradient")
    add("--learning-rate", type=float, default=8.0, help="leakage: of the tables")
    add("--vocabularies", type=int, nargs="+", default=list(eana_speed.VOCABULARIES), help="speed")
    add("--steps", type=int, default=200, help="speed: of SGD and EANA")
    add("--slow-steps", type=int, default=5, help="speed: of DP-SGD")
    add("--quick", action="store_true", help="tiny synthetic data and tables: under a minute")
    add(
        "--results",
        type=Path,
        default=Path(__file__).parent / "results",
        help="folder for eana.jsonl (runs that it already holds are not repeated), "
        "eana_speed.jsonl and their PNG files",
    )
    return parser


def main() -> None:
    options = parser().parse_args()
    settings: dict[str, Any] = {}
    if options.quick:
        options.synthetic, options.examples_per_user, options.dim = True, 4, 8
        options.vocabularies, options.steps, options.slow_steps = [100, 1_000], 3, 2
        settings = {"users": 100, "canaries": 2, "references": 64, "repeats": (1, 10)}
    get_ready()
    options.results.mkdir(parents=True, exist_ok=True)
    if options.part != "leakage":
        measure_speed(
            options.vocabularies,
            options.batch,
            options.dim,
            options.steps,
            options.slow_steps,
            options.results,
        )
    if options.part != "speed":
        leakage = Leakage(
            folder=None if options.synthetic else options.folder,
            examples_per_user=options.examples_per_user,
            epochs=options.epochs,
            batch=options.batch,
            dim=options.dim,
            clip_norm=options.clip_norm,
            learning_rate=options.learning_rate,
            **settings,
        )
        measure_leakage(leakage, options.results)


if __name__ == "__main__":
    main()

"""What does a smaller gradient cost in AUC? Figures 3, 4 and 8 of the AdaFEST paper, in shape.

The paper is Ghazi et al. 2023, arXiv:2311.08357. Every run trains the pCTR model on synthetic
clicks with the vocabularies of its Table 3, to the same epsilon, batch and steps:

dpsgd         noise on every row (trained with LazyDP, whose released model has the distribution of
              DP-SGD's)
fest          DP-SGD on the k most frequent rows, by an accounted noisy histogram
adafest       rows whose noisy number of readers passes a threshold
adafest_plus  adafest among the rows of a noisy histogram
exponential   k rows a step, by noisy scores of their gradients

reduction is DP-SGD's embedding gradient (every number of every table) over the method's, as the
mean over steps. auc_loss is DP-SGD's AUC minus the method's, at the same seed. The data is
synthetic: nothing was tuned on it but what `settings` lists, and every run is shown.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.harness import print_table, write_json_lines
from benchmarks.step_time import get_ready
from lightning_dpsparse import (
    FEST,
    AdaFEST,
    AdaFESTPlus,
    DPSparseStrategy,
    ExponentialSelection,
    FusedOptimizer,
    LazyDP,
    NoisyHistogram,
    PrivacyMonitor,
    PrivacyPlan,
    Selection,
)
from lightning_dpsparse.data.batch import ClickDataset, Clicks, collate
from lightning_dpsparse.data.synthetic import ADAFEST_NUM_ROWS, SyntheticClicks
from lightning_dpsparse.engine.mechanism import Mechanism
from lightning_dpsparse.models import PCTRModule
from lightning_dpsparse.plugin.callbacks import private_run

Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """A method with what it is set to."""

    method: str
    value: str
    mechanism: Mechanism


def _selection(rows: int) -> Selection:
    return Selection(frequencies=NoisyHistogram(noise_multiplier=50.0), rows_in_total=rows)


def settings(*, quick: bool) -> list[Setting]:
    """Everything that is tried."""
    found = [Setting("dpsgd", "all rows", LazyDP())]
    for k in (100, 1_000, 10_000):
        found.append(Setting("fest", f"k={k:,}", FEST(selection=_selection(k))))
    for readers in (200.0, 800.0, 3_200.0):
        mechanism = AdaFEST(half_survival=readers)
        found.append(Setting("adafest", f"{readers:g} readers", mechanism))
    for readers in (200.0, 800.0, 3_200.0):
        plus = AdaFESTPlus(half_survival=readers, selection=_selection(10_000))
        found.append(Setting("adafest_plus", f"{readers:g} readers, k=10,000", plus))
    for k in (100, 1_000):
        found.append(Setting("exponential", f"k={k:,}", ExponentialSelection(num_rows=k)))
    return found[::4] if quick else found


class InMemory(ClickDataset):
    """Synthetic clicks made once: every run reads the same."""

    def __init__(self, clicks: SyntheticClicks) -> None:
        self.num_rows = clicks.num_rows
        step, count = 100_000, len(clicks)
        parts = [
            clicks.__getitems__(range(start, min(start + step, count)))
            for start in range(0, count, step)
        ]
        self._labels = np.concatenate([part.labels_B for part in parts])
        self._counts = np.concatenate([part.counts_BC for part in parts])
        ids = [part.ids_L.reshape(len(self.num_rows), -1).T for part in parts]
        self._ids = np.ascontiguousarray(np.concatenate(ids), dtype=np.int32)

    @override
    def __len__(self) -> int:
        return len(self._labels)

    @override
    def __getitems__(self, indices: Sequence[int]) -> Clicks:
        at = np.asarray(indices)
        ids = self._ids[at].T.astype(np.int64)
        return Clicks(self._labels[at], self._counts[at], np.ones_like(ids), ids.reshape(-1))


class Reduction(Callback):
    """The mean gradient size over all steps."""

    def __init__(self) -> None:
        self.reduction = 1.0

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        stepper = private_run(trainer).stepper
        assert stepper is not None
        self.reduction = stepper.measurements.gradient_size().get("gradient_reduction", 1.0)


def train(setting: Setting, epsilon: float, seed: int, data: Data, noise: float | None) -> Row:
    """One run, from calibration to validation."""
    seed_everything(seed)
    reduction = Reduction()
    plan = PrivacyPlan(
        mechanism=setting.mechanism, clip_norm=10.0, epsilon=epsilon, noise_multiplier=noise
    )
    strategy = DPSparseStrategy(
        privacy=plan, fused_optimizer=FusedOptimizer(kind="sgd", learning_rate=16.0)
    )
    with TemporaryDirectory() as folder:
        trainer = Trainer(
            strategy=strategy,
            callbacks=[PrivacyMonitor(), reduction],
            default_root_dir=folder,
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            log_every_n_steps=1 << 30,  # the mean over all steps is taken at the end
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        module = PCTRModule(
            num_rows=ADAFEST_NUM_ROWS,
            hidden=[128, 64],
            optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=0.02),
        )
        trainer.fit(module, data.training(), data.validation())
        assert strategy.private_run is not None
        run = strategy.private_run.budget.run
        return {
            "method": setting.method,
            "setting": setting.value,
            "epsilon": epsilon,
            "seed": seed,
            "auc": round(float(trainer.callback_metrics["val_auroc"]), 5),
            "reduction": round(reduction.reduction, 3),
            "noise_multiplier": math.ceil(run.noise_multiplier * 1e4) / 1e4,  # used again below
            "steps": trainer.global_step,
        }


class Data:
    """One stream for all runs: a day to train on, the next to validate on."""

    def __init__(self, examples: int, batch: int) -> None:
        self._batch = batch
        held_out = min(200_000, examples)
        self._train, self._val = (
            InMemory(SyntheticClicks(start, stop, ADAFEST_NUM_ROWS, examples_per_day=examples))
            for start, stop in ((0, examples), (examples, examples + held_out))
        )

    def training(self) -> DataLoader[Clicks]:
        return self._loader(self._train)

    def validation(self) -> DataLoader[Clicks]:
        return self._loader(self._val)

    def _loader(self, clicks: InMemory) -> DataLoader[Clicks]:
        return DataLoader(clicks, batch_size=self._batch, collate_fn=collate)  # type: ignore[arg-type]


def run_all(options: argparse.Namespace) -> Iterator[Row]:
    """Every run that `--json` does not hold yet."""
    done = read_json_lines(options.json) if options.json else []
    yield from done
    known = {(row["method"], row["setting"], row["epsilon"], row["seed"]) for row in done}
    data = Data(options.examples, options.batch)
    noise: dict[tuple[str, str, float], float] = {
        (row["method"], row["setting"], row["epsilon"]): row["noise_multiplier"] for row in done
    }
    for seed in range(options.seeds):
        for epsilon in options.epsilon:
            for setting in settings(quick=options.quick):
                key = (setting.method, setting.value, epsilon)
                if (*key, seed) in known:
                    continue
                # Calibrated once; the budget is checked again in every run.
                row = train(setting, epsilon, seed, data, noise.get(key))
                noise[key] = row["noise_multiplier"]
                print(json.dumps(row), file=sys.stderr, flush=True)
                yield row


def read_json_lines(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summary(rows: Sequence[Row]) -> list[Row]:
    """Means over seeds, with the standard error of the mean."""
    best = {(r["epsilon"], r["seed"]): r["auc"] for r in rows if r["method"] == "dpsgd"}
    groups: dict[tuple[float, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["epsilon"], row["method"], row["setting"]), []).append(row)
    table = []
    for (epsilon, method, setting), group in sorted(groups.items()):
        aucs = [row["auc"] for row in group]
        losses = [best[epsilon, row["seed"]] - row["auc"] for row in group]
        table.append(
            {
                "epsilon": epsilon,
                "method": method,
                "setting": setting,
                "seeds": len(group),
                "auc": round(statistics.mean(aucs), 4),
                "auc_error": round(standard_error(aucs), 4),
                "auc_loss": round(statistics.mean(losses), 4),
                "auc_loss_error": round(standard_error(losses), 4),
                "reduction": round(statistics.mean(row["reduction"] for row in group), 1),
            }
        )
    return table


def standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


COLOURS = {
    "dpsgd": "#333333",
    "fest": "#2a78b5",
    "adafest": "#c0392b",
    "adafest_plus": "#7d3c98",
    "exponential": "#e08e0b",
}


def plot(table: Sequence[Row], path: Path) -> None:
    """AUC against reduction, a panel for every epsilon."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    epsilons = sorted({row["epsilon"] for row in table})
    figure, panels = plt.subplots(
        1, len(epsilons), figsize=(4.2 * len(epsilons), 3.8), sharey=True, layout="constrained"
    )
    for axes, epsilon in zip(np.atleast_1d(panels), epsilons):
        for method, colour in COLOURS.items():
            rows = [r for r in table if r["epsilon"] == epsilon and r["method"] == method]
            rows.sort(key=lambda row: row["reduction"])
            axes.errorbar(
                [row["reduction"] for row in rows],
                [row["auc"] for row in rows],
                yerr=[row["auc_error"] for row in rows],
                color=colour,
                marker="o",
                capsize=3,
                label=method.replace("_plus", "+"),
            )
        axes.set(xscale="log", xlabel="embedding gradient size reduction", title=f"ε = {epsilon:g}")
        axes.spines[["top", "right"]].set_visible(False)
    np.atleast_1d(panels)[0].set_ylabel("validation AUC")
    np.atleast_1d(panels)[0].legend(frameon=False)
    figure.savefig(path, dpi=150)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tradeoff",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--epsilon", type=float, nargs="+", default=[1.0, 3.0, 8.0], help="targets")
    add("--seeds", type=int, default=3, help="runs of every setting")
    add("--examples", type=int, default=2_000_000, help="to train on, once through")
    add("--batch", type=int, default=16_384, help="expected batch size")
    add("--quick", action="store_true", help="few settings and examples: under a minute")
    add("--json", type=Path, help="one JSON object per run; runs it already holds are not repeated")
    add("--plot", type=Path, help="write the trade-off to this PNG file")
    return parser


def main() -> None:
    options = parser().parse_args()
    if options.quick:
        options.examples, options.batch, options.seeds, options.epsilon = 20_000, 1_024, 1, [8.0]
    get_ready()
    rows: list[Row] = []
    for row in run_all(options):
        rows.append(row)
        if options.json:
            write_json_lines(rows, options.json)
    table = summary(rows)
    print_table(table)
    if options.plot:
        plot(table, options.plot)


if __name__ == "__main__":
    main()

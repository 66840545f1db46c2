"""Does anything grow in a long run? Memory, open files, the journal, the time of a step.

A tiny private run takes many steps. Twenty times on the way it is looked at from outside the step:
`python -m benchmarks.soak --steps 100000`.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from benchmarks.harness import print_table, resident_mb, write_json_lines
from lightning_dpsparse import (
    AdaFEST,
    DPSparseStrategy,
    FusedOptimizer,
    LazyDP,
    PrivacyPlan,
    PrivacyReport,
)
from lightning_dpsparse.data import SyntheticData
from lightning_dpsparse.models import DLRMModule

SAMPLES = 20
NUM_ROWS = [100, 1_000, 50, 10]


class Looks(Callback):
    """Notes, every so many steps, what the process holds and how long steps took."""

    def __init__(self, every: int, root: Path) -> None:
        self._every, self._root = every, root
        self.found: list[dict[str, Any]] = []
        self._since = 0.0

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        if trainer.global_step % self._every:
            return
        now = time.process_time()
        gc.collect()
        journals = list(self._root.glob("privacy/*.journal"))
        self.found.append(
            {
                "steps": trainer.global_step,
                "cpu_ms_per_step": round((now - self._since) / self._every * 1e3, 3),
                "resident_mb": resident_mb(),
                "open_files": len(os.listdir("/proc/self/fd")),
                "journal_bytes": sum(path.stat().st_size for path in journals),
            }
        )
        self._since = time.process_time()

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._since = time.process_time()


def soak(mechanism: str, steps: int) -> list[dict[str, Any]]:
    """Train so many steps, with checkpoints, and return what was seen on the way."""
    torch.set_num_threads(1)
    mechanisms = {"lazydp": LazyDP(), "adafest": AdaFEST(half_survival=20)}
    with tempfile.TemporaryDirectory() as folder:
        looks = Looks(max(1, steps // SAMPLES), Path(folder))
        saving = ModelCheckpoint(
            folder, every_n_train_steps=max(1, steps // 5), save_top_k=1, save_last=True
        )
        trainer = Trainer(
            strategy=DPSparseStrategy(
                privacy=PrivacyPlan(mechanism=mechanisms[mechanism], noise_multiplier=1.0),
                fused_optimizer=FusedOptimizer(kind="sgd", learning_rate=0.1),
            ),
            accelerator="cpu",
            devices=1,
            max_steps=steps,
            max_epochs=-1,
            default_root_dir=folder,
            callbacks=[looks, saving, PrivacyReport()],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
        )
        data = SyntheticData(
            batch_size=8, num_rows=NUM_ROWS, examples_per_day=200_000, val_days=0, test_days=1
        )
        module = DLRMModule(NUM_ROWS, embedding_dim=4, dense_arch=[8, 4], over_arch=[8, 1])
        trainer.fit(module, data)
    return [{"mechanism": mechanism, **row} for row in looks.found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--mechanism", choices=["lazydp", "adafest"], default="lazydp")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    rows = soak(options.mechanism, options.steps)
    print_table(rows)
    if options.json is not None:
        write_json_lines(rows, options.json)


if __name__ == "__main__":
    main()

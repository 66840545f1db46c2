"""How long does a tall table take to start, step, flush, save and resume, and how much memory?

One table of many rows is trained with LazyDP for some steps, saved, and resumed in another process:
`python -m benchmarks.tall_table --rows 50000000`.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.harness import peak_rss_mb, print_table, write_json_lines
from lightning_dpsparse import DPSparseStrategy, FusedOptimizer, LazyDP, PrivacyPlan
from lightning_dpsparse.data import SyntheticData
from lightning_dpsparse.models import DLRMModule

STEPS, BATCH = 20, 2_048


class Stopwatch(Callback):
    """When training began, and how long its steps took."""

    def __init__(self) -> None:
        self.began_at = 0.0
        self.steps_ms: list[float] = []
        self._start = 0.0

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.began_at = time.perf_counter()

    def on_train_batch_start(self, *args: Any) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps_ms.append((time.perf_counter() - self._start) * 1e3)


def _train(rows: int, width: int, folder: Path, *, resume: bool) -> dict[str, Any]:
    """Train some steps on from the start or from the checkpoint, in this process."""
    checkpoint, watch = folder / "saved.ckpt", Stopwatch()
    trainer = Trainer(
        strategy=DPSparseStrategy(
            privacy=PrivacyPlan(mechanism=LazyDP(), noise_multiplier=1.0),
            fused_optimizer=FusedOptimizer(kind="sgd", learning_rate=0.1),
        ),
        accelerator="cpu",
        devices=1,
        max_steps=STEPS * (2 if resume else 1),
        max_epochs=-1,
        default_root_dir=str(folder),
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    data = SyntheticData(
        batch_size=BATCH, num_rows=[rows], examples_per_day=1_000_000, val_days=0, zipf=0.5
    )
    module = DLRMModule([rows], embedding_dim=width, dense_arch=[16, width], over_arch=[16, 1])
    start = time.perf_counter()
    trainer.fit(module, data, ckpt_path=checkpoint if resume else None)
    found = {
        "what": "resumed" if resume else "begun",
        "start_s": round(watch.began_at - start, 1),
        "step_ms": round(statistics.median(watch.steps_ms[3:]), 1),
        # Training ends with a flush: every row gets the noise that it owes.
        "flush_s": round(time.perf_counter() - start - (watch.began_at - start), 1)
        - round(sum(watch.steps_ms) / 1e3, 1),
        "save_s": None,
        "saved_gb": None,
    }
    if not resume:
        start = time.perf_counter()
        trainer.save_checkpoint(checkpoint)
        size = sum(path.stat().st_size for path in checkpoint.iterdir())
        found |= {"save_s": round(time.perf_counter() - start, 1), "saved_gb": round(size / 1e9, 2)}
    return found | {"peak_mb": peak_rss_mb()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=50_000_000)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.set_num_threads(2)
    if options.part is not None:
        folder, which = Path(options.part[0]), options.part[1]
        print(json.dumps(_train(options.rows, options.width, folder, resume=which == "resume")))
        return
    folder = Path(tempfile.mkdtemp())
    try:
        rows = [_alone(options.rows, options.width, folder, part) for part in ("begin", "resume")]
    finally:
        shutil.rmtree(folder)
    print_table(rows)
    if options.json is not None:
        write_json_lines(rows, options.json)


def _alone(rows: int, width: int, folder: Path, part: str) -> dict[str, Any]:
    """One part in a process of its own, whose memory is its own too."""
    command = [sys.executable, "-m", "benchmarks.tall_table", "--rows", str(rows)]
    command += ["--width", str(width), "--part", str(folder), part]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"rows": rows, "width": width, "table_gb": round(rows * width * 4 / 1e9, 2), **found}


if __name__ == "__main__":
    main()

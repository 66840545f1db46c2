"""A small private run that tells, outside of the disk that may fail, what it has done."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_dpsparse import (
    DPSGD,
    AdaFEST,
    DPSparseStrategy,
    FusedOptimizer,
    LazyDP,
    PrivacyPlan,
    PrivacyReport,
)
from tests.support.tiny_model import Bags, SmallModule, collate

SIZE, BATCH = 60, 12
DELTA = 1e-3
MECHANISMS = {
    "dpsgd": DPSGD(),
    "lazydp": LazyDP(),
    "adafest": AdaFEST(threshold=2.0),
}


@dataclass(frozen=True)
class Settings:
    """What to train, and where to tell of it."""

    root: str
    """Folder of the run: on the disk under test."""
    notes: str
    """Folder of the notes: somewhere safe."""
    steps: int = 100
    mechanism: str = "lazydp"
    save_every: int = 7
    save_last: bool = False
    save_on_exception: bool = False
    resume: str | None = "auto"
    write_ahead: int = 16
    seconds_per_step: float = 0.0
    raise_at: tuple[int, int] | None = None
    """Step and rank of an error in user code; rank -1 is all of them."""
    validate: bool = False
    with_report: bool = True
    hosts: int = 1
    timeout: float | None = None
    """Seconds that a rank waits for the others."""
    tells_key: bool = False
    """Whether to note the run's key, for a test that looks for it elsewhere."""


class Telling(SmallModule):
    """Leaves a byte for every step that it is about to take, past all buffers."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(lr=0.01)
        self.settings = settings

    def on_train_start(self) -> None:
        if self.settings.tells_key:
            run = self.trainer.strategy.private_run  # type: ignore[attr-defined]
            _append(Path(self.settings.notes, f"key-{self.trainer.global_rank}"), run._key.secret)

    def on_before_backward(self, loss: Any) -> None:
        if self.trainer.is_global_zero:
            _append(Path(self.settings.notes, "steps"), b".")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        time.sleep(self.settings.seconds_per_step)
        here = [(self.trainer.global_step, rank) for rank in (self.trainer.global_rank, -1)]
        if self.settings.raise_at in here:
            raise RuntimeError("an error in user code")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            _append(Path(self.settings.notes, "validation"), b".")
        time.sleep(self.settings.seconds_per_step)
        super().validation_step(batch, batch_idx)


class TellingCheckpoint(ModelCheckpoint):
    """Notes which checkpoints have been reported whole, and which are about to go."""

    def __init__(self, notes: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._notes = Path(notes, "checkpoints")

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        if trainer.is_global_zero and not trainer.interrupted:
            _append(self._notes, f"+{filepath}\n".encode())

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if trainer.is_global_zero:
            _append(self._notes, f"-{filepath}\n".encode())
        super()._remove_checkpoint(trainer, filepath)


def _append(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, data)
    os.close(descriptor)


def train(settings: Settings, world_size: int) -> None:
    """Train to the end; runs inside a rank."""
    torch.manual_seed(0)
    checkpoint = TellingCheckpoint(
        settings.notes,
        str(Path(settings.root, "checkpoints")),
        filename="{step}",
        every_n_train_steps=settings.save_every,
        save_top_k=2,
        monitor="step",
        mode="max",
        save_last=settings.save_last,
        save_on_exception=settings.save_on_exception,
    )
    trainer = Trainer(
        strategy=DPSparseStrategy(
            privacy=PrivacyPlan(
                mechanism=MECHANISMS[settings.mechanism], noise_multiplier=1.0, delta=DELTA
            ),
            fused_optimizer=FusedOptimizer(kind="sgd", learning_rate=0.1),
            resume=settings.resume,  # type: ignore[arg-type]
            write_ahead=settings.write_ahead,
            **(
                {} if settings.timeout is None else {"timeout": timedelta(seconds=settings.timeout)}
            ),
        ),
        accelerator="cpu",
        devices=world_size // settings.hosts,
        num_nodes=settings.hosts,
        max_steps=settings.steps,
        max_epochs=-1,
        default_root_dir=settings.root,
        callbacks=[checkpoint, *([PrivacyReport()] if settings.with_report else [])],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=1.0 if settings.validate else 0,
        num_sanity_val_steps=0,
    )
    data = Bags(SIZE)
    loader = DataLoader(data, batch_size=BATCH // world_size, collate_fn=collate, shuffle=True)
    validation = DataLoader(data, batch_size=1, collate_fn=collate) if settings.validate else None
    trainer.fit(Telling(settings), loader, validation)

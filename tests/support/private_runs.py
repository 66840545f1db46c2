"""Whole private runs, for the tests that watch them: a marked data set, and `fit`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_dpsparse import PrivacyPlan
from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.plugin.private_run import CHECKPOINT_KEY
from tests.support.tiny_model import Bags, SmallModule, collate, make_trainer, snapshot

SIZE, BATCH = 60, 12  # a rate of 0.2, epochs of five steps
TARGET = PrivacyPlan(epsilon=3.0, delta=1e-3)
NOISY = PrivacyPlan(noise_multiplier=1.0, delta=1e-3)
REPLAYED = PrivacyPlan(noise_multiplier=1.0, delta=1e-3, fixed_key=4)


class Marked(Bags):
    """Says who is who by the first dense feature; `users` has three examples each."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(size)
        for i, (counts, _, _) in enumerate(self.examples):
            counts[0] = float(i)
        self.users = np.arange(size) // 3
        self.day_starts = [0, size // 2]


class Watching(SmallModule):
    """Keeps what each step drew, and can fail or die in one of them."""

    def __init__(
        self, fail_at: int | None = None, die_at: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(lr=0.01, **kwargs)
        self.fail_at, self.die_at = fail_at, die_at
        self.drawn: list[list[int]] = []
        self.epsilons: list[float] = []
        self.unit_sizes: list[list[int] | None] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        step = len(self.drawn)
        self.drawn.append(batch.dense_features[:, 0].long().tolist())
        run = getattr(self.trainer.strategy, "private_run", None)
        self.unit_sizes.append(run.stepper._unit_sizes if run else None)
        if step == self.fail_at:
            raise RuntimeError("this step fails")
        if step == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        shown = self.trainer.callback_metrics.get("epsilon")
        self.epsilons.append(float("nan") if shown is None else float(shown))


def strict_collate(examples: list[Any]) -> Any:
    """Like most: no idea of nobody."""
    if not examples:
        raise IndexError("cannot collate nobody")
    return collate(examples)


def marked_loader(world: int, **kwargs: Any) -> DataLoader[Any]:
    settings = {"batch_size": BATCH // world, "collate_fn": strict_collate, "shuffle": True}
    return DataLoader(Marked(), **(settings | kwargs))


def fit(
    world: int,
    privacy: PrivacyPlan | None,
    folder: Path,
    *,
    resume: Path | None = None,
    module: Watching | None = None,
    loader: Any = None,
    save_every: int | None = None,
    weights_only: bool = False,
    with_facts: bool = False,
    resume_auto: bool = False,
    **trainer: Any,
) -> dict[str, Any]:
    """Runs inside a rank."""
    torch.manual_seed(0)
    module = module or Watching()
    callbacks: list[Any] = trainer.pop("callbacks", [])
    if save_every:
        name = "weights-{step}" if weights_only else "{step}"
        saver = ModelCheckpoint(
            folder,
            filename=name,
            every_n_train_steps=save_every,
            save_top_k=-1,
            save_weights_only=weights_only,
        )
        callbacks = [*callbacks, saver]
        trainer["enable_checkpointing"] = True
    if resume_auto:
        trainer["resume"] = "auto"
    maker = make_trainer(
        world, privacy=privacy, callbacks=callbacks, default_root_dir=str(folder), **trainer
    )
    maker.fit(module, marked_loader(world) if loader is None else loader, ckpt_path=resume)
    run = maker.strategy.private_run  # type: ignore[attr-defined]
    return {
        "drawn": module.drawn,
        "epsilons": module.epsilons,
        "unit_sizes": module.unit_sizes,
        "ledger": run.budget.ledger.to_data() if run else None,
        "noise": run.budget.run.noise_multiplier if run else None,
        "state": snapshot(module),
        "steps": maker.global_step,
        "facts": run.facts() if run and with_facts else None,
    }


def ledger_of(result: dict[str, Any]) -> Ledger:
    return Ledger.from_data(result["ledger"])


def saved_ledger(path: Path) -> Ledger:
    meta = torch.load(path / "meta.pt", weights_only=True)
    return Ledger.from_data(meta[CHECKPOINT_KEY]["ledger"])

"""One run of `benchmarks.utility`: a task and a setting in, scores and the claimed epsilon out."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import Callback, seed_everything
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.step_time import trainer_for
from benchmarks.utility_levers import Momentum, QuantileClipping
from benchmarks.utility_settings import Setting, Task
from lightning_dpsparse import (
    AutomaticClipping,
    AverageWeights,
    DPAdam,
    DPSparseStrategy,
    FlatClipping,
    FusedOptimizer,
    LazyDP,
    LogitCalibration,
    PrivacyPlan,
    Users,
)
from lightning_dpsparse.engine.clipping import Clipping
from lightning_dpsparse.models.base import RecommenderModule

Row = dict[str, Any]
METRICS = {
    "auc": "val_auroc",
    "log_loss": "val_log_loss",
    "calibration": "val_calibration",
    "recall@10": "val_recall@10",
}
"""Names in the results, and in the model's log. Predicted over real clicks is the calibration."""
CLIPPINGS: dict[str, Callable[[], Clipping]] = {
    "flat": FlatClipping,
    "automatic": AutomaticClipping,
    "quantile": QuantileClipping,
    "quantile_scaled": partial(QuantileClipping, keeps_steps=True),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "dp_adam": DPAdam,
}


def plan_for(setting: Setting, target: float | None) -> PrivacyPlan | None:
    if setting.privacy == "none":
        return None
    return PrivacyPlan(
        mechanism=Momentum(setting.momentum) if setting.momentum else LazyDP(),
        clipping=CLIPPINGS[setting.clipping](),
        clip_norm=setting.clip_norm,
        dense_scale=setting.dense_scale,
        epsilon=target,
        noise_multiplier=0.0 if setting.privacy == "clipping" else None,
        calibration=LogitCalibration() if setting.calibrated else None,
        unit=Users(max_examples=setting.users) if setting.users else "example",
    )


def module_for(task: Task, setting: Setting, num_rows: list[int]) -> RecommenderModule:
    optimizer = OPTIMIZERS[setting.dense_optimizer]
    settings: Row = {"optimizer": lambda p: optimizer(p, lr=setting.dense_rate)}

    def rate(step: int) -> float:
        """What learning rates are multiplied by."""
        steps = module.trainer.estimated_stepping_batches
        plan = getattr(module.trainer.strategy, "privacy", None)
        share = 1.0 if setting.schedule == "constant" else max(0.0, 1.0 - step / steps)
        return share * getattr(plan and plan.clipping, "rate", 1.0)

    settings["lr_scheduler"] = lambda optimizer: LambdaLR(optimizer, rate)
    if setting.base_rate is not None:
        settings["base_rate"] = setting.base_rate
    module: RecommenderModule = task.model(num_rows=num_rows, **settings)
    return module


def train(
    task: Task, setting: Setting, target: float | None, seed: int, generator_seed: int | None
) -> Row:
    """One run, from the calibration of its noise to validation."""
    data = task.data(setting, generator_seed)
    seed_everything(seed, verbose=False)
    fused = FusedOptimizer(kind=setting.table_optimizer, learning_rate=setting.table_rate)
    strategy = DPSparseStrategy(privacy=plan_for(setting, target), fused_optimizer=fused)
    callbacks: list[Callback] = []
    if setting.average is not None:
        callbacks.append(AverageWeights(fraction=setting.average))
    module = module_for(task, setting, data.train_set.num_rows)
    with TemporaryDirectory() as folder:
        trainer = trainer_for(strategy, folder, callbacks, setting.epochs)
        started = time.perf_counter()
        trainer.fit(module, data.train_dataloader())
        seconds, steps, run = time.perf_counter() - started, trainer.global_step, None
        if strategy.private_run is not None:
            run = strategy.private_run.facts()
        (found,) = trainer.validate(module, data.val_dataloader(), verbose=False)
    claim = None if run is None else run["guarantee"]["epsilon"]
    return {
        "epsilon": None if "quantile" in setting.clipping else claim,  # its counts are not charged
        "noise_multiplier": None if run is None else run["ran"]["noise_multiplier"],
        "examples": len(data.train_set),
        "epochs": setting.epochs,
        "steps": steps,
        **{name: round(found[key], 5) if key in found else None for name, key in METRICS.items()},
        "seconds": round(seconds, 1),
    }

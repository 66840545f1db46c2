"""Runs that save and resume checkpoints, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_dpsparse import FusedOptimizer, Placement
from tests.support.tiny_model import SmallModule, assemble, loader, make_trainer, snapshot

BATCH, BATCHES_PER_EPOCH = 8, 5
SIZE = BATCH * BATCHES_PER_EPOCH
ADAGRAD = FusedOptimizer(kind="adagrad", learning_rate=0.2)
ROWWISE = FusedOptimizer(kind="rowwise_adagrad", learning_rate=0.2)
ROWS = Placement(default="row_wise")
TABLES = Placement(default="table_wise")


class Snapping(SmallModule):
    """Remembers itself as it was loaded."""

    loaded: dict[str, Any] | None = None
    loaded_momentum: list[Tensor]

    def on_train_start(self) -> None:
        if self.trainer.global_step:
            self.loaded = snapshot(self)
            states = self.trainer.optimizers[0].state.values()
            self.loaded_momentum = [state["momentum_buffer"].clone() for state in states]


def fit(
    world_size: int,
    placement: Placement,
    optimizer: FusedOptimizer,
    steps: int,
    save: Path | None = None,
    resume: Path | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Train up to `steps`, over epochs of five batches; runs inside a rank."""
    torch.manual_seed(0 if resume is None else 99)  # a resumed run owes nothing to its own seed
    module = Snapping(schedule="cosine", sequences=kwargs.pop("sequences", ()))
    if save is not None:
        each = (
            {"every_n_epochs": 1}
            if kwargs.pop("at_epoch_end", False)
            else {"every_n_train_steps": steps}
        )
        callback = ModelCheckpoint(save.parent, filename=save.name, save_top_k=-1, **each)
        callback.FILE_EXTENSION = ""
        kwargs |= {"callbacks": [callback], "enable_checkpointing": True}
    trainer = make_trainer(
        world_size, placement, optimizer, max_steps=steps, max_epochs=-1, **kwargs
    )
    trainer.fit(module, loader(SIZE, BATCH, world_size), ckpt_path=resume)
    momentum = [s["momentum_buffer"].clone() for s in trainer.optimizers[0].state.values()]
    return {
        "end": snapshot(module),
        "loaded": module.loaded,
        "momentum": momentum,
        "loaded_momentum": getattr(module, "loaded_momentum", None),
    }


def whole(results: list[dict[str, Any]], when: str = "end") -> dict[str, Tensor]:
    return assemble([result[when] for result in results])


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def predict(
    world_size: int, checkpoint: Path | None, sequences: tuple[str, ...] = ()
) -> list[Tensor]:
    module = SmallModule(sequences=sequences)
    trainer = make_trainer(world_size, ROWS, ROWWISE)
    return trainer.predict(module, loader(SIZE, BATCH, world_size), ckpt_path=checkpoint)

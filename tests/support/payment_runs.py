"""Short runs of LazyDP and DP-SGD that fail, save and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dpsparse import Placement
from tests.support.lazydp_runs import unmoved
from tests.support.naive_step import Batches, plan
from tests.support.plain_training import SGD
from tests.support.tiny_model import Recording, make_trainer, snapshot

SIZES = [[2, 1], [0, 0], [1, 0], [0, 2], [0, 0]] * 2


class Breaking(Recording):
    """Fails in one step."""

    def __init__(self, fail_at: int | None = None, **kwargs: Any) -> None:
        super().__init__(lr=0.05, schedule="cosine", **kwargs)
        self.fail_at = fail_at

    def on_train_start(self) -> None:
        """Nothing: asking for the state would make all pay."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == self.fail_at:
            raise ArithmeticError("this step fails")
        return loss


def fit(
    world: int, placement: Placement, mechanism: Any, module: Breaking | None = None, **trainer: Any
) -> Any:
    """Runs inside a rank: replayed noise."""
    torch.manual_seed(0)
    resume = trainer.pop("resume", None)
    module = module or Breaking()
    maker = make_trainer(
        world,
        placement,
        SGD,
        privacy=plan(noise=2.0, mechanism=mechanism, noise_source="row_keyed"),
        **trainer,
    )
    rank = torch.distributed.get_rank() if world > 1 else None
    with unmoved():
        maker.fit(module, Batches(SIZES, rank), ckpt_path=resume)
    return snapshot(module)


def fit_and_save(world: int, placement: Placement, mechanism: Any, folder: Path, **kw: Any) -> Any:
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=5, save_top_k=-1)
    return fit(
        world,
        placement,
        mechanism,
        callbacks=[saver],
        enable_checkpointing=True,
        default_root_dir=str(folder),
        **kw,
    )

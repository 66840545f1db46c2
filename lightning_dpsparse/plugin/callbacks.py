"""Callbacks that go with the strategy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from typing_extensions import override


class PredictionWriter(BasePredictionWriter):
    """Writes what `predict` returns, in the order of the data set, as one .npy file.

    Args:
        output: Where the predictions go.
    """

    def __init__(self, output: str = "predictions.npy") -> None:
        interval: Literal["epoch"] = "epoch"
        super().__init__(write_interval=interval)
        self.output = Path(output)

    @override
    def write_on_epoch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        index = torch.tensor([i for batches in batch_indices for batch in batches for i in batch])
        values = torch.cat([p.detach().cpu() for p in predictions]) if len(predictions) else index
        mine = self.output.with_suffix(f".rank{trainer.global_rank}.npz")
        self.output.parent.mkdir(parents=True, exist_ok=True)
        np.savez(mine, index=index.numpy(), values=values.numpy())
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            self._join(trainer.world_size)

    def _join(self, world_size: int) -> None:
        paths = [self.output.with_suffix(f".rank{rank}.npz") for rank in range(world_size)]
        parts = [dict(np.load(path)) for path in paths]
        index = np.concatenate([part["index"] for part in parts]).astype(np.int64)
        values = np.concatenate([part["values"] for part in parts])
        np.save(self.output, values[np.argsort(index)])
        for path in paths:
            path.unlink()
        print(f"{len(values):,} predictions written to {self.output}")

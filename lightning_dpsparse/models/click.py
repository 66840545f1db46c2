"""What every click model shares: loss, metrics, optimizer, moving a batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from typing_extensions import override

from lightning_dpsparse.models.metrics import click_metrics


def default_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.01)


class ClickModule(LightningModule):
    """Predicts a click from dense counts and bags of ids.

    Subclasses build their layers in `configure_model` and turn a batch into logits in `forward`.

    Args:
        optimizer: Trains the dense layers. The strategy's fused optimizer trains the tables.
        lr_scheduler: Stepped after every batch; the tables' learning rate follows it.
    """

    def __init__(
        self,
        optimizer: OptimizerCallable = default_optimizer,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        self._optimizer, self._lr_scheduler = optimizer, lr_scheduler
        self.val_metrics = click_metrics("val_")
        self.test_metrics = click_metrics("test_")

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss_B = F.binary_cross_entropy_with_logits(self(batch), batch.labels, reduction="none")
        self.log("train_loss", loss_B.detach().mean(), prog_bar=True, batch_size=len(loss_B))
        return loss_B

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._measure(self.val_metrics, batch)

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._measure(self.test_metrics, batch)

    def _measure(self, metrics: Any, batch: Batch) -> None:
        metrics.update(torch.sigmoid(self(batch)), batch.labels.long())
        self.log_dict(metrics, prog_bar=True, batch_size=len(batch.labels))

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return torch.sigmoid(self(batch))

    @override
    def configure_optimizers(self) -> Any:
        optimizer = self._optimizer(self.parameters())
        if self._lr_scheduler is None:
            return optimizer
        scheduler = {"scheduler": self._lr_scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def feature_names(num_features: int) -> list[str]:
    """The categorical features' names, as the data modules of this package give them.

    >>> feature_names(2)
    ['cat_0', 'cat_1']
    """
    return [f"cat_{i}" for i in range(num_features)]


def one_table_per_feature(num_rows: list[int], widths: list[int]) -> EmbeddingBagCollection:
    """Tables `table_0`, `table_1`, ... for the features `cat_0`, `cat_1`, ..."""
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"table_{i}", num_embeddings=rows, embedding_dim=width, feature_names=[feature]
            )
            for i, (feature, rows, width) in enumerate(
                zip(feature_names(len(num_rows)), num_rows, widths)
            )
        ]
    )


def log_counts(counts: Tensor) -> Tensor:
    """log(1 + x), with negative counts (Criteo has some) taken as zero."""
    return torch.log1p(counts.clamp_min(0.0))

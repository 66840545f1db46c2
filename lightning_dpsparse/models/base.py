"""What every model shares: losses, metrics and an optimizer for the dense layers.

`training_step` returns the losses of all examples and not their mean, because the private step
clips each example by itself. The tables are not in `configure_optimizers`: the strategy updates
them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor
from torchmetrics import MetricCollection
from torchrec.datasets.utils import Batch
from typing_extensions import override

from lightning_dpsparse.checks import check_flag, shown
from lightning_dpsparse.optimizers.linear_decay import LinearDecay
from lightning_dpsparse.plugin.sharded_strategy import ShardedStrategy
from lightning_dpsparse.refused import Refused

# B examples


def default_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Adagrad with a learning rate of 0.01."""
    return torch.optim.Adagrad(parameters, lr=0.01)


class RecommenderModule(LightningModule):
    """Trains on one loss per example, and computes metrics in validation and test.

    Args:
        make_metrics: Makes the metrics from the prefix of their names.
        optimizer: Trains the dense layers. The strategy's fused optimizer trains the tables.
        lr_scheduler: Stepped after every batch; the tables' learning rate follows it.
        log_train_loss: Log the batch's mean loss, which is not private. None logs it in runs
            without privacy alone.
    """

    def __init__(
        self,
        make_metrics: Callable[[str], MetricCollection],
        optimizer: OptimizerCallable,
        lr_scheduler: LRSchedulerCallable | None,
        log_train_loss: bool | None = None,
    ) -> None:
        super().__init__()
        if not callable(optimizer) or not (lr_scheduler is None or callable(lr_scheduler)):
            raise Refused(
                "Expected an optimizer, and a lr_scheduler or None, that can be called, found "
                f"{shown(optimizer)} and {shown(lr_scheduler)}. Give a function of the parameters, "
                "such as functools.partial(torch.optim.Adagrad, lr=0.01)."
            )
        if log_train_loss is not None:
            check_flag("log_train_loss", log_train_loss)
        self._optimizer, self._lr_scheduler = optimizer, lr_scheduler
        self.log_train_loss = log_train_loss
        self.val_metrics, self.test_metrics = make_metrics("val_"), make_metrics("test_")

    @abstractmethod
    def example_losses(self, batch: Batch) -> Tensor:
        """The exact loss of every example, (B,). If tables are sharded, all ranks must call it."""

    def _training_losses(self, batch: Batch) -> Tensor:
        """The losses that training minimises: the exact ones, unless a model has cheaper ones."""
        return self.example_losses(batch)

    @abstractmethod
    def _measure(self, metrics: MetricCollection, batch: Batch) -> None:
        """Update and log the metrics."""

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self._check_strategy()
        loss_B = self._training_losses(batch)
        if self._logs_train_loss():
            self.log("train_loss", loss_B.detach().mean(), prog_bar=True, batch_size=len(loss_B))
        return loss_B

    def _check_strategy(self) -> None:
        """Refuse a strategy that wants one loss for all examples, and knows nothing of tables."""
        if self._trainer is not None and not isinstance(self.trainer.strategy, ShardedStrategy):
            raise Refused(
                "Expected DPSparseStrategy to train this model, which has a loss for every "
                f"example, found {type(self.trainer.strategy).__name__}. Set trainer.strategy to "
                "lightning_dpsparse.DPSparseStrategy."
            )

    def _logs_train_loss(self) -> bool:
        if self.log_train_loss is not None:
            return self.log_train_loss
        # Without a trainer, `log` does nothing.
        return self._trainer is None or getattr(self.trainer.strategy, "privacy", None) is None

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._measure(self.val_metrics, batch)

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._measure(self.test_metrics, batch)

    @override
    def configure_optimizers(self) -> Any:
        # Without dense layers the optimizer has no parameters, but the tables follow its schedule.
        try:
            optimizer = self._optimizer(list(self.parameters()) or [{"params": []}])
        except ValueError as error:
            raise Refused(
                f"Expected settings that the optimizer takes, found that it refuses them: {error}. "
                "Change the model's optimizer."
            ) from error
        if self._lr_scheduler is None:
            return optimizer
        scheduler = self._lr_scheduler(optimizer)
        if isinstance(scheduler, LinearDecay) and scheduler.total_steps is None:
            scheduler.set_total_steps(max(1, self.trainer.estimated_stepping_batches))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

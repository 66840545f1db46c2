"""TorchRec's DLRM and DLRM-DCN as LightningModules.

The networks are TorchRec's own; the modules here build them from numbers that a recipe can hold,
one table for each categorical feature, and return one loss per example (`click.py`, `base.py`).
"""

from __future__ import annotations

from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRM, DLRM_DCN
from typing_extensions import override

from lightning_dpsparse.models.click import (
    ClickModule,
    check_arch,
    check_counts,
    check_num_rows,
    check_sizes,
    default_optimizer,
    log_counts,
    one_table_per_feature,
)
from lightning_dpsparse.refused import Refused


class DLRMModule(ClickModule):
    """TorchRec's DLRM: bottom MLP, pairwise dot products, top MLP (Naumov et al. 2019).

    Args:
        num_rows: Rows of each categorical feature's table.
        embedding_dim: Width of every table.
        dense_arch: Bottom MLP's layer sizes; the last must be `embedding_dim`.
        over_arch: Top MLP's layer sizes; the last must be 1.
        num_counts: How many integer features there are.
        optimizer: Trains the dense layers.
        lr_scheduler: Stepped after every batch; the tables' learning rate follows it.
        log_train_loss: Log the batch's mean loss, which is not private. None logs it in runs
            without privacy alone.
        base_rate: Public share of clicks that the last bias begins with; None begins as torch does.
        slice_feature: A feature with few values, each of which gets a bias of its own when the
            model is calibrated.
    """

    def __init__(
        self,
        num_rows: list[int],
        embedding_dim: int = 16,
        dense_arch: list[int] = [512, 256, 16],  # noqa: B006 (never written to)
        over_arch: list[int] = [512, 256, 1],  # noqa: B006
        num_counts: int = 13,
        optimizer: OptimizerCallable = default_optimizer,
        lr_scheduler: LRSchedulerCallable | None = None,
        log_train_loss: bool | None = None,
        base_rate: float | None = None,
        slice_feature: str | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler, log_train_loss, base_rate, slice_feature)
        check_num_rows(num_rows)
        check_sizes(embedding_dim=embedding_dim, num_counts=num_counts)
        check_arch("dense_arch", dense_arch, least=1)
        check_arch("over_arch", over_arch, least=2)  # TorchRec wants a hidden layer
        if dense_arch[-1] != embedding_dim or over_arch[-1] != 1:
            raise Refused(
                f"Expected dense_arch to end in embedding_dim={embedding_dim} and over_arch in 1, "
                f"found {dense_arch} and {over_arch}. Change the last sizes."
            )
        self.num_rows, self.embedding_dim = num_rows, embedding_dim
        self.dense_arch, self.over_arch, self.num_counts = dense_arch, over_arch, num_counts
        self.net: nn.Module | None = None

    @override
    def configure_model(self) -> None:
        if self.net is None:
            self.net = self._build()
            self._begin_biases(self.num_rows)

    @property
    @override
    def calibrated_layer(self) -> str:
        return "net.over_arch.model.1"

    def _build(self) -> nn.Module:
        return DLRM(
            one_table_per_feature(self.num_rows, [self.embedding_dim] * len(self.num_rows)),
            self.num_counts,
            self.dense_arch,
            self.over_arch,
        )

    @override
    def forward(self, batch: Batch) -> Tensor:
        """Logits of a click, (B,)."""
        assert self.net is not None
        check_counts(batch, self.num_counts)
        logits: Tensor = self.net(log_counts(batch.dense_features), batch.sparse_features)
        return self._with_slice_bias(logits.squeeze(1), batch)


class DLRMDCNModule(DLRMModule):
    """TorchRec's DLRM with a low-rank cross network in place of the dot products (DCN v2).

    Args:
        num_rows: Rows of each categorical feature's table.
        embedding_dim: Width of every table.
        dense_arch: Bottom MLP's layer sizes; the last must be `embedding_dim`.
        over_arch: Top MLP's layer sizes; the last must be 1.
        num_counts: How many integer features there are.
        cross_layers: Layers of the cross network.
        cross_rank: Rank of each cross layer.
        optimizer: Trains the dense layers.
        lr_scheduler: Stepped after every batch; the tables' learning rate follows it.
        log_train_loss: Log the batch's mean loss, which is not private. None logs it in runs
            without privacy alone.
        base_rate: Public share of clicks that the last bias begins with; None begins as torch does.
        slice_feature: A feature with few values, each of which gets a bias of its own when the
            model is calibrated.
    """

    def __init__(
        self,
        num_rows: list[int],
        embedding_dim: int = 128,
        dense_arch: list[int] = [512, 256, 128],  # noqa: B006 (never written to)
        over_arch: list[int] = [1024, 1024, 512, 256, 1],  # noqa: B006
        num_counts: int = 13,
        cross_layers: int = 3,
        cross_rank: int = 512,
        optimizer: OptimizerCallable = default_optimizer,
        lr_scheduler: LRSchedulerCallable | None = None,
        log_train_loss: bool | None = None,
        base_rate: float | None = None,
        slice_feature: str | None = None,
    ) -> None:
        super().__init__(
            num_rows,
            embedding_dim,
            dense_arch,
            over_arch,
            num_counts,
            optimizer,
            lr_scheduler,
            log_train_loss,
            base_rate,
            slice_feature,
        )
        check_sizes(cross_layers=cross_layers, cross_rank=cross_rank)
        self.cross_layers, self.cross_rank = cross_layers, cross_rank

    @override
    def _build(self) -> nn.Module:
        return DLRM_DCN(
            one_table_per_feature(self.num_rows, [self.embedding_dim] * len(self.num_rows)),
            self.num_counts,
            self.dense_arch,
            self.over_arch,
            self.cross_layers,
            self.cross_rank,
        )

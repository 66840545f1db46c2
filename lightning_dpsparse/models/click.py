"""What every click model shares: the loss, the metrics and the tables.

A batch has counts and bags of ids (`data/batch.py`). A model turns it into one logit per example;
`ClickModule` makes losses, metrics and predictions of the logits. See `dlrm.py` and `pctr.py`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from typing_extensions import override

from lightning_dpsparse.checks import check_number, check_text, check_whole, check_whole_list
from lightning_dpsparse.models.base import RecommenderModule, default_optimizer
from lightning_dpsparse.models.metrics import click_metrics
from lightning_dpsparse.refused import Refused

_MOST_SIZE, _MOST_LAYERS = 1_000_000, 1_000
"""Largest size of a layer, and largest number of layers."""
_MOST_SLICES = 1_000
"""Most values of a feature that have biases of their own."""


class ClickModule(RecommenderModule):
    """Predicts a click from dense counts and bags of ids.

    Subclasses build their layers in `configure_model` and turn a batch into logits in `forward`.

    Args:
        optimizer: Trains the dense layers. The strategy's fused optimizer trains the tables.
        lr_scheduler: Stepped after every batch; the tables' learning rate follows it.
        log_train_loss: Log the batch's mean loss, which is not private. None logs it in runs
            without privacy alone.
        base_rate: Public share of clicks that the last bias begins with. It must not be read off
            the training data. None begins as torch does.
        slice_feature: A categorical feature with few values, each of which gets a bias of its own
            when the model is calibrated. Until then these biases are zero. None has no slices.
    """

    slice_bias: Tensor
    """With a slice_feature: the bias of each of its values, and of bags without exactly one id."""

    def __init__(
        self,
        optimizer: OptimizerCallable = default_optimizer,
        lr_scheduler: LRSchedulerCallable | None = None,
        log_train_loss: bool | None = None,
        base_rate: float | None = None,
        slice_feature: str | None = None,
    ) -> None:
        super().__init__(click_metrics, optimizer, lr_scheduler, log_train_loss)
        if base_rate is not None:
            remedy = "Set a public share of clicks, or leave it out."
            check_number("base_rate", base_rate, above=0, below=1, smallest=1e-9, remedy=remedy)
        if slice_feature is not None:
            check_text("slice_feature", slice_feature, remedy="Name a feature, or leave it out.")
        self.base_rate, self.slice_feature = base_rate, slice_feature
        self.num_calibration_slices = 1
        """Number of parts of the data that a calibration gives biases of their own."""

    @property
    def calibrated_layer(self) -> str:
        """Path of the layer that makes the logit. A calibration puts its slope and bias there."""
        raise NotImplementedError

    @property
    def declared_public(self) -> tuple[str, ...]:
        """What the report lists as taken to be public."""
        if self.base_rate is None:
            return ()
        return (f"The base rate {self.base_rate:g} that the last bias began with.",)

    def _begin_biases(self, num_rows: list[int]) -> None:
        """Have the last bias begin with the log odds of the base rate, and slices with zero."""
        if self.slice_feature is not None:
            rows = dict(zip(feature_names(len(num_rows)), num_rows)).get(self.slice_feature, 0)
            if not 0 < rows <= _MOST_SLICES:
                raise Refused(
                    f"Expected slice_feature to be a feature of at most {_MOST_SLICES:,} rows, "
                    f"found {self.slice_feature!r} with {rows:,}. Name another, or leave it out."
                )
            self.num_calibration_slices = rows + 1
            self.register_buffer("slice_bias", torch.zeros(rows + 1))
        if self.base_rate is not None:
            bias = self.get_submodule(self.calibrated_layer).bias
            assert isinstance(bias, Tensor)
            nn.init.constant_(bias, math.log(self.base_rate) - math.log1p(-self.base_rate))

    def logits_and_labels(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The logit and the label of every example, by which a model is calibrated."""
        return self(batch), batch.labels

    def calibration_slices(self, batch: Batch) -> Tensor:
        """The slice of every example: its id, or the last one if it has none or several."""
        assert self.slice_feature is not None
        bags, others = batch.sparse_features[self.slice_feature], self.num_calibration_slices - 1
        lengths_B, ids_L = bags.lengths().long(), bags.values().long()
        if not len(ids_L):
            return torch.full_like(lengths_B, others)
        first_B = (lengths_B.cumsum(0) - lengths_B).clamp(max=len(ids_L) - 1)
        return torch.where(lengths_B == 1, ids_L[first_B].clamp(0, others), others)

    def apply_slice_biases(self, slope: float, biases: list[float]) -> None:
        """A calibration has found these biases, for logits that it has multiplied by `slope`."""
        self.slice_bias.mul_(slope).add_(self.slice_bias.new_tensor(biases))

    def _with_slice_bias(self, logits_B: Tensor, batch: Batch) -> Tensor:
        if self.slice_feature is None:
            return logits_B
        return logits_B + self.slice_bias[self.calibration_slices(batch)]

    @override
    def example_losses(self, batch: Batch) -> Tensor:
        """Cross-entropy of every example's click, (B,)."""
        return F.binary_cross_entropy_with_logits(self(batch), batch.labels, reduction="none")

    @override
    def _measure(self, metrics: MetricCollection, batch: Batch) -> None:
        metrics.update(torch.sigmoid(self(batch)), batch.labels.long())
        self.log_dict(metrics, prog_bar=True, batch_size=len(batch.labels))

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return torch.sigmoid(self(batch))


def feature_names(num_features: int) -> list[str]:
    """The categorical features' names, as the data modules of this package give them.

    >>> feature_names(2)
    ['cat_0', 'cat_1']
    """
    return [f"cat_{i}" for i in range(num_features)]


def check_num_rows(num_rows: list[int]) -> None:
    """Refuse a list without tables, and tables without rows."""
    check_whole_list("num_rows", num_rows, remedy="Give each feature's table a number of rows.")
    if not num_rows:
        raise Refused(
            "Expected num_rows with a table of at least 1 row for each feature, found none. Give "
            "each feature's table a number of rows."
        )


def check_sizes(**sizes: Any) -> None:
    """Refuse sizes of layers that are no whole numbers of at least 1."""
    for name, size in sizes.items():
        check_whole(name, size, most=_MOST_SIZE)


def check_arch(name: str, sizes: Any, least: int = 0) -> None:
    """Refuse what is no list of sizes of layers, or has fewer than `least` of them."""
    check_whole_list(name, sizes, most=_MOST_SIZE, remedy="Give the size of each layer.")
    if not least <= len(sizes) <= _MOST_LAYERS:
        raise Refused(
            f"Expected from {least} to {_MOST_LAYERS:,} sizes of layers in {name}, found "
            f"{len(sizes)}. Give the size of each layer."
        )


def check_counts(batch: Batch, num_counts: int) -> None:
    """Refuse a batch that has other counts than the model was built for."""
    found = batch.dense_features.shape[-1]
    if found != num_counts:
        raise Refused(
            f"Expected num_counts={num_counts} counts of every example, found {found} in the "
            "batch. Set the model's num_counts to what the data has."
        )


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

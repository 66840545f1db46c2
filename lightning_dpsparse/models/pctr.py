"""The pCTR model of the AdaFEST paper (Ghazi et al. 2023, appendix D.1.1).

The width of a table grows with its vocabulary, as in the paper, so that results can be compared.
`click.py` has the loss and the metrics.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from typing_extensions import override

from lightning_dpsparse.checks import check_whole
from lightning_dpsparse.models.click import (
    ClickModule,
    check_arch,
    check_counts,
    check_num_rows,
    default_optimizer,
    feature_names,
    log_counts,
    one_table_per_feature,
)


def embedding_width(num_rows: int) -> int:
    """Width of a table with V rows, int(2 V^0.25), by the rule of the paper.

    >>> embedding_width(1472), embedding_width(3)
    (12, 2)
    """
    return int(2 * num_rows**0.25)


class PCTRModule(ClickModule):
    """Embeddings and log counts, side by side, through four ReLU layers.

    FBGEMM wants table widths in multiples of four. A table is therefore stored a little wider than
    `embedding_width` says, and only that many of its columns are read: the rest get no gradient.

    Args:
        num_rows: Rows of each categorical feature's table.
        hidden: Sizes of the fully connected layers.
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
        hidden: list[int] = [598, 598, 598, 598],  # noqa: B006 (never written to)
        num_counts: int = 13,
        optimizer: OptimizerCallable = default_optimizer,
        lr_scheduler: LRSchedulerCallable | None = None,
        log_train_loss: bool | None = None,
        base_rate: float | None = None,
        slice_feature: str | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler, log_train_loss, base_rate, slice_feature)
        check_num_rows(num_rows)
        check_arch("hidden", hidden)
        check_whole("num_counts", num_counts, 0)
        self.num_rows, self.hidden, self.num_counts = num_rows, hidden, num_counts
        self.widths = [embedding_width(rows) for rows in num_rows]
        self.tables: EmbeddingBagCollection | None = None

    @override
    def configure_model(self) -> None:
        if self.tables is not None:
            return
        stored = [-(-width // 4) * 4 for width in self.widths]
        self.tables = one_table_per_feature(self.num_rows, stored)
        sizes = [sum(self.widths) + self.num_counts, *self.hidden]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.mlp = nn.Sequential(*layers, nn.Linear(sizes[-1], 1))
        self._begin_biases(self.num_rows)

    @property
    @override
    def calibrated_layer(self) -> str:
        return f"mlp.{2 * len(self.hidden)}"

    @override
    def forward(self, batch: Batch) -> Tensor:
        """Logits of a click, (B,)."""
        assert self.tables is not None
        check_counts(batch, self.num_counts)
        embedded = self.tables(batch.sparse_features).to_dict()
        names = feature_names(len(self.num_rows))
        parts = [embedded[name][:, :width] for name, width in zip(names, self.widths)]
        logits: Tensor = self.mlp(torch.cat([*parts, log_counts(batch.dense_features)], dim=1))
        return self._with_slice_bias(logits.squeeze(1), batch)

"""The ID-based dual encoder of the EANA paper (Ning et al. 2022, section 4.1.2).

One tower encodes what a user watched before, the other has a vector for every item; the next item
is the one whose vector fits best. `next_item.py` has the training loss and the search over all
items.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from typing_extensions import override

from lightning_dpsparse.models.base import default_optimizer
from lightning_dpsparse.models.click import check_arch
from lightning_dpsparse.models.next_item import NextItemModule, check_features, labels
from lightning_dpsparse.refused import Refused

# B examples, K negatives of an example, C = 1 + K candidates (its label first), D width


class TwoTowerModule(NextItemModule):
    """Predicts the next item from a bag of earlier ones.

    One tower averages the context's rows and sends them through dense layers; the other is a row of
    its own for every item. A batch has the features `context` (any number of ids) and `label` (one
    id), in that order. Training tells a label from negatives that the module draws for each
    example. Evaluation ranks all items.

    Guarantees: an example's loss depends on this example and on public draws alone.

    Args:
        num_items: Number of items, which is the number of rows of either table.
        embedding_dim: Width of both tables.
        context_layers: Sizes of the dense layers above the context's rows, with ReLU between; the
            last must be `embedding_dim`. An empty list leaves them out.
        num_negatives: Number of items that the label of an example is told from in training.
        negatives: How these are drawn: "uniform", or by one public weight for every item in a file,
            .npy or .npz (there under the name "item").
        temperature: Scores are divided by this.
        normalize: Score by the angle between the towers' outputs: both are scaled to length one.
        optimizer: Trains the dense layers.
        lr_scheduler: Stepped after every batch; the tables' learning rate follows it.
        log_train_loss: Log the batch's mean loss, which is not private. None logs it in runs
            without privacy alone.
    """

    def __init__(
        self,
        num_items: int,
        embedding_dim: int = 128,
        context_layers: list[int] = [128],  # noqa: B006 (never written to)
        num_negatives: int = 64,
        negatives: str = "uniform",
        temperature: float = 1.0,
        normalize: bool = False,
        optimizer: OptimizerCallable = default_optimizer,
        lr_scheduler: LRSchedulerCallable | None = None,
        log_train_loss: bool | None = None,
    ) -> None:
        check_arch("context_layers", context_layers)
        if context_layers and context_layers[-1] != embedding_dim:
            raise Refused(
                f"Expected context_layers to end in embedding_dim={embedding_dim}, found "
                f"{context_layers}: contexts and items must be of one width. Change the last size."
            )
        super().__init__(
            num_items=num_items,
            embedding_dim=embedding_dim,
            num_negatives=num_negatives,
            negatives=negatives,
            temperature=temperature,
            normalize=normalize,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            log_train_loss=log_train_loss,
        )
        self.context_layers = context_layers
        self.tables: EmbeddingBagCollection | None = None

    @override
    def configure_model(self) -> None:
        if self.tables is not None:
            return
        settings = self._table_settings()
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name="context",
                    feature_names=["context"],
                    pooling=PoolingType.MEAN,
                    **settings,
                ),
                EmbeddingBagConfig(
                    name="item",
                    feature_names=["label", *self._negative_names],
                    pooling=PoolingType.SUM,
                    **settings,
                ),
            ]
        )
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise([self.embedding_dim, *self.context_layers]):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.mlp = nn.Sequential(*layers[:-1])  # the last layer stays linear

    @property
    def _negative_names(self) -> list[str]:
        return [f"negative_{i}" for i in range(self.num_negatives)]

    @override
    def forward(self, batch: Batch, negatives_BK: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Contexts (B, D) and candidates: the label and, if given, the negatives (B, C, D)."""
        assert self.tables is not None
        features = self._with_negatives(batch.sparse_features, negatives_BK)
        embedded = self.tables(features).to_dict()
        names = ["label"] if negatives_BK is None else ["label", *self._negative_names]
        context_BD = self.mlp(embedded["context"])
        candidates_BCD = torch.stack([embedded[name] for name in names], dim=1)
        if self.normalize:
            return F.normalize(context_BD, dim=1), F.normalize(candidates_BCD, dim=2)
        return context_BD, candidates_BCD

    def _with_negatives(
        self, features: KeyedJaggedTensor, negatives_BK: Tensor | None
    ) -> KeyedJaggedTensor:
        """Context, label, and a bag for every negative: of one item, or empty."""
        check_features(features)
        values, size = features.values(), features.stride()
        if negatives_BK is not None:
            values = torch.cat([values, negatives_BK.t().flatten()])
        lengths = features.lengths().new_full(
            (self.num_negatives * size,), 0 if negatives_BK is None else 1
        )
        return KeyedJaggedTensor(
            keys=["context", "label", *self._negative_names],
            values=values,
            lengths=torch.cat([features.lengths(), lengths]),
            stride=size,
        )

    @override
    def sampled_losses(self, batch: Batch, negatives_BK: Tensor) -> Tensor:
        """Softmax cross-entropy of every label against its own negatives, (B,)."""
        context_BD, candidates_BCD = self(batch, negatives_BK)
        score_BC = torch.einsum("bd,bcd->bc", context_BD, candidates_BCD)
        return self._sampled_softmax(score_BC[:, 0], score_BC[:, 1:], labels(batch), negatives_BK)

    @override
    def _queries_and_labels(self, batch: Batch) -> tuple[Tensor, Tensor]:
        context_BD, candidates_BCD = self(batch)
        return context_BD, candidates_BCD[:, 0]

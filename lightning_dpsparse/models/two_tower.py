"""The ID-based dual encoder of the EANA paper (Ning et al. 2022, section 4.1.2)."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from numpy.typing import NDArray
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from typing_extensions import override

from lightning_dpsparse.models.base import RecommenderModule, default_optimizer
from lightning_dpsparse.models.retrieval import CUTOFFS, retrieval_metrics
from lightning_dpsparse.sharded.items import ItemTable

# B examples, K negatives of an example, C = 1 + K candidates (its label first), R items, D width


class TwoTowerModule(RecommenderModule):
    """Predicts the next item from a bag of earlier ones.

    One tower averages the context's rows and sends them through dense layers; the other is a row of
    its own for every item. A batch has the features `context` (any number of ids) and `label` (one
    id), in that order. Training tells a label from negatives that the module draws, for each
    example its own; evaluation ranks all items.

    Guarantees: an example's loss depends on this example and on public draws alone.

    Args:
        num_items: Items there are: rows of either table.
        embedding_dim: Width of both tables.
        context_layers: Sizes of the dense layers above the context's rows, with ReLU between; the
            last must be `embedding_dim`. An empty list leaves them out.
        num_negatives: Items that an example's label is told from in training.
        negatives: How these are drawn: "uniform", or by one public weight for every item in a file,
            .npy or .npz (there under the name "item").
        temperature: Scores are divided by this.
        normalize: Score by the angle between the towers' outputs: both are scaled to length one.
        optimizer: Trains the dense layers.
        lr_scheduler: Stepped after every batch; the tables' learning rate follows it.
    """

    log_q_R: Tensor | None
    cumulative_R: Tensor | None

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
    ) -> None:
        if num_items < 2 or num_negatives < 1 or temperature <= 0:
            raise ValueError(
                "Expected num_items of at least 2, num_negatives of at least 1 and a positive "
                f"temperature, found {num_items}, {num_negatives} and {temperature}."
            )
        if context_layers and context_layers[-1] != embedding_dim:
            raise ValueError(
                f"Expected context_layers to end in embedding_dim={embedding_dim}, found "
                f"{context_layers}: contexts and items must be of one width."
            )
        answer_size = min(max(CUTOFFS), num_items)
        super().__init__(
            partial(retrieval_metrics, answer_size=answer_size), optimizer, lr_scheduler
        )
        self._answer_size = answer_size
        self.num_items, self.embedding_dim = num_items, embedding_dim
        self.context_layers, self.num_negatives = context_layers, num_negatives
        self.temperature, self.normalize = temperature, normalize
        weight_R = _public_weights(negatives, num_items)
        log_q_R = cumulative_R = None
        if weight_R is not None:
            log_q_R = (weight_R / weight_R.sum()).log().float()
            cumulative_R = weight_R.cumsum(0)
            cumulative_R /= cumulative_R[-1].clone()  # to one exactly, above every draw
        self.register_buffer("log_q_R", log_q_R, persistent=False)
        self.register_buffer("cumulative_R", cumulative_R, persistent=False)
        self._generator: torch.Generator | None = None
        self.tables: EmbeddingBagCollection | None = None

    @override
    def configure_model(self) -> None:
        if self.tables is not None:
            return
        bound = self.embedding_dim**-0.5
        initial = partial(nn.init.uniform_, a=-bound, b=bound)
        size = {"num_embeddings": self.num_items, "embedding_dim": self.embedding_dim}
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name="context",
                    feature_names=["context"],
                    pooling=PoolingType.MEAN,
                    init_fn=initial,
                    **size,
                ),
                EmbeddingBagConfig(
                    name="item",
                    feature_names=["label", *self._negative_names],
                    pooling=PoolingType.SUM,
                    init_fn=initial,
                    **size,
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
        if features.keys() != ["context", "label"]:
            raise ValueError(
                f"Expected the features ['context', 'label'], found {features.keys()}. Give the "
                "batch these two, in this order."
            )
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

    # ---- training -------------------------------------------------------------------------------

    def draw_negatives(self, batch: Batch) -> Tensor:
        """Items (B, K), independent of the batch's contents and of each other."""
        device, size = batch.sparse_features.device(), batch.sparse_features.stride()
        if self._generator is None:  # ranks that share a seed draw different items
            seed = (torch.initial_seed() + self.global_rank) % (1 << 63)
            self._generator = torch.Generator(device).manual_seed(seed)
        shape, random = (size, self.num_negatives), self._generator
        if self.cumulative_R is None:
            return torch.randint(self.num_items, shape, generator=random, device=device)
        draws_BK = torch.rand(shape, generator=random, device=device, dtype=torch.float64)
        return torch.searchsorted(self.cumulative_R, draws_BK, right=True)

    def sampled_losses(self, batch: Batch, negatives_BK: Tensor) -> Tensor:
        """Softmax cross-entropy of every label against its own negatives, (B,).

        -log softmax(s - log q)_label over the label and those negatives that are not the label,
        where s are scores and q is how likely an item is to be drawn.

        Reference: Jean et al. 2015, sampled softmax (arXiv:1412.2007).
        """
        context_BD, candidates_BCD = self(batch, negatives_BK)
        label_B = _labels(batch)
        logits_BC = torch.einsum("bd,bcd->bc", context_BD, candidates_BCD) / self.temperature
        items_BC = torch.cat([label_B[:, None], negatives_BK], dim=1)
        if self.log_q_R is not None:
            logits_BC = logits_BC - self.log_q_R[items_BC]
        is_label_BC = items_BC == label_B[:, None]
        is_label_BC[:, 0] = False
        logits_BC = logits_BC.masked_fill(is_label_BC, -torch.inf)
        return logits_BC.logsumexp(1) - logits_BC[:, 0]

    @override
    def _training_losses(self, batch: Batch) -> Tensor:
        return self.sampled_losses(batch, self.draw_negatives(batch))

    @override
    def on_train_start(self) -> None:
        self._tell_epoch()  # resumed in the middle of an epoch, Lightning does not start it again

    @override
    def on_train_epoch_start(self) -> None:
        self._tell_epoch()

    def _tell_epoch(self) -> None:
        """Data modules that draw their examples anew in every epoch want to know it."""
        data: Any = getattr(self.trainer, "datamodule", None)
        if hasattr(data, "set_epoch"):
            data.set_epoch(self.current_epoch)

    # ---- evaluation: all ranks together ---------------------------------------------------------

    @property
    def items(self) -> ItemTable:
        """All items, to be searched."""
        return ItemTable(self, "item", normalize=self.normalize)

    @override
    @torch.no_grad()
    def example_losses(self, batch: Batch) -> Tensor:
        """-log softmax of every label's score over all items, (B,), without gradients."""
        context_BD, candidates_BCD = self(batch)
        _labels(batch)
        logit_B = (context_BD * candidates_BCD[:, 0]).sum(1) / self.temperature
        return self.items.log_sum_exp(context_BD, 1 / self.temperature) - logit_B

    @override
    def _measure(self, metrics: MetricCollection, batch: Batch) -> None:
        best_BK = self._best_items(batch)
        label_B = _labels(batch)
        metrics.update(best_BK, label_B)
        for name, metric in metrics.items(keep_base=False, copy_state=False):
            self.log(name, metric, prog_bar=name.endswith("_recall@10"), batch_size=label_B.numel())

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The 20 best items for every context, best first."""
        return self._best_items(batch)

    def _best_items(self, batch: Batch) -> Tensor:
        context_BD, _ = self(batch)
        return self.items.top_k(context_BD, self._answer_size)[1]


def _labels(batch: Batch) -> Tensor:
    """The label of every example, (B,)."""
    labels = batch.sparse_features["label"]
    if not bool((labels.lengths() == 1).all()):
        raise ValueError(
            "Expected one label for every example, found an example with none or with several. "
            "Make an example of every label."
        )
    ids_B: Tensor = labels.values()
    return ids_B


def _public_weights(negatives: str, num_items: int) -> Tensor | None:
    """How likely each item is to be drawn, (R,) in float64 and to scale; None if all are alike."""
    if negatives == "uniform":
        return None
    if negatives == "in_batch":
        raise ValueError(
            "Expected negatives that are drawn for each example by itself, found 'in_batch': they "
            "couple the examples of a batch, so that one person's gradient depends on other "
            "people's labels, and clipping bounds nobody's influence. Use 'uniform', or a file of "
            "public weights."
        )
    path = Path(negatives)
    if path.suffix not in (".npy", ".npz") or not path.is_file():
        raise ValueError(
            "Expected negatives to be 'uniform', or an existing .npy or .npz file with one public "
            f"weight for every item, found {negatives!r}."
        )
    weight_R = _read(path)
    if weight_R.shape != (num_items,) or not (np.isfinite(weight_R) & (weight_R > 0)).all():
        raise ValueError(
            f"Expected {num_items:,} positive weights in {negatives!r} (in an .npz file under the "
            f"name 'item'), found shape {weight_R.shape}, or weights that are not positive. Add "
            "one to counts: an item that is never drawn as a negative cannot be corrected for."
        )
    return torch.from_numpy(weight_R.astype(np.float64))


def _read(path: Path) -> NDArray[Any]:
    if path.suffix == ".npy":
        array: NDArray[Any] = np.load(path)
        return array
    with np.load(path) as arrays:
        return arrays["item"] if "item" in arrays else np.zeros(0)

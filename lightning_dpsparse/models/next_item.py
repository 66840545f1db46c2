"""What models of the next item share: negatives for each example, and a search over all items.

Training tells the item that comes next from a few others (negatives). Taking them from the other
examples of the batch is common and cheap, but couples the examples: the gradient of one person
would depend on the items of others, and clipping would bound nobody's influence. Here each example
has its own negatives, drawn from a public distribution. Evaluation ranks all items, across ranks
(`sharded/items.py`). See `two_tower.py` and `sasrec.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from numpy.typing import NDArray
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from typing_extensions import override

from lightning_dpsparse.checks import check_flag, check_number, check_path, check_whole, shown
from lightning_dpsparse.files import has_numbers, is_readable_file, read_npy, read_npz
from lightning_dpsparse.models.base import RecommenderModule
from lightning_dpsparse.models.retrieval import CUTOFFS, retrieval_metrics
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.items import ItemTable

# B examples, K negatives of an example, R items, D width

_MOST_NEGATIVES, _MOST_WIDTH = 100_000, 1_000_000


class NextItemModule(RecommenderModule):
    """Predicts an item from earlier ones, by products with the rows of a table named "item".

    A batch has the features `context` (any number of ids) and `label` (one id), in that order.
    Training tells the next item from negatives that the module draws for each example. Evaluation
    ranks all items.

    Guarantees: an example's loss depends on this example and on public draws alone.

    Args:
        num_items: Number of items, which is the number of rows of a table.
        embedding_dim: Width of the tables.
        num_negatives: Number of items that are drawn for each example in training.
        negatives: How these are drawn: "uniform", or by one public weight for every item in a file,
            .npy or .npz (there under the name "item").
        temperature: Scores are divided by this.
        normalize: Score by the angle: predictions and items are scaled to length one.
        optimizer: Trains the dense layers.
        lr_scheduler: Stepped after every batch; the tables' learning rate follows it.
        log_train_loss: Log the batch's mean loss, which is not private. None logs it in runs
            without privacy alone.
    """

    log_q_R: Tensor | None
    cumulative_R: Tensor | None

    def __init__(
        self,
        num_items: int,
        embedding_dim: int,
        num_negatives: int,
        negatives: str,
        temperature: float,
        normalize: bool,
        optimizer: OptimizerCallable,
        lr_scheduler: LRSchedulerCallable | None,
        log_train_loss: bool | None = None,
    ) -> None:
        expected = "num_items of at least 2, num_negatives of at least 1 and a positive temperature"
        check_whole("num_items", num_items, 2, expected=expected)
        check_whole("num_negatives", num_negatives, most=_MOST_NEGATIVES, expected=expected)
        check_number("temperature", temperature, above=0, expected=expected)
        check_whole("embedding_dim", embedding_dim, most=_MOST_WIDTH)
        check_flag("normalize", normalize)
        check_path("negatives", negatives, remedy="'uniform' draws all items alike.")
        answer_size = min(max(CUTOFFS), num_items)
        super().__init__(
            partial(retrieval_metrics, answer_size=answer_size),
            optimizer,
            lr_scheduler,
            log_train_loss,
        )
        self._answer_size = answer_size
        self.num_items, self.embedding_dim = num_items, embedding_dim
        self.num_negatives = num_negatives
        self.temperature, self.normalize = temperature, normalize
        weight_R = _public_weights(negatives, num_items)
        log_q_R = cumulative_R = None
        if weight_R is not None:
            log_q_R = (weight_R / weight_R.sum()).log().float()
            cumulative_R = weight_R.cumsum(0)
            cumulative_R /= cumulative_R[-1].clone()  # the last is exactly 1, above every draw
        self.register_buffer("log_q_R", log_q_R, persistent=False)
        self.register_buffer("cumulative_R", cumulative_R, persistent=False)
        self._generator: torch.Generator | None = None

    @abstractmethod
    def _queries_and_labels(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The vectors that items are scored with, and the rows of the labels, (B, D) each."""

    @abstractmethod
    def sampled_losses(self, batch: Batch, negatives_BK: Tensor) -> Tensor:
        """The losses that training minimises, given the negatives of each example, (B,)."""

    def _table_settings(self) -> dict[str, Any]:
        """Settings of a table with a row for every item."""
        bound = self.embedding_dim**-0.5
        return {
            "num_embeddings": self.num_items,
            "embedding_dim": self.embedding_dim,
            "init_fn": partial(nn.init.uniform_, a=-bound, b=bound),
        }

    # ---- training -------------------------------------------------------------------------------

    def draw_negatives(self, batch: Batch) -> Tensor:
        """Items (B, K), independent of the batch's contents and of each other."""
        device, size = batch.sparse_features.device(), batch.sparse_features.stride()
        if self._generator is None:  # ranks share a seed, but must draw different items
            seed = (torch.initial_seed() + self.global_rank) % (1 << 63)
            self._generator = torch.Generator(device).manual_seed(seed)
        shape, random = (size, self.num_negatives), self._generator
        if self.cumulative_R is None:
            return torch.randint(self.num_items, shape, generator=random, device=device)
        draws_BK = torch.rand(shape, generator=random, device=device, dtype=torch.float64)
        return torch.searchsorted(self.cumulative_R, draws_BK, right=True)

    def _sampled_softmax(
        self, score: Tensor, score_K: Tensor, target: Tensor, negative_K: Tensor
    ) -> Tensor:
        """Cross-entropy of targets, of any shape, against K negatives each.

        -log softmax(s / temperature - log q)_target over the target and those negatives that are
        not the target, where s are scores and q is how likely an item is to be drawn.

        Reference: Jean et al. 2015, sampled softmax (arXiv:1412.2007).
        """
        logit, logit_K = score / self.temperature, score_K / self.temperature
        if self.log_q_R is not None:
            logit, logit_K = logit - self.log_q_R[target], logit_K - self.log_q_R[negative_K]
        logit_K = logit_K.masked_fill(negative_K == target[..., None], -torch.inf)
        return torch.cat([logit[..., None], logit_K], dim=-1).logsumexp(-1) - logit

    @override
    def _training_losses(self, batch: Batch) -> Tensor:
        return self.sampled_losses(batch, self.draw_negatives(batch))

    @override
    def on_train_start(self) -> None:
        self._tell_epoch()  # Lightning calls no epoch start when it resumes within an epoch

    @override
    def on_train_epoch_start(self) -> None:
        self._tell_epoch()

    def _tell_epoch(self) -> None:
        """Tell the epoch to data modules that draw their examples anew in every epoch."""
        data: Any = getattr(self.trainer, "datamodule", None)
        if hasattr(data, "set_epoch"):
            data.set_epoch(self.current_epoch)

    # ---- evaluation: all ranks together ---------------------------------------------------------

    @property
    def items(self) -> ItemTable:
        """The table of all items, for searches."""
        return ItemTable(self, "item", normalize=self.normalize)

    @override
    @torch.no_grad()
    def example_losses(self, batch: Batch) -> Tensor:
        """-log softmax of every label's score over all items, (B,), without gradients."""
        query_BD, row_BD = self._queries_and_labels(batch)
        labels(batch)
        logit_B = (query_BD * row_BD).sum(1) / self.temperature
        return self.items.log_sum_exp(query_BD, 1 / self.temperature) - logit_B

    @override
    def _measure(self, metrics: MetricCollection, batch: Batch) -> None:
        best_BK = self._best_items(batch)
        label_B = labels(batch)
        metrics.update(best_BK, label_B)
        for name, metric in metrics.items(keep_base=False, copy_state=False):
            self.log(name, metric, prog_bar=name.endswith("_recall@10"), batch_size=label_B.numel())

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The 20 best items for every context, best first."""
        return self._best_items(batch)

    def _best_items(self, batch: Batch) -> Tensor:
        query_BD, _ = self._queries_and_labels(batch)
        return self.items.top_k(query_BD, self._answer_size)[1]


def check_features(features: KeyedJaggedTensor) -> None:
    """Refuse batches with other features than `context` and `label`."""
    if features.keys() != ["context", "label"]:
        raise Refused(
            f"Expected the features ['context', 'label'], found {features.keys()}. Give the "
            "batch these two, in this order."
        )


def labels(batch: Batch) -> Tensor:
    """The label of every example, (B,)."""
    found = batch.sparse_features["label"]
    if not bool((found.lengths() == 1).all()):
        raise Refused(
            "Expected one label for every example, found an example with none or with several. "
            "Make an example of every label."
        )
    ids_B: Tensor = found.values()
    return ids_B


def _public_weights(negatives: str, num_items: int) -> Tensor | None:
    """Weight with which each item is drawn, (R,) in float64; None if all are equally likely."""
    if negatives == "uniform":
        return None
    if negatives == "in_batch":
        raise Refused(
            "Expected negatives that are drawn for each example by itself, found 'in_batch': they "
            "couple the examples of a batch, so that one person's gradient depends on other "
            "people's labels, and clipping bounds nobody's influence. Use 'uniform', or a file of "
            "public weights."
        )
    path = Path(negatives)
    if path.suffix not in (".npy", ".npz") or not is_readable_file(path):
        raise Refused(
            "Expected negatives to be 'uniform', or an existing .npy or .npz file with one public "
            f"weight for every item, found {shown(negatives)}. Use 'uniform', or write the file."
        )
    weight_R = _read_weights(path)
    # A share that is rounded to zero would have no logarithm.
    is_good = weight_R.shape == (num_items,) and has_numbers(weight_R) and (weight_R > 0).all()
    with np.errstate(over="ignore"):
        if not is_good or not (weight_R / weight_R.sum(dtype=np.float64) > 0).all():
            raise Refused(
                f"Expected {num_items:,} positive weights in {negatives!r} (in an .npz file under "
                f"the name 'item'), found {weight_R.dtype} of shape {weight_R.shape}, or weights "
                "that are not positive. Add one to counts: an item that is never drawn as a "
                "negative cannot be corrected for."
            )
    return torch.from_numpy(weight_R.astype(np.float64))


def _read_weights(path: Path) -> NDArray[Any]:
    if path.suffix == ".npy":
        return read_npy(path, "public weights")
    return read_npz(path, ["item"], "public weights").get("item", np.zeros(0))

"""SASRec: self-attentive sequential recommendation (Kang and McAuley 2018, arXiv:1808.09781).

The next item depends on the order of the last ones. Every position of a sequence predicts the item
after it by causal self-attention (`attention.py`), so one example trains as many predictions as it
has positions. One table holds the items. `next_item.py` has the loss and the search over all items.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from typing_extensions import override

from lightning_dpsparse.checks import check_number, check_whole
from lightning_dpsparse.models.attention import Block
from lightning_dpsparse.models.base import default_optimizer
from lightning_dpsparse.models.next_item import NextItemModule, check_features, labels
from lightning_dpsparse.refused import Refused

# B examples, T positions, K negatives of an example, D width, L ids of all contexts

_MOST_LENGTH, _MOST_BLOCKS = 100_000, 1_000


class Positions(NamedTuple):
    """What every position of every example predicts, and what it should predict.

    Sequences begin at position 0. Positions beyond the end of a sequence do not count.
    """

    output_BTD: Tensor
    row_BTD: Tensor
    """The row of the item that comes next, in the table."""
    item_BT: Tensor
    """The item that comes next."""
    is_last_BT: Tensor
    """Whether the item that comes next is the label."""
    is_real_BT: Tensor
    """Whether the position is in the sequence. An empty sequence has one position too."""
    negative_BKD: Tensor | None
    """The rows of the negatives of each example; None outside of training."""


class SASRecModule(NextItemModule):
    """Predicts the next item from the order of earlier ones, by causal self-attention.

    One table has a row for every item. The items of the sequence, those that come next and the
    negatives are all read from it. A batch has the features `context` (ids in order of time, any
    number of them) and `label` (the id that comes next), in that order. In training every position
    tells the item that comes next from negatives that the module draws for each example. Evaluation
    ranks all items for the last position.

    It differs from the paper in the loss, a softmax over an example's negatives instead of a binary
    one; in scaling scores, if asked to; and in counting positions from a sequence's beginning.

    Guarantees: an example's loss depends on this example and on public draws alone, with and
    without dropout.

    Args:
        num_items: Number of items, which is the number of rows of the table.
        embedding_dim: Width of the table and of all layers.
        max_length: The largest number of ids of a context that are read. Its latest ids are read.
        num_blocks: Blocks of attention and feed-forward layers, one above the other.
        num_heads: Heads of attention, which divide `embedding_dim`.
        dropout: How likely a number is to be left out in training.
        num_negatives: Number of items that the next items of an example are told from in training.
        negatives: How these are drawn: "uniform", or by one public weight for every item in a file,
            .npy or .npz (there under the name "item").
        temperature: Scores are divided by this.
        normalize: Score by the angle between output and item: both are scaled to length one.
        optimizer: Trains the dense layers.
        lr_scheduler: Stepped after every batch; the table's learning rate follows it.
        log_train_loss: Log the batch's mean loss, which is not private. None logs it in runs
            without privacy alone.
    """

    def __init__(
        self,
        num_items: int,
        embedding_dim: int = 64,
        max_length: int = 20,
        num_blocks: int = 2,
        num_heads: int = 1,
        dropout: float = 0.0,
        num_negatives: int = 64,
        negatives: str = "uniform",
        temperature: float = 1.0,
        normalize: bool = False,
        optimizer: OptimizerCallable = default_optimizer,
        lr_scheduler: LRSchedulerCallable | None = None,
        log_train_loss: bool | None = None,
    ) -> None:
        check_whole("max_length", max_length, most=_MOST_LENGTH)
        check_whole("num_blocks", num_blocks, 0, _MOST_BLOCKS)
        check_number("dropout", dropout, least=0, below=1, remedy="The default is 0.")
        check_whole("num_heads", num_heads)
        check_whole("embedding_dim", embedding_dim)
        if embedding_dim % num_heads:
            raise Refused(
                f"Expected num_heads that divide embedding_dim={embedding_dim}, found {num_heads}. "
                "Change one of them."
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
        self.max_length, self.num_blocks = max_length, num_blocks
        self.num_heads, self.dropout = num_heads, dropout
        self.tables: EmbeddingCollection | None = None

    @override
    def configure_model(self) -> None:
        if self.tables is not None:
            return
        features = ["context", "label", "negatives"]
        table = EmbeddingConfig(name="item", feature_names=features, **self._table_settings())
        self.tables = EmbeddingCollection(tables=[table])
        width = self.embedding_dim
        self.positions = nn.Embedding(self.max_length, width)
        nn.init.uniform_(self.positions.weight, -(width**-0.5), width**-0.5)  # as long as a row
        self.input_dropout = nn.Dropout(self.dropout)
        self.blocks = nn.Sequential(
            *(Block(width, self.num_heads, self.dropout) for _ in range(self.num_blocks))
        )
        self.norm = nn.LayerNorm(width)

    @override
    def forward(self, batch: Batch, negatives_BK: Tensor | None = None) -> Positions:
        assert self.tables is not None
        check_features(batch.sparse_features)
        context = self._latest(batch.sparse_features["context"])
        label_B = labels(batch)
        embedded = self.tables(_features(context, label_B, negatives_BK))
        rows = {name: embedded[name].values() for name in ("context", "label", "negatives")}
        # An empty context has position 0 too, which predicts an item without any history.
        length_B = context.lengths()
        last_B = (length_B - 1).clamp_min(0)
        num_positions = 1 + max(last_B.tolist(), default=0)
        place_BT = torch.arange(num_positions, device=last_B.device).expand(len(last_B), -1)
        is_last_BT = place_BT == last_B[:, None]
        holds_BT = place_BT < length_B[:, None]
        item_BT = _padded(context.values(), holds_BT)
        row_BTD = _padded(rows["context"], holds_BT)
        x_BTD = self.input_dropout(row_BTD + self.positions(place_BT))
        output_BTD = self.norm(self.blocks(x_BTD))
        # What comes next is the row that the next position reads, and the label after the last.
        next_BTD = torch.where(is_last_BT[..., None], rows["label"][:, None], row_BTD.roll(-1, 1))
        negative_BKD = None
        if negatives_BK is not None:
            negative_BKD = rows["negatives"].unflatten(0, negatives_BK.shape)
        if self.normalize:
            output_BTD, next_BTD = F.normalize(output_BTD, dim=2), F.normalize(next_BTD, dim=2)
            negative_BKD = None if negative_BKD is None else F.normalize(negative_BKD, dim=2)
        return Positions(
            output_BTD=output_BTD,
            row_BTD=next_BTD,
            item_BT=torch.where(is_last_BT, label_B[:, None], item_BT.roll(-1, 1)),
            is_last_BT=is_last_BT,
            is_real_BT=place_BT <= last_B[:, None],
            negative_BKD=negative_BKD,
        )

    def _latest(self, context: JaggedTensor) -> JaggedTensor:
        """The last ids of every context. The others are not read, and so get no gradient."""
        end_L = context.offsets()[1:].repeat_interleave(context.lengths())
        from_end_L = end_L - torch.arange(len(end_L), device=end_L.device)
        return JaggedTensor(
            values=context.values()[from_end_L <= self.max_length],
            lengths=context.lengths().clamp_max(self.max_length),
        )

    @override
    def sampled_losses(self, batch: Batch, negatives_BK: Tensor) -> Tensor:
        """Mean over an example's positions of the softmax cross-entropy of what comes next, (B,).

        Each position uses those negatives of its example that do not come next.
        """
        found = self(batch, negatives_BK)
        assert found.negative_BKD is not None
        loss_BT = self._sampled_softmax(
            (found.output_BTD * found.row_BTD).sum(2),
            found.output_BTD @ found.negative_BKD.mT,
            found.item_BT,
            negatives_BK[:, None],
        )
        loss_BT = torch.where(found.is_real_BT, loss_BT, 0.0)
        return loss_BT.sum(1) / found.is_real_BT.sum(1)

    @override
    def _queries_and_labels(self, batch: Batch) -> tuple[Tensor, Tensor]:
        found = self(batch)
        return found.output_BTD[found.is_last_BT], found.row_BTD[found.is_last_BT]


def _features(
    context: JaggedTensor, label_B: Tensor, negatives_BK: Tensor | None
) -> KeyedJaggedTensor:
    """The features that the table is read with: context, label, and the negatives of an example."""
    length_B = context.lengths()
    values, num_negatives = [context.values(), label_B], 0
    if negatives_BK is not None:
        values, num_negatives = [*values, negatives_BK.flatten()], negatives_BK.shape[1]
    one_B = torch.ones_like(length_B)
    return KeyedJaggedTensor(
        keys=["context", "label", "negatives"],
        values=torch.cat(values),
        lengths=torch.cat([length_B, one_B, one_B * num_negatives]),
        stride=len(length_B),
    )


def _padded(value_L: Tensor, holds_BT: Tensor) -> Tensor:
    """Values of all sequences, put to their positions (B, T, ...), with zeros elsewhere."""
    flat = value_L.new_zeros(holds_BT.numel(), *value_L.shape[1:])
    flat = flat.index_copy(0, holds_BT.flatten().nonzero().squeeze(1), value_L)
    return flat.unflatten(0, holds_BT.shape)

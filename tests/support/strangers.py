"""Models as strangers write them: from TorchRec's own parts, and from papers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchrec.datasets.utils import Batch
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.models.experimental.transformerdlrm import DLRM_Transformer
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from tests.support.tiny_model import FEATURES, NUM_COUNTS

# B examples, T positions of a sequence, D width

WIDTH, LENGTH = 8, 4


def bags() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t_{name}", num_embeddings=rows, embedding_dim=WIDTH, feature_names=[name]
            )
            for name, rows in FEATURES.items()
        ]
    )


def sequences() -> EmbeddingCollection:
    return EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name="t_items", num_embeddings=40, embedding_dim=WIDTH, feature_names=["f0"]
            )
        ]
    )


class Stranger(LightningModule):
    """Clicks of a batch, by a model that is built when the trainer asks for it."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.build = build
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.build()

    def forward(self, batch: Batch) -> Tensor:
        logits: Tensor = self.model(batch.dense_features, batch.sparse_features)
        return logits.squeeze(-1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return F.binary_cross_entropy_with_logits(self(batch), batch.labels, reduction="none")

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.02)


class OwnInteraction(nn.Module):
    """A DLRM whose features meet in a product that nobody has a layer for."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = bags()
        self.bottom = nn.Sequential(nn.Linear(NUM_COUNTS, WIDTH), nn.ReLU())
        self.mix = nn.Parameter(torch.randn(5, 5) / 5)
        self.top = nn.Linear(5 * WIDTH, 1)

    def forward(self, counts: Tensor, features: Any) -> Tensor:
        found = self.bags(features).to_dict().values()
        x_BFD = torch.stack([self.bottom(counts), *found], dim=1)
        met_BFD = torch.einsum("bfd,fg,bgd->bfd", x_BFD, self.mix, x_BFD)
        return self.top(met_BFD.flatten(1))


class Sequential(nn.Module):
    """What was read before, in order, and what comes of it."""

    def __init__(self, places: bool) -> None:
        super().__init__()
        self.items = sequences()
        self.places = nn.Embedding(LENGTH, WIDTH) if places else None
        self.out = nn.Linear(WIDTH, 1)

    def read(self, features: Any) -> tuple[Tensor, Tensor]:
        """Rows of a sequence (B, T, D), and how many there are of each (B,)."""
        found = self.items(features)["f0"]
        x_BTD = found.to_padded_dense(LENGTH)
        if self.places is not None:
            x_BTD = x_BTD + self.places(torch.arange(LENGTH, device=x_BTD.device))
        return x_BTD, found.lengths()


class GRU4Rec(Sequential):
    """Hidasi et al. 2016 (arXiv:1511.06939)."""

    def __init__(self) -> None:
        super().__init__(places=False)
        self.gru = nn.GRU(WIDTH, WIDTH, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, counts: Tensor, features: Any) -> Tensor:
        x_BTD, length_B = self.read(features)
        states_BTD, _ = self.gru(x_BTD)
        last_B = (length_B - 1).clamp_min(0)
        return self.out(states_BTD[torch.arange(len(last_B)), last_B])


class Encoded(Sequential):
    """SASRec, and BERT4Rec's class token, by torch's own transformer."""

    def __init__(self) -> None:
        super().__init__(places=True)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.token = nn.Parameter(torch.randn(WIDTH))

    def forward(self, counts: Tensor, features: Any) -> Tensor:
        x_BTD, length_B = self.read(features)
        x_BTD = torch.cat([self.token.expand(len(x_BTD), 1, WIDTH), x_BTD], dim=1)
        is_padding = torch.arange(LENGTH, device=length_B.device) >= length_B[:, None]
        mask = F.pad(is_padding, (1, 0), value=False)
        return self.out(self.encoder(x_BTD, src_key_padding_mask=mask)[:, 0])


class DIN(Sequential):
    """Attention by a small network (Zhou et al. 2018, arXiv:1706.06978), with a learned slope."""

    def __init__(self) -> None:
        super().__init__(places=False)
        self.score = nn.Sequential(nn.Linear(4 * WIDTH, 8), nn.PReLU(), nn.Linear(8, 1))
        self.target = bags()

    def forward(self, counts: Tensor, features: Any) -> Tensor:
        x_BTD, length_B = self.read(features)
        target_BTD = self.target(features)["f1"][:, None].expand_as(x_BTD)
        pairs = torch.cat([x_BTD, target_BTD, x_BTD - target_BTD, x_BTD * target_BTD], dim=2)
        is_there = torch.arange(LENGTH, device=length_B.device) < length_B[:, None]
        weight_BT = self.score(pairs).squeeze(2) * is_there
        return self.out((weight_BT[:, :, None] * x_BTD).sum(1))


class MMoE(nn.Module):
    """Gates over experts (Ma et al. 2018), two tasks weighted by what is learned of their noise.

    The second task counts for clicked examples only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bags = bags()
        width = 4 * WIDTH
        self.experts = nn.Parameter(torch.randn(3, width, 6) / width**0.5)
        self.gates = nn.ModuleList(nn.Linear(width, 3, bias=False) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(6, 1) for _ in range(2))
        self.log_variances = nn.Parameter(torch.zeros(2))

    def forward(self, counts: Tensor, features: Any) -> Tensor:
        x_BD = self.bags(features).values()
        expert_BKD = torch.einsum("bd,kde->bke", x_BD, self.experts).relu()
        logits = [
            head(torch.einsum("bk,bke->be", gate(x_BD).softmax(1), expert_BKD))
            for gate, head in zip(self.gates, self.heads)
        ]
        return torch.cat(logits, dim=1)


class Weighted(Stranger):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self.model(batch.dense_features, batch.sparse_features)
        bought = (batch.dense_features[:, 0] > 0.5).float()
        each = F.binary_cross_entropy_with_logits(
            logits, torch.stack([batch.labels, bought], dim=1), reduction="none"
        )
        each = each * torch.stack([torch.ones_like(batch.labels), batch.labels], dim=1)
        s = self.model.log_variances
        return (each * torch.exp(-s) + s).sum(1)


def _dlrm(kind: Callable[..., nn.Module], **settings: Any) -> Callable[[], nn.Module]:
    return lambda: kind(
        embedding_bag_collection=bags(),
        dense_in_features=NUM_COUNTS,
        dense_arch_layer_sizes=[16, WIDTH],
        over_arch_layer_sizes=[8, 1],
        **settings,
    )


class Checkpointed(OwnInteraction):
    """Saves memory by a second pass through its last layers."""

    def forward(self, counts: Tensor, features: Any) -> Tensor:
        found = torch.cat([self.bottom(counts), *self.bags(features).to_dict().values()], dim=1)

        def last(x: Tensor) -> Tensor:
            return self.top(x.relu())

        logits: Tensor = checkpoint(last, found, use_reentrant=False)
        return logits


class OfSome(OwnInteraction):
    """Runs its last layer on some examples only."""

    def forward(self, counts: Tensor, features: Any) -> Tensor:
        found = torch.cat([self.bottom(counts), *self.bags(features).to_dict().values()], dim=1)
        is_some = counts[:, :1] > 0.5
        some = self.top(found[is_some[:, 0]])
        return torch.zeros(len(counts), 1).masked_scatter(is_some, some)


def across_examples() -> nn.Module:
    """TorchRec's transformer DLRM as it is: its encoder takes the batch for the sequence."""
    return _dlrm(DLRM_Transformer, nhead=2, ntransformer_layers=1)()


def over_features() -> nn.Module:
    """The same, told where the examples are."""
    model: Any = across_examples()
    for layer in model.inter_arch.interarch_TE.layers:
        layer.self_attn.batch_first = True
    return model


STRANGERS: dict[str, Callable[[], Stranger]] = {
    "DLRM": lambda: Stranger(_dlrm(DLRM)),
    "DLRM with an interaction of its own": lambda: Stranger(OwnInteraction),
    "DLRM-DCN": lambda: Stranger(_dlrm(DLRM_DCN, dcn_num_layers=2, dcn_low_rank_dim=4)),
    "transformer DLRM": lambda: Stranger(over_features),
    "DeepFM": lambda: Stranger(
        lambda: SimpleDeepFMNN(NUM_COUNTS, bags(), hidden_layer_size=8, deep_fm_dimension=5)
    ),
    "GRU4Rec": lambda: Stranger(GRU4Rec),
    "SASRec by torch's transformer": lambda: Stranger(Encoded),
    "DIN": lambda: Stranger(DIN),
    "MMoE": lambda: Weighted(MMoE),
}

"""The small model in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import PoolingType

from tests.support.tiny_model import (
    SEQUENCE_WIDTH,
    SEQUENCES,
    TABLES,
    Bags,
    Head,
    collate,
    fold,
    head_width,
    paths,
    tables,
)


class Reference(nn.Module):
    """The same model in plain PyTorch: one `nn.EmbeddingBag` per table, and autograd.

    Tables that the start has as sequences are one `nn.Embedding` each.
    """

    def __init__(
        self,
        start: dict[str, Tensor],
        *,
        mean: bool,
        head: Callable[[int], nn.Module] = Head,
    ) -> None:
        super().__init__()
        sequences = tuple(n for n in SEQUENCES if f"ec.embeddings.{n}.weight" in start)
        self.paths = paths(sequences)
        self.bags = nn.ModuleDict(
            {
                config.name: nn.Embedding(config.num_embeddings, SEQUENCE_WIDTH)
                if config.name in sequences
                else nn.EmbeddingBag(
                    config.num_embeddings,
                    config.embedding_dim,
                    mode="mean" if config.pooling is PoolingType.MEAN else "sum",
                )
                for config in tables(mean=mean)
            }
        )
        self.head = head(head_width(sequences))
        with torch.no_grad():
            for name, bag in self.bags.items():
                bag.weight.copy_(start[self.paths[name]])
        self.head.load_state_dict(
            {key.removeprefix("head."): v for key, v in start.items() if key.startswith("head.")}
        )

    def forward(self, batch: Batch) -> Tensor:
        bags = batch.sparse_features.to_dict()
        embedded = {}
        kinds = {name: isinstance(table, nn.Embedding) for name, table in self.bags.items()}
        for name, _, _, features in TABLES:
            for feature in features:
                is_shared = feature == "f0" and kinds["t0"] == kinds["t3"]
                key = f"{feature}@{name}" if is_shared else feature  # TorchRec's own naming
                jagged = bags[feature]
                if kinds[name]:
                    values = self.bags[name](jagged.values())
                    embedded[f"sequence {key}"] = fold(values, jagged.lengths())
                    continue
                weights = jagged.weights_or_none()
                embedded[key] = self.bags[name](
                    jagged.values(),
                    jagged.offsets()[:-1],
                    per_sample_weights=None if weights is None else weights.to(self.dtype()),
                )
        return self.head(embedded, batch.dense_features)

    def dtype(self) -> torch.dtype:
        return self.head.out.weight.dtype

    def weights(self) -> dict[str, Tensor]:
        tables = {self.paths[name]: bag.weight.detach() for name, bag in self.bags.items()}
        return tables | {f"head.{key}": value for key, value in self.head.state_dict().items()}


def first_epoch(size: int, global_batch: int) -> list[Batch]:
    """The batches of all ranks together, as Lightning's sampler shuffles epoch 0."""
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0)).tolist()
    examples = Bags(size)
    return [
        collate([examples[i] for i in order[start : start + global_batch]])
        for start in range(0, size, global_batch)
    ]

"""A small model of two towers, and the same model in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_dpsparse.models import TwoTowerModule
from tests.support.item_windows import ITEMS, NEGATIVES, sgd

WIDTH = 8
TABLE = "tables.embedding_bags.{}.weight"


def two_towers(**settings: Any) -> TwoTowerModule:
    default: dict[str, Any] = {
        "num_items": ITEMS,
        "embedding_dim": WIDTH,
        "context_layers": [6, WIDTH],
        "num_negatives": NEGATIVES,
        "temperature": 0.2,
        "optimizer": sgd,
    }
    return TwoTowerModule(**(default | settings))


class Plain:
    """The same model of one example, in float64: `nn.EmbeddingBag`, `nn.Linear`, a loop."""

    def __init__(self, weights: dict[str, Tensor], *, normalize: bool = False) -> None:
        self.bag = nn.EmbeddingBag(ITEMS, WIDTH, mode="mean").double()
        self.items = nn.Embedding(ITEMS, WIDTH).double()
        self.linear = [nn.Linear(WIDTH, 6).double(), nn.Linear(6, WIDTH).double()]
        self.normalize = normalize
        values = [weights[TABLE.format(name)] for name in ("context", "item")]
        values += [weights[f"mlp.{i}.{kind}"] for i in (0, 2) for kind in ("weight", "bias")]
        with torch.no_grad():
            for parameter, value in zip(self.parameters(), values, strict=True):
                parameter.copy_(value)

    def parameters(self) -> list[Tensor]:
        linear = [tensor for layer in self.linear for tensor in (layer.weight, layer.bias)]
        return [self.bag.weight, self.items.weight, *linear]

    def scores(self, context: list[int], items: list[int], temperature: float = 0.2) -> Tensor:
        pooled = self.bag(torch.tensor(context, dtype=torch.int64), torch.tensor([0]))[0]
        output = self.linear[1](torch.relu(self.linear[0](pooled)))
        rows = self.items(torch.tensor(items))
        if self.normalize:
            output, rows = output / output.norm(), rows / rows.norm(dim=1, keepdim=True)
        return rows @ output / temperature

    def loss(self, example: Any, negatives: list[int], log_q: Tensor | None = None) -> Tensor:
        context, label = example
        items = [label, *(item for item in negatives if item != label)]
        scores = self.scores(context, items)
        if log_q is not None:
            scores = scores - log_q[items]
        return scores.exp().sum().log() - scores[0]

"""A small SASRec, and the same model as loops over positions and heads."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_dpsparse.models import SASRecModule
from tests.support.item_windows import ITEMS, NEGATIVES, sgd

WIDTH, HEADS, TABLE = 8, 2, "tables.embeddings.item.weight"

SETTINGS: dict[str, Any] = {
    "num_items": ITEMS,
    "embedding_dim": WIDTH,
    "max_length": 5,
    "num_blocks": 2,
    "num_heads": HEADS,
    "num_negatives": NEGATIVES,
    "temperature": 0.2,
    "optimizer": sgd,
}


def sasrec(**settings: Any) -> SASRecModule:
    return SASRecModule(**(SETTINGS | settings))


class Plain:
    """The same model of one example, in float64: matrices, and loops over positions and heads."""

    def __init__(self, weights: dict[str, Tensor], *, normalize: bool = False) -> None:
        self.weights = {
            name: value.detach().double().requires_grad_() for name, value in weights.items()
        }
        self.normalize = normalize

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return self.weights[f"{name}.weight"] @ x + self.weights[f"{name}.bias"]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        centred = x - x.mean()
        scaled = centred / (centred.square().mean() + 1e-5).sqrt()
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def _attention(self, name: str, xs: list[Tensor]) -> list[Tensor]:
        q, k, v = (
            [self._linear(f"{name}.{kind}", x).view(HEADS, -1) for x in xs]
            for kind in ("query", "key", "value")
        )
        found = []
        for t in range(len(xs)):
            heads = []
            for h in range(HEADS):
                scores = [q[t][h] @ k[s][h] / math.sqrt(WIDTH / HEADS) for s in range(t + 1)]
                weights = torch.stack(scores).softmax(0)
                heads.append(sum(weights[s] * v[s][h] for s in range(t + 1)))
            found.append(self._linear(f"{name}.output", torch.cat(heads)))
        return found

    def outputs(self, context: list[int], num_blocks: int = 2) -> list[Tensor]:
        """Of every position; of one that reads nothing if there is none."""
        rows = [self.weights[TABLE][item] for item in context] or [0.0]
        xs = [row + self.weights["positions.weight"][t] for t, row in enumerate(rows)]
        for i in range(num_blocks):
            block = f"blocks.{i}"
            read = self._attention(
                f"{block}.attention", [self._norm(f"{block}.attention_norm", x) for x in xs]
            )
            xs = [x + y for x, y in zip(xs, read)]
            for t, x in enumerate(xs):
                normed = self._norm(f"{block}.feed_forward_norm", x)
                hidden = self._linear(f"{block}.feed_forward.0", normed).relu()
                xs[t] = x + self._linear(f"{block}.feed_forward.3", hidden)
        return [self._norm("norm", x) for x in xs]

    def scores(self, output: Tensor, items: list[int]) -> Tensor:
        rows = self.weights[TABLE][items]
        if self.normalize:
            output, rows = output / output.norm(), rows / rows.norm(dim=1, keepdim=True)
        return rows @ output / 0.2

    def loss(self, example: Any, negatives: list[int], log_q: Tensor | None = None) -> Tensor:
        context, label = example
        targets = [*context[1:], label]
        losses = []
        for output, target in zip(self.outputs(context), targets, strict=True):
            items = [target, *(item for item in negatives if item != target)]
            scores = self.scores(output, items)
            if log_q is not None:
                scores = scores - log_q[items]
            losses.append(scores.exp().sum().log() - scores[0])
        return torch.stack(losses).mean()

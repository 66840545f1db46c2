"""Training that is not private: sharded on ranks, and the same steps in plain PyTorch.

Other tests take the optimizers, the placements and the comparison of weights from here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_dpsparse import FusedOptimizer, Placement, TablePlacement
from tests.support.ranks import Ranks
from tests.support.reference import Reference, first_epoch
from tests.support.tiny_model import assemble, run_training

STEPS, BATCH = 4, 8
SGD = FusedOptimizer(kind="sgd", learning_rate=0.3)
ADAGRAD = FusedOptimizer(kind="adagrad", learning_rate=0.3)
ROWWISE = FusedOptimizer(kind="rowwise_adagrad", learning_rate=0.3)

PLACEMENTS = {
    "auto": Placement(),
    "table_wise": Placement(default="table_wise"),
    "row_wise": Placement(default="row_wise"),
    "column_wise": Placement(tables={"t1": "column_wise", "t0": "column_wise"}),
    "mixed": Placement(
        tables={
            "t0": TablePlacement(kind="table_wise", ranks=[1]),
            "t1": "row_wise",
            "t2": TablePlacement(kind="column_wise", ranks=[1, 0]),
            "t3": "table_row_wise",
        }
    ),
    "grid": Placement(tables={"t1": "grid", "t2": "table_column_wise"}),
}


def reference(
    start: dict[str, Tensor], optimizer: FusedOptimizer, *, mean: bool = False, factors: Any = None
) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and summed losses after the same steps in plain PyTorch."""
    model = Reference(start, mean=mean)
    dense = torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)
    state = {name: torch.zeros_like(bag.weight) for name, bag in model.bags.items()}
    losses = []
    for step, batch in enumerate(first_epoch(STEPS * BATCH, BATCH)):
        factor = factors[step] if factors else 1.0
        dense.param_groups[0]["lr"] = 0.1 * factor
        loss = F.binary_cross_entropy_with_logits(model(batch), batch.labels, reduction="none")
        losses.append(float(loss.detach().sum()))
        model.zero_grad()
        loss.mean().backward()
        dense.step()
        with torch.no_grad():
            for name, bag in model.bags.items():
                update(bag.weight, state[name], optimizer, factor)
    return model.weights(), losses


def update(
    weight: Tensor, state: Tensor, optimizer: FusedOptimizer, factor: float, pieces: int = 1
) -> None:
    """A row in `pieces` by columns has a row-wise state for each."""
    gradient, lr = weight.grad, optimizer.learning_rate * factor
    assert gradient is not None
    if optimizer.kind == "sgd":
        weight -= lr * gradient
        return
    squared = gradient**2
    if optimizer.kind == "rowwise_adagrad":
        of_piece = squared.unflatten(1, (pieces, -1))
        squared = of_piece.mean(2, keepdim=True).expand_as(of_piece).flatten(1)
    state += squared
    weight -= lr * gradient / (state.sqrt() + optimizer.eps)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    for key, value in expected.items():
        assert (found[key] - value).abs().max() <= tolerance, key


def train(
    ranks: Ranks, placement: Placement, optimizer: FusedOptimizer, hosts: int = 1, **kwargs: Any
) -> Any:
    results = ranks.run(
        run_training, ranks.world_size, placement, optimizer, STEPS, BATCH, hosts, kwargs
    )
    start = assemble([result["start"] for result in results])
    end = assemble([result["end"] for result in results])
    losses = [sum(step) for step in zip(*(result["losses"] for result in results))]
    return start, end, losses

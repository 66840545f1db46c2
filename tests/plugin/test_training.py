"""Sharded, fused training equals the same model in plain PyTorch, on one rank and on two."""

from __future__ import annotations

from typing import Any

import pytest
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


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD, ROWWISE], ids=lambda o: o.kind)
def test_one_rank_is_plain_pytorch_step_by_step(one_rank: Ranks, optimizer: FusedOptimizer) -> None:
    start, end, losses = train(one_rank, Placement(), optimizer)
    expected, expected_losses = reference(start, optimizer)
    assert_close(end, expected, 1e-6)
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    moved = (
        (end["ebc.embedding_bags.t0.weight"] - start["ebc.embedding_bags.t0.weight"]).abs().max()
    )
    assert moved > 1e-3  # the test would pass on a model that does not learn otherwise


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD], ids=lambda o: o.kind)
def test_two_ranks_are_plain_pytorch_and_one_rank(
    one_rank: Ranks, two_ranks: Ranks, name: str, optimizer: FusedOptimizer
) -> None:
    start, end, losses = train(two_ranks, PLACEMENTS[name], optimizer)
    start_1, end_1, _ = train(one_rank, Placement(), optimizer)
    assert_close(start, start_1, 0.0)  # a table starts the same however it is cut
    assert_close(end, {key: end_1[key] for key in start}, 1e-6)
    expected, expected_losses = reference(start, optimizer)
    assert_close(end, expected, 1e-6)
    assert losses == pytest.approx(expected_losses, abs=1e-5)


@pytest.mark.parametrize("kind", ["grid", "table_row_wise", "row_wise"])
def test_two_hosts_are_plain_pytorch(two_hosts: Ranks, kind: Any) -> None:
    """Grid cuts columns over hosts; table_row_wise keeps a table on one of them."""
    start, end, _ = train(two_hosts, Placement(default=kind), SGD, hosts=2)
    expected, _ = reference(start, SGD)
    assert_close(end, expected, 1e-6)


@pytest.mark.parametrize("name", ["table_wise", "row_wise", "column_wise"])
def test_mean_pooling_on_two_ranks_is_plain_pytorch(two_ranks: Ranks, name: str) -> None:
    start, end, _ = train(two_ranks, PLACEMENTS[name], SGD, mean=True)
    expected, _ = reference(start, SGD, mean=True)
    assert_close(end, expected, 1e-6)


@pytest.mark.parametrize("name", ["table_wise", "row_wise"])
def test_rowwise_adagrad_on_two_ranks_is_plain_pytorch(two_ranks: Ranks, name: str) -> None:
    """Not column-wise: there a row's pieces keep a state each, by design."""
    start, end, _ = train(two_ranks, PLACEMENTS[name], ROWWISE)
    expected, _ = reference(start, ROWWISE)
    assert_close(end, expected, 1e-6)


def test_a_mean_loss_trains_like_one_loss_per_example(two_ranks: Ranks) -> None:
    _, per_example, _ = train(two_ranks, Placement(), SGD)
    _, scalar, _ = train(two_ranks, Placement(), SGD, scalar_loss=True)
    assert_close(scalar, per_example, 1e-6)


def factors_of(schedule: str) -> list[float]:
    """What the scheduler multiplies the peak learning rate by, step by step."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0, momentum=0.9)
    scheduler = (
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        if schedule == "cosine"
        else torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=1.0, total_steps=10, cycle_momentum=False
        )
    )
    factors = []
    for _ in range(STEPS):
        factors.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return factors


@pytest.mark.parametrize("follow", [True, False])
@pytest.mark.parametrize("schedule", ["cosine", "one cycle"])
def test_the_tables_follow_the_learning_rate_schedule(
    one_rank: Ranks, schedule: str, follow: bool
) -> None:
    optimizer = FusedOptimizer(kind="sgd", learning_rate=0.3, follow_schedule=follow)
    start, end, _ = train(one_rank, Placement(), optimizer, schedule=schedule)
    expected, _ = reference(start, SGD, factors=factors_of(schedule))
    tables = {key: value for key, value in expected.items() if "embedding_bags" in key}
    if follow:
        assert_close(end, tables, 1e-6)
    else:
        with pytest.raises(AssertionError):
            assert_close(end, tables, 1e-6)

"""Sharded, fused training equals the same model in plain PyTorch, on one rank and on two."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_dpsparse import FusedOptimizer, Placement
from tests.support.plain_training import (
    ADAGRAD,
    PLACEMENTS,
    ROWWISE,
    SGD,
    STEPS,
    assert_close,
    reference,
    train,
)
from tests.support.ranks import Ranks


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

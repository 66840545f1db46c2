"""An average is that of the weights after every step: validated, saved, and kept in the end."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import Tensor

from lightning_dpsparse import DPSGD, EANA, AdaFEST, FusedOptimizer, Placement
from tests.support.averaging_runs import (
    STEPS,
    VALIDATED,
    after,
    assert_near,
    by_hand,
    train,
    validated,
    whole,
)
from tests.support.lazydp_runs import DECAYING, EAGER, LAZY
from tests.support.plain_training import PLACEMENTS, SGD
from tests.support.ranks import Ranks
from tests.support.tiny_model import SEQUENCES

LAST, FADING = {"fraction": 0.4}, {"half_life": 7.0}
ADAGRAD = FusedOptimizer(kind="adagrad", learning_rate=0.2, eps=1e-3)
ROWWISE = FusedOptimizer(kind="rowwise_adagrad", learning_rate=0.2, eps=1e-3)


def check(results: list[dict[str, Any]], averages: dict[str, float], atol: float = 1e-6) -> None:
    """All that validation saw, and what was left in the end."""
    weights = after(results)
    assert_near(whole(results), by_hand(weights, **averages), atol)
    moved = whole(results)["head.out.weight"] - weights[-1]["head.out.weight"]
    assert moved.abs().max() > 1e-3  # the average is not the weights
    for step in range(VALIDATED, STEPS + 1, VALIDATED):
        expected = by_hand(weights[:step], **averages, planned=STEPS)
        assert_near(validated(results, step), expected, atol)


@pytest.mark.parametrize("averages", [LAST, FADING], ids=["last", "fading"])
@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD, ROWWISE], ids=lambda o: o.kind)
def test_without_a_plan(one_rank: Ranks, optimizer: FusedOptimizer, averages: Any) -> None:
    check(one_rank.run(train, 1, Placement(), optimizer, None, averages), averages)


@pytest.mark.parametrize("sequences", [(), SEQUENCES], ids=["bags", "sequences"])
@pytest.mark.parametrize("name", ["row_wise", "column_wise"])
def test_without_a_plan_on_two_ranks(two_ranks: Ranks, name: str, sequences: Any) -> None:
    found = two_ranks.run(train, 2, PLACEMENTS[name], SGD, None, LAST, sequences=sequences)
    check(found, LAST)


@pytest.mark.parametrize(
    ("mechanism", "optimizer"),
    [
        (EANA(), SGD),
        (EANA(), ROWWISE),
        (AdaFEST(threshold=1.0), SGD),
        (AdaFEST(threshold=1.0), ADAGRAD),
        (DPSGD(chunk_rows=16), ROWWISE),
        (DPSGD(chunk_rows=16), DECAYING),
    ],
    ids=lambda x: type(x).__name__ if not isinstance(x, FusedOptimizer) else x.kind,
)
def test_of_rows_that_rest(one_rank: Ranks, mechanism: Any, optimizer: FusedOptimizer) -> None:
    check(one_rank.run(train, 1, Placement(), optimizer, mechanism, FADING), FADING)
    check(one_rank.run(train, 1, Placement(), optimizer, mechanism, LAST), LAST)


@pytest.mark.parametrize(
    "mechanism", [EANA(), DPSGD(chunk_rows=16)], ids=lambda m: type(m).__name__
)
def test_of_rows_that_rest_on_two_ranks(two_ranks: Ranks, mechanism: Any) -> None:
    check(two_ranks.run(train, 2, PLACEMENTS["mixed"], SGD, mechanism, LAST), LAST)


# ---- rows that owe noise -------------------------------------------------------------------------


@functools.cache
def eager(ranks: Ranks, optimizer: FusedOptimizer) -> list[dict[str, Tensor]]:
    """The weights of DP-SGD after every step, once."""
    return after(ranks.run(train, 1, Placement(), optimizer, EAGER))


@pytest.mark.parametrize("averages", [LAST, FADING], ids=["last", "fading"])
@pytest.mark.parametrize("optimizer", [SGD, DECAYING], ids=["plain", "decaying"])
def test_of_rows_that_owe_noise_is_that_of_eager_dp_sgd(
    one_rank: Ranks, optimizer: FusedOptimizer, averages: Any
) -> None:
    """Draw by draw, with what validation reads in between."""
    weights = eager(one_rank, optimizer)
    lazy = one_rank.run(train, 1, Placement(), optimizer, LAZY, averages, watches=False)
    assert_near(whole(lazy), by_hand(weights, **averages), 1e-6)
    for step in range(VALIDATED, STEPS + 1, VALIDATED):
        expected = by_hand(weights[:step], **averages, planned=STEPS)
        assert_near(validated(lazy, step), expected, 1e-6)


@pytest.mark.parametrize("optimizer", [SGD, DECAYING], ids=["plain", "decaying"])
@pytest.mark.parametrize("name", ["row_wise", "column_wise", "mixed"])
def test_of_rows_that_owe_noise_on_two_ranks(
    one_rank: Ranks, two_ranks: Ranks, optimizer: FusedOptimizer, name: str
) -> None:
    settings = {"watches": False, "validates": False}
    lazy = two_ranks.run(train, 2, PLACEMENTS[name], optimizer, LAZY, LAST, **settings)
    assert_near(whole(lazy), by_hand(eager(one_rank, optimizer), **LAST), 1e-6)

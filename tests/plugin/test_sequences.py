"""Sequences (`EmbeddingCollection`) pass the suite of the bags: steps equal a naive loop."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_dpsparse import Placement, TablePlacement
from tests.plugin.test_training import ROWWISE, SGD, assert_close
from tests.private import ADAGRAD, SIZES, naive, plan, run
from tests.ranks import Ranks
from tests.small import SEQUENCES

PLACEMENTS = {
    "auto": Placement(),
    "table_wise": Placement(default="table_wise"),
    "row_wise": Placement(default="row_wise"),
    "column_wise": Placement(default="column_wise"),
    "mixed": Placement(
        tables={
            "t0": TablePlacement(kind="table_wise", ranks=[1]),
            "t1": "row_wise",
            "t2": TablePlacement(kind="column_wise", ranks=[1, 0]),
            "t3": "column_wise",
        }
    ),
}


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD, ROWWISE], ids=lambda o: o.kind)
@pytest.mark.parametrize("sizes", SIZES)
def test_one_rank_is_the_naive_step(one_rank: Ranks, optimizer: Any, sizes: str) -> None:
    start, end = run(one_rank, SIZES[sizes], Placement(), optimizer, plan(), sequences=SEQUENCES)
    expected = naive(start, SIZES[sizes], optimizer, 0.5)
    assert_close(end, expected, 1e-6 if optimizer is SGD else 1e-5)


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD], ids=lambda o: o.kind)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", PLACEMENTS)
def test_two_ranks_are_the_naive_step(
    two_ranks: Ranks, optimizer: Any, sizes: str, name: str
) -> None:
    start, end = run(
        two_ranks, SIZES[sizes], PLACEMENTS[name], optimizer, plan(), sequences=SEQUENCES
    )
    expected = naive(start, SIZES[sizes], optimizer, 0.5)
    assert_close(end, expected, 1e-6 if optimizer is SGD else 1e-5)

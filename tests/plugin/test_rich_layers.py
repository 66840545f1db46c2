"""Private training of a model with attention, recurrent layers and computed weights."""

from __future__ import annotations

import pytest

from lightning_dpsparse import LazyDP, Placement
from tests.support.naive_step import SIZES, naive, plan, run
from tests.support.plain_training import PLACEMENTS, SGD, assert_close
from tests.support.ranks import Ranks
from tests.support.rich_head import RichHead


@pytest.mark.parametrize("sizes", SIZES)
def test_one_rank_is_the_naive_step(one_rank: Ranks, sizes: str) -> None:
    start, end = run(one_rank, SIZES[sizes], Placement(), SGD, plan(), head=RichHead)
    assert_close(end, naive(start, SIZES[sizes], SGD, 0.5, head=RichHead), 1e-5)


@pytest.mark.parametrize("most", [None, 2])
def test_two_ranks_are_the_naive_step(two_ranks: Ranks, most: int | None) -> None:
    sizes = SIZES["uneven"]
    start, end = run(two_ranks, sizes, PLACEMENTS["mixed"], SGD, plan(), most=most, head=RichHead)
    assert_close(end, naive(start, sizes, SGD, 0.5, head=RichHead), 1e-5)


def test_noise_reaches_every_parameter(one_rank: Ranks) -> None:
    private = plan(noise=3.0, mechanism=LazyDP())
    start, end = run(one_rank, [[0, 0]], Placement(), SGD, private, head=RichHead)
    for name, value in end.items():
        assert (value != start[name]).all(), name

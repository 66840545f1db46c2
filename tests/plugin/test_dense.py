"""Dense mechanisms in training: sharded tables and factors of dense layers, clipped as one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_dpsparse import EANA, RGP, LazyDP, Placement
from tests.support.dense_forms import DENSE, naive_forms
from tests.support.naive_step import SIZES, naive, plan, run
from tests.support.plain_training import PLACEMENTS, SGD, assert_close
from tests.support.ranks import Ranks


@pytest.mark.parametrize("sizes", ["uneven", "empty"])
@pytest.mark.parametrize("name", DENSE)
def test_one_rank_is_the_naive_step(one_rank: Ranks, name: str, sizes: str) -> None:
    private = plan(dense=DENSE[name])
    start, end = run(one_rank, SIZES[sizes], Placement(), SGD, private)
    expected = naive(start, SIZES[sizes], SGD, 0.5, dense_forms=naive_forms(DENSE[name]))
    assert_close(end, expected, 1e-5)


@pytest.mark.parametrize("most", [None, 2])
@pytest.mark.parametrize("name", DENSE)
def test_two_ranks_are_the_naive_step(two_ranks: Ranks, name: str, most: int | None) -> None:
    """Ranks project alike, and so do the parts of a batch."""
    sizes, private = SIZES["uneven"], plan(dense=DENSE[name])
    start, end = run(two_ranks, sizes, PLACEMENTS["mixed"], SGD, private, most=most)
    expected = naive(start, sizes, SGD, 0.5, dense_forms=naive_forms(DENSE[name]))
    assert_close(end, expected, 1e-5)


@pytest.mark.parametrize("mechanism", [EANA(), LazyDP()], ids=lambda m: type(m).__name__)
def test_noise_reaches_the_weights_through_the_factors_alone(
    one_rank: Ranks, mechanism: Any
) -> None:
    """Without examples the hidden layer moves by noise of the form's rank, twice at most."""
    private = plan(noise=3.0, mechanism=mechanism, dense=RGP(2))
    start, end = run(one_rank, [[0, 0]], Placement(), SGD, private)
    moved = (end["head.hidden.weight"] - start["head.hidden.weight"]).double()
    singular = torch.linalg.svdvals(moved)
    assert singular[3] > 1e-3
    assert singular[4] < 1e-6 * singular[0]
    assert (end["head.out.weight"] != start["head.out.weight"]).all()

"""Levers that are tried and not offered do what their papers say."""

from __future__ import annotations

import pytest
import torch

from benchmarks.utility_levers import Momentum, QuantileClipping
from lightning_dpsparse import DPSGD, Placement
from tests.support.naive_step import SIZES, plan, run
from tests.support.plain_training import SGD
from tests.support.ranks import Ranks


def test_the_clip_norm_comes_to_the_quantile() -> None:
    clipping = QuantileClipping(quantile=0.8, start=30.0)
    norms_KB = torch.linspace(0.0, 10.0, 1_001)[None]
    for _ in range(200):
        factors_KB = clipping.factors(norms_KB.square(), 2.0)
    assert clipping.rate * 2.0 == pytest.approx(8.0, rel=0.01)
    # Clipped to C_t = 8 and scaled to C = 2: noise is that of C in every step.
    released_KB = factors_KB * norms_KB
    assert float(released_KB.max()) == pytest.approx(2.0)
    assert float(released_KB[0, 400]) == pytest.approx(1.0, rel=0.01)  # a norm of 4


def test_a_clip_norm_that_keeps_steps_scales_gradients_and_leaves_the_rate() -> None:
    falling, kept = QuantileClipping(start=0.5), QuantileClipping(start=0.5, keeps_steps=True)
    squares_KB = torch.tensor([[0.04, 4.0]])
    torch.testing.assert_close(kept.factors(squares_KB, 2.0), falling.factors(squares_KB, 2.0))
    assert falling.rate == pytest.approx(0.25)
    assert kept.rate == 1.0


def test_momentum_of_zero_is_dp_sgd_and_of_a_half_begins_half_as_far(one_rank: Ranks) -> None:
    sizes = SIZES["even"][:1]
    settings = {"noise": 1.0, "noise_source": "row_keyed"}
    start, plain = run(one_rank, sizes, Placement(), SGD, plan(mechanism=DPSGD(), **settings))
    _, zero = run(one_rank, sizes, Placement(), SGD, plan(mechanism=Momentum(0.0), **settings))
    _, half = run(one_rank, sizes, Placement(), SGD, plan(mechanism=Momentum(0.5), **settings))
    tables = [key for key in start if "embedding_bags" in key]
    assert tables
    for key in tables:
        assert torch.equal(zero[key], plain[key])
        moved = (half[key] - start[key]) * 2.0
        torch.testing.assert_close(moved, plain[key] - start[key], rtol=1e-4, atol=1e-6)

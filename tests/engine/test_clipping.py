"""Factors bound every example, whatever its gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lightning_dpsparse.engine.clipping import AutomaticClipping, FlatClipping, GroupClipping

NORMS = torch.tensor([0.0, 1e-30, 1e-6, 0.5, 1.0, 1.5, 1e6, 1e18, torch.inf, torch.nan])


@pytest.mark.parametrize(
    "clipping", [FlatClipping(), AutomaticClipping()], ids=lambda c: type(c).__name__
)
@pytest.mark.parametrize("clip_norm", [0.1, 1.0, 50.0])
def test_clipped_norms_stay_within_the_bound(clipping: Any, clip_norm: float) -> None:
    factors = clipping.factors(NORMS.square()[None], clip_norm)[0]
    assert factors.isfinite().all()
    assert (factors >= 0).all()
    finite = NORMS.square().isfinite()
    assert ((factors * NORMS)[finite] <= clip_norm * (1 + 1e-6)).all()
    assert (factors[~finite] == 0).all()  # overflow and NaN count nothing


def test_flat_clipping_leaves_small_gradients_alone() -> None:
    factors = FlatClipping().factors(torch.tensor([[0.0, 0.25, 1.0, 4.0]]), 1.0)
    torch.testing.assert_close(factors, torch.tensor([[1.0, 1.0, 1.0, 0.5]]))


def test_an_infinite_bound_clips_nothing() -> None:
    assert FlatClipping().factors(torch.tensor([[0.0, 1e30]]), math.inf).tolist() == [[1.0, 1.0]]


def test_groups_together_stay_within_the_bound() -> None:
    clipping = GroupClipping({"table_*": 3.0, "*": 4.0})
    assert clipping.groups_of(["table_0", "mlp.weight", "table_1"]) == [0, 1, 0]
    squares = torch.rand(2, 1000, generator=torch.Generator().manual_seed(0)) * 9
    factors = clipping.factors(squares, 2.0)
    clipped = factors.square() * squares
    assert (clipped.sum(0) <= 4.0 * (1 + 1e-6)).all()
    # The groups' own bounds are 2 * 3/5 and 2 * 4/5, and both are reached.
    torch.testing.assert_close(clipped.sqrt().amax(1), torch.tensor([1.2, 1.6]))


def test_a_parameter_without_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"none for 'mlp.weight' among \['table_\*'\]"):
        GroupClipping({"table_*": 1.0}).groups_of(["table_0", "mlp.weight"])


@pytest.mark.parametrize("shares", [{}, {"*": 0.0}, {"a": 1.0, "*": -1.0}])
def test_shares_are_positive(shares: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="Expected positive shares"):
        GroupClipping(shares)


def test_stability_is_positive() -> None:
    with pytest.raises(ValueError, match="Expected stability > 0"):
        AutomaticClipping(stability=0.0)

"""Norms and clipped sums of dense layers against autograd, one example at a time, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_dpsparse.engine.ghost import DenseCapture
from lightning_dpsparse.engine.outer_products import Positions, weight_square_norm
from tests.support.dense_cases import CASES, B, autograd, capture_step, clipped_sum, vectors


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch may copy; no matter
@pytest.mark.parametrize("name", CASES)
def test_norms_and_sums_match_autograd(name: str) -> None:
    torch.manual_seed(0)
    build, data = CASES[name]
    model, x = build().double(), data()
    expected = autograd(model, x)
    capture = capture_step(model, x)
    norms: dict[str, Tensor] = {}
    for parameter, squares in capture.square_norms(B):
        norms[parameter] = norms.get(parameter, 0) + squares
    factors = torch.linspace(0.1, 1.0, B, dtype=torch.float64)
    for parameter, each in expected.items():
        squares = torch.stack([g.square().sum() for g in each])
        found = norms.get(parameter, torch.zeros(B, dtype=torch.float64))
        torch.testing.assert_close(found, squares, rtol=1e-9, atol=1e-12)
        total = sum(f * g for f, g in zip(factors, each))
        torch.testing.assert_close(
            clipped_sum(capture, parameter, factors), total, rtol=1e-9, atol=1e-12
        )
    assert all(p.grad is None for p in model.parameters())


def test_a_step_can_be_forgotten() -> None:
    model = nn.Linear(4, 2).double()
    capture = capture_step(model, vectors())
    capture.clear()
    assert dict(capture.square_norms(B)) == {}
    assert clipped_sum(capture, "weight", torch.ones(B)).abs().max() == 0


def test_nothing_is_recorded_without_gradients() -> None:
    model = nn.Linear(4, 2).double()
    capture = DenseCapture(dict(model.named_parameters()))
    with capture, torch.no_grad():
        model(vectors())
    assert dict(capture.square_norms(B)) == {}


def test_the_empty_batch_has_empty_norms_and_zero_sums() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 1)).double()
    capture = capture_step(model, vectors()[:0])
    assert all(squares.shape == (0,) for _, squares in capture.square_norms(0))
    for name, parameter in model.named_parameters():
        zero = clipped_sum(capture, name, torch.zeros(0, dtype=torch.float64))
        assert torch.equal(zero, torch.zeros_like(parameter))


@pytest.mark.parametrize("width", [2, 40])
def test_positions_that_cancel_are_not_taken_for_nothing(width: int) -> None:
    """As a difference of products, 1e4^2 - 1e4^2 hides a gradient of norm one in float32."""
    a = torch.full((1, 2, width), 1e4)
    g = torch.ones(1, 2, width)
    a[0, 1, 0] += 1.0
    g[0, 1] = -1.0
    exact = torch.einsum("bto,bti->boi", g.double(), a.double()).square().sum()
    assert exact == width
    assert weight_square_norm(Positions(a, g), None).double() >= exact

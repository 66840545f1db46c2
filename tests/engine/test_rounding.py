"""Rounding in float32, where terms of a gradient cancel: of no account to anybody else."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dpsparse.engine.lookups import Bags, Layout, Lookup
from lightning_dpsparse.engine.norms import square_norms
from lightning_dpsparse.engine.outer_products import Positions, weight_square_norm
from lightning_dpsparse.engine.parameter_calls import rows_square_norm
from lightning_dpsparse.engine.rows import clipped_row_gradients
from tests.support.cancelling import EPS, nearly_cancelling, padded
from tests.support.dense_layers import dense_sum

# ---- norms --------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [4, 64])
@pytest.mark.parametrize("leaders", [None, [0, 0, 2]], ids=["examples", "users"])
def test_a_norm_does_not_depend_on_how_long_others_are(width: int, leaders: Any) -> None:
    """Padded to four positions the Gram matrix is the quicker way, and to sixty it is not."""
    first_of_unit_B = None if leaders is None else torch.tensor(leaders)
    for seed in range(20):
        each = [nearly_cancelling(4, width, 3 * seed + i) for i in range(3)]
        a, g = (torch.cat(side) for side in zip(*each))
        found = weight_square_norm(Positions(a, g), first_of_unit_B)
        for length in (5, 20, 60):
            longer = weight_square_norm(
                Positions(padded(a, length), padded(g, length)), first_of_unit_B
            )
            torch.testing.assert_close(longer, found, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("leaders", [None, [0, 0]], ids=["examples", "users"])
def test_nor_does_the_norm_of_rows(leaders: Any) -> None:
    first_of_unit_B = None if leaders is None else torch.tensor(leaders)
    ids, g = torch.tensor([[2, 2, 1], [3, 3, 0]]), torch.zeros(2, 3, 4)
    g[:, 0], g[:, 1] = 1.0, -1.0
    found = rows_square_norm(ids, g, 5, first_of_unit_B)
    longer = rows_square_norm(F.pad(ids, (0, 40)), padded(g, 43), 5, first_of_unit_B)
    torch.testing.assert_close(longer, found, rtol=1e-6, atol=0.0)


def test_rows_are_added_up_beyond_float32() -> None:
    """1 + 1e-3 - 1 is off by 5e-5 of what is left in float32."""
    g = torch.tensor([1.0, 1e-3, 1e-4, 1e-5, -1.0])[None, :, None].expand(1, 5, 3)
    found = rows_square_norm(torch.zeros(1, 5, dtype=torch.int64), g, 2, None)
    exact = g.double().sum(1).square().sum(1)
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("positions", [2, 4, 8])
@pytest.mark.parametrize("width", [2, 8, 64])
def test_a_norm_is_that_of_the_gradient_or_above_it(positions: int, width: int) -> None:
    for seed in range(30):
        a, g = nearly_cancelling(positions, width, seed)
        exact = torch.einsum("bto,bti->boi", g.double(), a.double()).square().sum()
        found = weight_square_norm(Positions(a, g), None).double()
        terms = (a.double().norm(dim=2) * g.double().norm(dim=2)).square().sum()
        # Rounded once, to float32; equal unless below the bound.
        assert float(found / exact.clamp_min(EPS * positions * terms)) == pytest.approx(1, abs=EPS)


# ---- one example alone, and others beside it ----------------------------------------------------


@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize("positions", [2, 8])
def test_one_example_alone_contributes_at_most_clip_norm(positions: int, width: int) -> None:
    """Terms are at most C / sqrt(eps), and each of their roundings half an eps of that."""
    torch.manual_seed(0)
    model = nn.Linear(width, width)
    for seed in range(15):
        a, g = nearly_cancelling(positions, width, seed)
        found = dense_sum(model, lambda a=a, g=g: (model(a) * g).sum((1, 2)))  # type: ignore[misc]
        assert found.norm() <= 1 + (positions + 2) * math.sqrt(EPS) / 2


class Twice(nn.Module):
    """One layer in two places: its uses may cancel where neither does alone."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(x[:, 0]), self.layer(x[:, 1])], dim=1)


class Scale(nn.Module):
    """A parameter in bare arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


class Image(nn.Module):
    """A convolution, with positions as the columns of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mT[:, :, None]).squeeze(2).mT


class Tied(nn.Module):
    """One matrix as embedding and as output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.zeros(x.shape[:2], dtype=torch.int64)
        return self.rows(ids) + F.linear(x, self.rows.weight)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 8),
    "convolution": Image,
    "layer norm": lambda: nn.LayerNorm(8),
    "bare arithmetic": Scale,
    "linear, used twice": lambda: Twice(nn.Linear(8, 8)),
    "layer norm, used twice": lambda: Twice(nn.LayerNorm(8)),
    "bare arithmetic, used twice": lambda: Twice(Scale()),
    "embedding and linear": Tied,
}


@pytest.mark.parametrize("size", [1e6, 1e9, 1e15])
@pytest.mark.parametrize("inputs", [0.0, 1.0])
@pytest.mark.parametrize("name", LAYERS)
def test_positions_that_cancel_do_not_swallow_the_others(
    name: str, inputs: float, size: float
) -> None:
    """1e9 + x - 1e9 is zero: an example of no gradient at all could erase everyone's.

    Of the others, each contributes less than what rounding leaves of a term of 1e6.
    """
    torch.manual_seed(0)
    model, examples, bad = LAYERS[name](), 1000, 300
    x = torch.ones(examples, 2, 8)
    x[:, :, 0] = 3.0
    x[bad] = inputs
    x[bad, :, 0] *= 2
    weight = torch.full((examples, 2, 1), 1e-5)
    weight[bad, 0], weight[bad, 1] = size, -size
    everyone = torch.arange(examples)
    sums = [
        dense_sum(model, lambda k=k: (model(x[k]) * weight[k]).sum((1, 2)))  # type: ignore[misc]
        for k in (everyone, everyone[everyone != bad])
    ]
    # Its own gradient is zero. Two terms, two roundings each, while they stand.
    assert (sums[0] - sums[1]).norm() <= 4 * math.sqrt(EPS) / 2


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "bare arithmetic"])
def test_rounding_before_a_layer_is_not_blown_up_by_clipping(name: str) -> None:
    """Whatever the batch does to the last bit of an example must not turn it round.

    Arithmetic of one use adds up its positions where nobody sees them.
    """
    torch.manual_seed(0)
    model, x = LAYERS[name](), torch.ones(1, 2, 8)
    x[:, :, 0] = 3.0
    sums = [
        dense_sum(model, lambda w=w: (model(x) * w).sum((1, 2)))  # type: ignore[misc]
        for w in (torch.tensor([[[1e9], [-1e9]]]), torch.tensor([[[1e9], [-1e9 * (1 + EPS)]]]))
    ]
    assert not torch.equal(*sums)
    assert (sums[0] - sums[1]).norm() <= 2 * math.sqrt(EPS)


def test_an_example_that_is_not_a_number_is_dropped_from_bare_arithmetic() -> None:
    model, x = Scale(), torch.ones(3, 2, 8)
    rest = dense_sum(model, lambda: model(x[1:]).sum((1, 2)))
    x[0, 0] = math.nan
    assert torch.equal(dense_sum(model, lambda: model(x).sum((1, 2))), rest)


# ---- tables -------------------------------------------------------------------------------------


def clipped_rows(lookup: Lookup) -> Tensor:
    """Clipped to one."""
    norms_B = square_norms(lookup).sqrt()
    factors_KB = (1 / norms_B.clamp_min(1e-30)).clamp_max(1.0)[None]
    sums = clipped_row_gradients(lookup, factors_KB, [0] * len(lookup.layout.widths))
    return torch.cat([gradient.values_UD.double().flatten() for gradient in sums])


@pytest.mark.parametrize("pooled", [True, False], ids=["bags", "sequences"])
@pytest.mark.parametrize("size", [1e6, 1e9])
def test_features_that_cancel_on_a_shared_table_do_not_swallow_the_others(
    size: float, pooled: bool
) -> None:
    layout, examples, bad = Layout((0, 0), (4,), (3,), is_pooled=pooled), 1000, 300
    ids, offsets = torch.zeros(2 * examples, dtype=torch.int64), torch.arange(2 * examples + 1)
    gradient = torch.full((2, examples, 4), 2e-5)
    gradient[:, bad] = 0.0
    rest = gradient.clone()
    gradient[0, bad], gradient[1, bad] = size, -size
    moved = [
        clipped_rows(
            Lookup(
                Bags(layout, ids, offsets),
                g.transpose(0, 1).flatten(1) if pooled else g.flatten(0, 1),
            )
        )
        for g in (gradient, rest)
    ]
    assert (moved[0] - moved[1]).norm() <= 4 * math.sqrt(EPS) / 2


@pytest.mark.parametrize("size", [1e6, 1e9])
def test_weights_of_a_bag_that_cancel_do_not_swallow_the_others(size: float) -> None:
    layout, examples, bad = Layout((0,), (4,), (3,)), 1000, 300
    ids, offsets = torch.zeros(2 * examples, dtype=torch.int64), torch.arange(examples + 1) * 2
    weights = torch.full((examples, 2), 2e-5)
    weights[bad] = 0.0
    rest = weights.clone()
    weights[bad, 0], weights[bad, 1] = size, -size
    moved = [
        clipped_rows(Lookup(Bags(layout, ids, offsets, w.flatten()), torch.ones(examples, 4)))
        for w in (weights, rest)
    ]
    assert (moved[0] - moved[1]).norm() <= 4 * math.sqrt(EPS) / 2

"""Sensitivity in float32 of dense layers in few numbers or in all: padding, and what cancels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lightning_dpsparse import LSG, RGP, DenseGaussian, SparseDPSGD
from lightning_dpsparse.engine.dense import DenseMechanism, Form
from lightning_dpsparse.engine.outer_products import Positions
from lightning_dpsparse.mechanisms.sparse_dpsgd import Masked
from lightning_dpsparse.noise.keys import RunKey
from lightning_dpsparse.noise.sources import FastNoise
from tests.support.cancelling import EPS, nearly_cancelling, padded
from tests.support.dense_layers import dense_sum
from tests.support.users import leaders_of

WIDTH = 6
LENGTH = 8
MECHANISMS: dict[str, DenseMechanism] = {
    "gaussian": DenseGaussian(),
    "rgp": RGP(1, exclude=()),
    "lsg": LSG(1, 0.3, exclude=()),
    "sparse": SparseDPSGD(0.3, exclude=()),
}
FORMS = [name for name in MECHANISMS if name != "gaussian"]


def form_of(name: str, width: int) -> Form:
    torch.manual_seed(width)
    form = MECHANISMS[name].form(
        "w", torch.randn(width, width), 1, FastNoise(RunKey.fixed(3)), step=7
    )
    assert form is not None
    return form


# ---- norms of forms -----------------------------------------------------------------------------


@pytest.mark.parametrize("leaders", [None, [0, 0, 2]], ids=["examples", "users"])
@pytest.mark.parametrize("mechanism", FORMS)
def test_a_norm_does_not_depend_on_how_long_others_are(mechanism: str, leaders: Any) -> None:
    first_of_unit_B = None if leaders is None else torch.tensor(leaders)
    form = form_of(mechanism, 8)
    for seed in range(10):
        each = [nearly_cancelling(4, 8, 3 * seed + i) for i in range(3)]
        a, g = (torch.cat(side) for side in zip(*each))
        found = form.square_norms(Positions(a, g), first_of_unit_B)
        for length in (5, 20):
            longer = form.square_norms(
                Positions(padded(a, length), padded(g, length)), first_of_unit_B
            )
            torch.testing.assert_close(longer, found, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("positions", [1, 2, 8])
@pytest.mark.parametrize("mechanism", FORMS)
def test_one_example_alone_contributes_at_most_clip_norm(mechanism: str, positions: int) -> None:
    """Projections round as often as they have terms, positions as often as there are some."""
    for width in (8, 64):
        form = form_of(mechanism, width)
        for seed in range(10):
            pair = Positions(*nearly_cancelling(positions, width, seed))
            norm = form.square_norms(pair, None).sqrt()
            out = torch.empty(form.size)
            form.weighted_sum(pair, 1 / norm, out)
            assert out.double().norm() <= 1 + (positions + width + 2) * math.sqrt(EPS) / 2


@pytest.mark.parametrize("mechanism", ["rgp", "lsg"])
@pytest.mark.parametrize("positions", [1, 3])
def test_what_a_subspace_hides_is_not_blown_up_by_clipping(mechanism: str, positions: int) -> None:
    """A gradient outside the subspace has a projection of rounding errors, and of nothing else."""
    form: Any = form_of(mechanism, 64)
    left, right = form.left_OK.double(), form.right_KI.double()
    a, g = (torch.randn(4, positions, 64).double() for _ in range(2))
    a, g = 1e4 * (a - a @ right.mT @ right), 1e4 * (g - g @ left @ left.mT)
    pair = Positions(a.float(), g.float())
    factors = (1 / form.square_norms(pair, None).sqrt()).clamp_max(1.0)
    out = torch.empty(form.size)
    form.weighted_sum(pair, factors, out)
    assert out.norm() <= 4 * (positions + 64 + 2) * math.sqrt(EPS) / 2


@pytest.mark.parametrize(("a", "g"), [(1e18, 2e-23), (2e-23, 1e18), (1e-30, 1e30), (3e37, 1e-37)])
def test_sparse_dpsgd_sees_a_gradient_whose_factors_squares_are_out_of_range(
    a: float, g: float
) -> None:
    """A norm may be too large, or infinite: then its example counts less, or nothing. It may not
    be too small."""
    form = Masked(torch.ones(6, 4))
    pair = Positions(torch.full((1, 1, 4), a), torch.full((1, 1, 6), g))
    exact = torch.einsum("bto,bti->boi", pair.gradient.double(), pair.inputs.double()).norm()
    found = float(form.square_norms(pair, None).sqrt())
    assert not found < exact * (1 - 1e-5)
    assert not math.isfinite(found) or found < 3 * exact  # what may have got lost is added


# ---- the whole step -----------------------------------------------------------------------------


class Model(nn.Module):
    """Some of these layers side by side, all but one on positions: what comes in is exact."""

    def __init__(self, layers: Sequence[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = {
            "linear": lambda: nn.Linear(WIDTH, WIDTH),
            "convolution": lambda: nn.Conv2d(WIDTH, WIDTH, (1, 2), padding=(0, 1)),
            "layer norm": lambda: nn.LayerNorm(WIDTH),
            "embedding": lambda: nn.Embedding(4, WIDTH),
            "flat": lambda: nn.Linear(WIDTH, WIDTH),
        }
        self.layers = nn.ModuleDict({name: made[name]() for name in layers})

    def forward(self, x_BTI: Tensor, weight_BT: Tensor) -> Tensor:
        image, ids_BT = x_BTI.mT[:, :, None], (x_BTI[:, :, 0].abs() * 3).long() % 4
        given = {"convolution": image, "embedding": ids_BT, "flat": x_BTI[:, :1]}
        loss_B = torch.zeros(len(x_BTI))
        for name, layer in self.layers.items():
            out = layer(given.get(name, x_BTI))
            out = out.squeeze(2).mT[:, :-1] if name == "convolution" else out
            loss_B = loss_B + (out.sum(2) * weight_BT[:, : out.shape[1]]).sum(1)
        return loss_B


ALL = ("linear", "convolution", "layer norm", "embedding", "flat")
CASES = [
    *((layers, name) for layers in (("linear",), ("convolution",), ALL) for name in MECHANISMS),
    (("layer norm",), "gaussian"),
    (("embedding",), "gaussian"),
]


def sum_of(users: Sequence[Any], case: tuple[Sequence[str], str], as_users: bool) -> Tensor:
    layers, mechanism = case
    model, examples = Model(layers), [example for user in users for example in user]
    x, weight = (
        pad_sequence([torch.tensor(example[side]) for example in examples], batch_first=True)
        for side in (0, 1)
    )
    first_of_unit_B = leaders_of([len(user) for user in users]) if as_users else None
    return dense_sum(model, lambda: model(x, weight), MECHANISMS[mechanism], first_of_unit_B)


def sequence_of(first: list[float], places: list[tuple[float, float]], size: float) -> Any:
    """One vector over and over, with small changes, and with the weights of its positions."""
    vectors = [
        [value * (1 + change * (i % 3)) for i, value in enumerate(first)] for change, _ in places
    ]
    return vectors, [size * weight for _, weight in places]


def random_example(draw: Random) -> Any:
    """Two positions that nearly cancel; or up to LENGTH of them, of any size."""
    vector = [draw.choice([-2.0, -1.0, -0.3, 0.1, 1.0, 3.0]) for _ in range(WIDTH)]
    vector = [0.0] * WIDTH if draw.random() < 0.2 else vector
    if draw.random() < 0.7:
        change = draw.choice([0.0, 1e-7, 1e-2, *[10 ** draw.uniform(-4.0, -2.5)] * 5])
        return sequence_of(vector, [(0.0, 1.0), (change, -1.0)], draw.choice([1e4, 1e9]))
    places = [
        (draw.choice([0.0, 1e-3, 1.0]), draw.choice([-1.0, -0.3, 1.0]))
        for _ in range(draw.randint(1, LENGTH))
    ]
    sizes = [0.0, 1e-20, 1e-3, 1.0, 1.0, 1e4, 1e4, 1e15, 1e25, math.inf, math.nan]
    return sequence_of(vector, places, draw.choice(sizes))


@pytest.mark.parametrize("as_users", [False, True], ids=["examples", "users"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0][-1]}-{case[1]}")
def test_one_unit_moves_all_layers_together_by_at_most_clip_norm(
    case: tuple[Sequence[str], str], as_users: bool
) -> None:
    for seed in range(15):
        draw = Random(seed)
        most = 2 if as_users else 1
        units = [[random_example(draw) for _ in range(draw.randint(1, most))] for _ in range(8)]
        lengths = [max(len(weights) for _, weights in unit) for unit in units]
        longest = lengths.index(max(lengths))
        everyone, others = (
            sum_of(some, case, as_users) for some in (units, units[:longest] + units[longest + 1 :])
        )
        assert everyone.isfinite().all()
        # A unit's clipped terms are at most C / sqrt(eps) in all. Each is rounded by half an eps of
        # it in products, in projections, and as often as another of its own is added; in two sums.
        roundings = most * LENGTH + WIDTH + 2
        allowed = len(units) * roundings * math.sqrt(EPS)
        assert torch.linalg.vector_norm(everyone - others) <= 1 + allowed


@pytest.mark.parametrize("as_users", [False, True], ids=["examples", "users"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0][-1]}-{case[1]}")
def test_one_long_sequence_does_not_move_a_hundred_short_ones(
    case: tuple[Sequence[str], str], as_users: bool
) -> None:
    first = [0.3, -1.0, 0.5, 2.0, 0.1, 1.0]
    short = sequence_of(first, [(0.0, 1.0), (7e-4, -1.0)], 1e4)
    long = sequence_of(first, [(0.01 * i, 1.0) for i in range(20)], 1.0)
    others = [[short, short]] * 50
    with_it, without = (sum_of(users, case, as_users) for users in ([*others, [long]], others))
    # All of the hundred are alike, and what their terms of 1e3 C lose in 200 additions is 1e-5 C.
    assert torch.linalg.vector_norm(with_it - without) <= 1 + 1e-3


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0][-1]}-{case[1]}")
def test_the_bound_is_reached(case: tuple[Sequence[str], str]) -> None:
    first = [1.0, 0.2, 0.1, -0.5, 0.4, 1.0]
    big = sequence_of(first, [(0.01 * i, 1.0) for i in range(5)], 1e3)
    for as_users in (False, True):
        moved = torch.linalg.vector_norm(sum_of([[big]], case, as_users))
        assert moved == pytest.approx(1.0, rel=1e-5)

"""RGP, LSG and sparse DP-SGD: the naive step, sensitivity and noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_dpsparse import LSG, RGP, DenseGaussian, SparseDPSGD
from lightning_dpsparse.engine.clipping import FlatClipping
from lightning_dpsparse.engine.dense import DenseForms, DenseMechanism
from lightning_dpsparse.engine.ghost import DenseCapture
from lightning_dpsparse.engine.step import Clipped, Ranks, StepConfig, clipped_sums, release
from lightning_dpsparse.mechanisms.eana import EANA
from lightning_dpsparse.mechanisms.lsg import LowRank, decompose
from lightning_dpsparse.noise.keys import RunKey, Stream
from lightning_dpsparse.noise.sources import FastNoise
from tests.support.dense_cases import Attention
from tests.support.dense_layers import NaiveForm
from tests.support.fake_read import FakeRead
from tests.support.fake_read import example as examples_of_tables
from tests.support.paper_kernel import open_on_paper

B = 6
CLIP = 0.5
NOISE = FastNoise(RunKey.fixed(3))


class Transformer(nn.Module):
    """Attention from linear layers, a feed-forward layer, and a prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.inner = Attention(), nn.Linear(12, 10)
        self.norm, self.last = nn.LayerNorm(10), nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(torch.tanh(self.inner(self.attention(x)))))


class Shared(nn.Module):
    """One layer that is used twice, on one position and on three."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(torch.tanh(self.layer(x))).mean(1) + self.layer(x[:, 0]))


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, stride=2),
        nn.Tanh(),
        nn.Conv2d(6, 5, 2, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(20, 2),
    )


def random(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 7), nn.Linear(7, 1)),
        random(B, 9),
    ),
    "transformer": (Transformer, random(B, 3, 4)),
    "shared": (Shared, random(B, 3, 4)),
    "convolutions": (conv_net, random(B, 3, 6, 6)),
}
MECHANISMS: dict[str, Any] = {
    "rgp": RGP(1),
    "rgp of rank 2": RGP(2),
    "lsg": LSG(1, 0.4),
    "lsg of rank 2": LSG(2, sparsity=0.5),
    "lsg, warming up": LSG(2, sparsity=0.5, warmup=8),
    "sparse": SparseDPSGD(0.3),
    "sparse, warming up": SparseDPSGD(0.3, warmup=8),
    "all layers": LSG(1, 0.3, exclude=()),
}
STEP = 7


# ---- the naive step -----------------------------------------------------------------------------


def is_smaller(mechanism: Any, weight: Tensor) -> bool:
    rows, columns = weight.flatten(1).shape
    rank = getattr(mechanism, "rank", None)
    return rank is None or rank * (rows + columns) < rows * columns


def naive_forms(model: nn.Module, mechanism: Any) -> dict[str, NaiveForm]:
    layers = [n for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    if mechanism.exclude is None:
        layers = layers[:-1]
    weights = {f"{layer}.weight": model.get_parameter(f"{layer}.weight") for layer in layers}
    return {
        n: NaiveForm(mechanism, n, w.detach(), STEP, NOISE)
        for n, w in weights.items()
        if is_smaller(mechanism, w)
    }


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x).flatten(1)
    return (out * torch.arange(1, out.shape[1] + 1)).sum(1).cosh() + x.flatten(1)[:, 0] * out[:, 0]


def naive_gradients(
    model: nn.Module, x: Tensor, mechanism: Any, unit_of: list[int] | None = None
) -> dict[str, Tensor]:
    names = [name for name, _ in model.named_parameters()]
    forms = naive_forms(model, mechanism)
    units: dict[int, list[Tensor]] = {}
    for b in range(len(x)):
        each = torch.autograd.grad(loss_of(model, x[b : b + 1])[0], list(model.parameters()))
        each = [forms[n].of(g) if n in forms else g.flatten() for n, g in zip(names, each)]
        unit = b if unit_of is None else unit_of[b]
        units[unit] = [g + h for g, h in zip(units[unit], each)] if unit in units else each
    total = [torch.zeros_like(g) for g in next(iter(units.values()))]
    for unit_gradient in units.values():
        norm = math.sqrt(sum(float(g.square().sum()) for g in unit_gradient))
        total = [t + min(1.0, CLIP / norm) * g for t, g in zip(total, unit_gradient)]
    shapes = {name: p.shape for name, p in model.named_parameters()}
    return {n: forms[n].back(t) if n in forms else t.view(shapes[n]) for n, t in zip(names, total)}


# ---- the step of the engine ---------------------------------------------------------------------


def set_up(
    model: nn.Module, mechanism: DenseMechanism, noise: float = 0.0, step: int = STEP
) -> tuple[DenseCapture, StepConfig]:
    parameters = dict(model.named_parameters())
    capture = DenseCapture(parameters)
    capture.set_forms(DenseForms(mechanism, model, parameters).at(step, NOISE))
    config = StepConfig(EANA(), FlatClipping(), CLIP, noise, expected_batch=1.0, noise=NOISE)
    return capture, config


def gradients(
    model: nn.Module, x: Tensor, mechanism: Any, first_of_unit_B: Tensor | None = None
) -> dict[str, Tensor]:
    capture, config = set_up(model, mechanism)
    with capture:
        loss = loss_of(model, x)
    ranks = Ranks(len(x), 0, lambda tensor: None)
    state = config.open([])
    sums = clipped_sums(loss, [], capture, config, state, ranks, STEP, first_of_unit_B)
    release(sums, [], capture, state, ranks, STEP)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def build(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, data = MODELS[name]
    return make().double(), data()


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("name", MODELS)
def test_the_step_is_the_naive_one(name: str, mechanism: str) -> None:
    model, x = build(name)
    expected = naive_gradients(model, x, MECHANISMS[mechanism])
    found = gradients(model, x, MECHANISMS[mechanism])
    assert list(found) == list(expected)
    for parameter, gradient in expected.items():
        torch.testing.assert_close(found[parameter], gradient, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("mechanism", ["rgp", "lsg of rank 2", "sparse"])
@pytest.mark.parametrize("name", MODELS)
def test_users_are_clipped_as_one(name: str, mechanism: str) -> None:
    model, x = build(name)
    leaders = [0, 0, 0, 3, 4, 4]
    expected = naive_gradients(model, x, MECHANISMS[mechanism], leaders)
    found = gradients(model, x, MECHANISMS[mechanism], torch.tensor(leaders))
    for parameter, gradient in expected.items():
        torch.testing.assert_close(found[parameter], gradient, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("mechanism", ["rgp", "lsg", "sparse"])
def test_an_example_that_overflows_counts_nothing(mechanism: str) -> None:
    model, x = build("mlp")
    expected = gradients(model, x[1:], MECHANISMS[mechanism])
    model.zero_grad()
    model, x = build("mlp")
    x[0] = math.inf
    found = gradients(model, x, MECHANISMS[mechanism])
    for parameter, gradient in expected.items():
        torch.testing.assert_close(found[parameter], gradient, rtol=1e-9, atol=1e-11)


def test_a_layer_that_nobody_reached_has_noise_and_no_gradient() -> None:
    model = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)]).double()
    capture, config = set_up(model, RGP(1))
    with capture:
        loss = model[2](model[0](torch.randn(4, 6).double())).flatten()
    ranks = Ranks(4, 0, lambda tensor: None)
    sums = clipped_sums(loss, [], capture, config, config.open([]), ranks, STEP)
    assert capture.pieces(sums.dense)["1.weight"].abs().max() == 0
    assert capture.pieces(sums.dense)["0.weight"].abs().max() > 0


# ---- sensitivity --------------------------------------------------------------------------------


def everything(sums: Clipped) -> Tensor:
    """All that gets noise, as one vector, with the tables' rows in their places."""
    rows = [torch.zeros(5, 4).double(), torch.zeros(3, 4).double()]
    for gradients_of_read in sums.tables:
        for table, gradient in zip(rows, gradients_of_read):
            table[gradient.rows_U] = gradient.values_UD
    return torch.cat([*(table.flatten() for table in rows), sums.dense.flatten()])


def sums_of(examples: list[Any], mechanism: DenseMechanism) -> Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 9), nn.LayerNorm(9), nn.Linear(9, 8), nn.Linear(8, 1))
    model = model.double()
    leaf = torch.tensor([e[1] for e in examples], dtype=torch.float64)
    leaf = leaf.view(len(examples), 12).requires_grad_()
    scale = torch.tensor([e[2] for e in examples], dtype=torch.float64)
    read = FakeRead([e[0] for e in examples], leaf, False)
    capture, config = set_up(model, mechanism)
    with capture:
        loss = model(leaf).squeeze(1).square() * scale + (leaf * scale[:, None]).sum(1)
    ranks = Ranks(len(examples), 0, lambda tensor: None)
    state = open_on_paper(config, read)
    return everything(clipped_sums(loss, [read], capture, config, state, ranks, STEP))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    examples=st.lists(examples_of_tables, min_size=1, max_size=4),
    removed=st.integers(0, 3),
    mechanism=st.sampled_from(list(MECHANISMS)),
)
def test_one_example_moves_tables_and_all_factors_together_by_at_most_clip_norm(
    examples: list[Any], removed: int, mechanism: str
) -> None:
    removed %= len(examples)
    rest = [e for i, e in enumerate(examples) if i != removed]
    everyone, others = (sums_of(some, MECHANISMS[mechanism]) for some in (examples, rest))
    assert everyone.isfinite().all()
    assert torch.linalg.vector_norm(everyone - others) <= CLIP * (1 + 1e-9)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_the_bound_is_reached(mechanism: str) -> None:
    big = (([1, 1], [1], [0]), [float(i) for i in range(12)], 50.0)
    moved = torch.linalg.vector_norm(sums_of([big], MECHANISMS[mechanism]))
    assert moved == pytest.approx(CLIP, rel=1e-9)


# ---- noise --------------------------------------------------------------------------------------


def released_noise(mechanism: Any, step: int) -> tuple[DenseCapture, Tensor]:
    """Of a step without examples: all that is released is noise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 50), nn.Linear(50, 40), nn.Linear(40, 1))
    capture, config = set_up(model, mechanism, noise=2.0, step=step)
    flat = capture.new_flat().zero_()
    ranks = Ranks(1, 0, lambda tensor: None)
    release(Clipped([], flat), [], capture, config.open([]), ranks, step)
    return capture, flat


@pytest.mark.parametrize(
    ("mechanism", "size"),
    [
        (DenseGaussian(), 60 * 50 + 50 * 40 + 40 + 91),
        (RGP(3), 3 * (110 + 90) + 40 + 91),
        (LSG(3, 0.4), 3 * (36 + 30 + 30 + 24) + 40 + 91),
        (SparseDPSGD(0.4), 36 * 50 + 30 * 40 + 40 + 91),
    ],
    ids=["gaussian", "rgp", "lsg", "sparse"],
)
def test_noise_is_on_live_numbers_and_on_all_of_them(mechanism: Any, size: int) -> None:
    capture, flat = released_noise(mechanism, STEP)
    assert capture.size == flat.numel() == size
    chi_square = float((flat.double() / (2.0 * CLIP)).square().sum())
    assert abs(chi_square - size) < 5 * math.sqrt(2 * size)
    assert (flat == 0).sum() == 0


def test_the_subspace_is_independent_of_the_noise() -> None:
    """Their streams differ: equal draws would put the noise where the subspace is."""
    start = NOISE.fill_(torch.empty(1, 64), Stream("subspace", "0.weight", STEP), 1.0)
    _, flat = released_noise(RGP(1), STEP)
    noise = flat[:64].double() / (2.0 * CLIP)
    assert abs(float(noise @ start[0].double())) / 64 < 5 / math.sqrt(64)
    again, later = (
        DenseForms(
            RGP(1), m := nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 1)), dict(m.named_parameters())
        )
        .at(step, NOISE)["0.weight"]
        .right_KI
        for step in (1, 2)
    )
    assert not torch.allclose(again, later)


def test_frozen_weights_stay_as_they_are_in_sparse_dpsgd() -> None:
    capture, _ = released_noise(SparseDPSGD(0.4), STEP)
    weight = capture.parameters["0.weight"]
    assert weight.grad is not None
    frozen = weight.grad == 0
    assert frozen.sum() == 1200
    assert weight.detach().abs()[frozen].max() <= weight.detach().abs()[~frozen].min()


def test_unimportant_units_are_frozen_and_not_important_ones() -> None:
    weight = torch.ones(6, 5)
    weight[[1, 4]] *= 0.01
    weight[:, 2] *= 0.001
    form = LSG(1, 0.4).form("w", weight, 1, NOISE, 0)
    assert isinstance(form, LowRank)
    assert form.live_N is not None
    assert form.live_M is not None
    assert form.live_N.tolist() == [0, 2, 3, 5]
    assert 2 not in form.live_M.tolist()
    assert len(form.live_M) == 3


def test_sparsity_begins_after_the_warm_up() -> None:
    sizes = [released_noise(LSG(3, 0.4, warmup=5), step)[1].numel() for step in (0, 4, 5, 6)]
    full, live = 3 * (110 + 90) + 131, 3 * (36 + 30 + 30 + 24) + 131
    assert sizes == [full, full, live, live]


# ---- the decomposition --------------------------------------------------------------------------


def test_one_step_of_the_power_method_finds_a_low_rank_matrix() -> None:
    left, right = torch.randn(12, 2).double(), torch.randn(2, 9).double()
    found_left, found_right = decompose(left @ right, torch.randn(2, 9).double())
    eye = torch.eye(2).double()
    torch.testing.assert_close(found_left.T @ found_left, eye)
    torch.testing.assert_close(found_right @ found_right.T, eye)
    projected = found_left @ found_left.T @ left @ right @ found_right.T @ found_right
    torch.testing.assert_close(projected, left @ right)


def test_a_weight_of_zeros_has_a_basis_too() -> None:
    left, right = decompose(torch.zeros(6, 5), torch.randn(2, 5))
    torch.testing.assert_close(left.T @ left, torch.eye(2))
    torch.testing.assert_close(right @ right.T, torch.eye(2))


def test_at_full_rank_nothing_is_lost() -> None:
    """Equation 3 is a projection; at full rank, of everything on itself."""
    weight, gradient = torch.randn(4, 7).double(), torch.randn(4, 7).double()
    form = LowRank(*decompose(weight, torch.randn(4, 7).double()))
    released = torch.cat(
        [(gradient @ form.right_KI.T).flatten(), (form.left_OK.T @ gradient).flatten()]
    )
    torch.testing.assert_close(form.rebuild(released), gradient)

"""No use of a dense parameter is missed: it is recorded, refused, or found afterwards."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.modules.crossnet import VectorCrossNet

from lightning_dpsparse.engine.ghost import DenseCapture, check_layers
from tests.support.dense_cases import B, capture_step, clipped_sum, loss_of, positions, vectors


class Folded(nn.Module):
    """Folds positions into the batch, so that a row is no longer an example."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(0, 1)).view(len(x), -1)


class Mixing(nn.Module):
    """Arithmetic that lets examples see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, self.weight, training=True)


class Stacked(nn.Module):
    """Slices of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, torch.stack([self.weight[0], self.weight[1]]))


class InPlace(Stacked):
    """Arithmetic that overwrites what its own gradient needs."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        x *= self.weight[0]
        return x


@pytest.mark.parametrize(
    ("model", "x", "message"),
    [
        (Folded(), positions(), r"of 'linear' on 'layer.weight', found sizes \[15\]"),
        (InPlace(), vectors(), r"with \['weight\[0\]'\]: its gradient needs the input"),
        (Mixing(), vectors(), "found 'batch_norm', which"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_has_no_per_example_gradient_is_refused(
    model: nn.Module, x: Tensor, message: str
) -> None:
    def run() -> None:
        list(capture_step(model.double(), x).square_norms(B))

    with pytest.raises(ValueError, match=message):
        run()


class Opaque(torch.autograd.Function):
    """A product that torch functions do not see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, gradients[0].T @ ctx.saved_tensors[0]


def in_a_view(layer: nn.Linear, view: Tensor) -> Tensor:
    return vectors() @ view.T


def in_a_function(layer: nn.Linear, view: Tensor) -> Tensor:
    out: Tensor = Opaque.apply(vectors(), layer.weight)
    return out


def where_subclasses_are_off(layer: nn.Linear, view: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return F.linear(vectors(), layer.weight)


def where_all_is_off(layer: nn.Linear, view: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return F.linear(vectors(), layer.weight)


def in_a_copied_class(layer: nn.Linear, view: Tensor) -> Tensor:
    layer.weight.__class__ = nn.Parameter
    return F.linear(vectors(), layer.weight)


@pytest.mark.parametrize(
    "use",
    [
        in_a_view,
        in_a_function,
        where_subclasses_are_off,
        where_all_is_off,
        in_a_copied_class,
    ],
)
def test_a_use_behind_our_back_is_found(use: Callable[[nn.Linear, Tensor], Tensor]) -> None:
    model = nn.Linear(4, 1).double()
    view = model.weight * 1.0  # made before the capture began
    capture = DenseCapture(dict(model.named_parameters()))
    with capture:
        loss = use(model, view).sum()
    loss.backward()
    with pytest.raises(ValueError, match="Expected every use of 'weight'"):
        capture.check_nothing_escaped()


@pytest.mark.parametrize("part", ["rows", "computed"])
def test_a_use_of_something_made_of_a_parameter_is_found_too(part: str) -> None:
    model = nn.Linear(4, 6).double()
    capture = DenseCapture(dict(model.named_parameters()))
    with capture:
        weight = model.weight[:2] if part == "rows" else model.weight * 2.0
        loss = Opaque.apply(vectors(), weight).sum()  # type: ignore[no-untyped-call]
    loss.backward()
    with pytest.raises(ValueError, match=r"Expected every use of '.*weight.*'"):
        capture.check_nothing_escaped()


def test_a_parameter_that_is_written_into_data_is_refused() -> None:
    model = nn.Linear(4, 1).double()
    out = torch.zeros(B, 4, dtype=torch.float64)
    message = r"leave their inputs as they are, found '__setitem__' with \['weight'\]"
    with DenseCapture(dict(model.named_parameters())), pytest.raises(ValueError, match=message):
        out[0] = model.weight


def test_parameters_are_as_before_even_if_the_forward_pass_breaks() -> None:
    model = VectorCrossNet(4, 2).double()
    before = {name: (id(p), type(p)) for name, p in model.named_parameters()}
    capture = DenseCapture(dict(model.named_parameters()))

    def broken() -> None:
        with capture:
            assert all(isinstance(p, nn.Parameter) for p in model.parameters())
            loss_of(model, vectors())
            model(torch.ones(B, 7))

    with pytest.raises(RuntimeError):
        broken()
    assert {name: (id(p), type(p)) for name, p in model.named_parameters()} == before
    capture.clear()
    loss_of(model, vectors()).sum().backward()  # without the capture: ordinary gradients
    assert all(p.grad is not None for p in model.parameters())
    assert dict(capture.square_norms(B)) == {}


def test_a_slice_that_outlives_the_capture_is_a_tensor_again() -> None:
    model = Stacked().double()
    capture = DenseCapture(dict(model.named_parameters()))
    with capture:
        part = model.weight[0]
        vectors() * part
    assert type(part) is Tensor
    assert type(vectors() * part) is Tensor
    assert len(capture._uses["weight[0]"]) == 1


def test_a_copy_made_in_the_forward_pass_is_nobodys_parameter() -> None:
    model = nn.Linear(4, 2).double()
    capture = DenseCapture(dict(model.named_parameters()))
    with capture:
        copy = deepcopy(model)
        copy(vectors())
    assert all(type(p) is nn.Parameter for p in copy.parameters())
    assert dict(capture.square_norms(B)) == {}


def test_captures_of_two_models_do_not_mix() -> None:
    one, two = nn.Linear(4, 3).double(), nn.Linear(3, 2).double()
    captures = [DenseCapture(dict(model.named_parameters())) for model in (one, two)]
    with captures[0], captures[1]:
        loss = two(one(vectors())).square().sum()
    loss.backward()
    for capture in captures:
        capture.check_nothing_escaped()
        assert [name for name, _ in capture.square_norms(B)] == ["weight", "bias"]


def test_factors_may_be_of_another_precision() -> None:
    capture = capture_step(nn.Linear(4, 2).double(), vectors())
    factors = torch.linspace(0.25, 1.25, B)  # exact in float32
    for name in capture.parameters:
        exact = clipped_sum(capture, name, factors.double())
        torch.testing.assert_close(clipped_sum(capture, name, factors), exact)


def test_layers_that_mix_examples_are_refused_by_name() -> None:
    message = "BatchNorm1d at '0', which mixes the examples of a batch. Use LayerNorm"
    with pytest.raises(ValueError, match=message):
        check_layers(nn.Sequential(nn.BatchNorm1d(3)))


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_compiled_layers_are_refused_by_name(how: str) -> None:
    layer: nn.Module = nn.Linear(4, 2)
    if how == "in place":
        layer.compile()
    model = nn.Sequential(torch.compile(layer) if how == "wrapped" else layer)
    with pytest.raises(ValueError, match="found '0' compiled"):
        check_layers(model)


def test_a_parameter_is_asked_for_its_own_state() -> None:
    model = nn.Linear(4, 2).double()
    with DenseCapture(dict(model.named_parameters())):
        assert model.weight.requires_grad
        assert model.weight.is_leaf
        assert model.weight.grad is None
        assert model.weight.shape == (2, 4)

"""How a dense parameter was used, and what each example's gradient on it is, in compact form.

A use is recorded in the forward pass; `gradient` arrives in the backward pass. Per-example
gradients of a weight matrix are never built: they are outer products, and norms and weighted sums
of outer products can be had from their factors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_dpsparse.engine.norms import not_below_rounding, row_square_norms

# B examples, T positions of an example, R = B * T, I and O inputs and outputs of a layer


@dataclass
class Use(ABC):
    """One call that read a parameter."""

    what: str
    """The operation, for messages."""
    gradient: Tensor | None = None
    """d loss / d output of the call. Stays None if the output never reached the loss."""

    def watch(self, output: Tensor) -> Tensor:
        """Have the backward pass leave the output's gradient here."""
        if not output.requires_grad:  # nothing before it wants a gradient: give it a reason
            if not output._is_view():
                started: Tensor = _Source.apply(_WANTED, self, [output])
                return started
            output = output + output.new_zeros((), requires_grad=True)
        index = output.output_nr

        def hook(gradients: tuple[Tensor | None, ...]) -> None:
            self.keep(gradients[index])

        # A hook on the tensor does the same and costs three times as much to set up.
        assert output.grad_fn is not None
        output.grad_fn.register_prehook(hook)
        return output

    def keep(self, gradient: Tensor | None) -> None:
        if gradient is not None:  # it is not copied: nobody writes to a gradient that others hold
            self.gradient = gradient.detach() if gradient.requires_grad else gradient

    def drop(self, bad_B: Tensor) -> None:
        """Forget some examples, inputs included."""
        if self.gradient is not None:
            self.gradient = _without(self.gradient, bad_B)

    @abstractmethod
    def first_dimensions(self) -> list[int]:
        """First dimensions of inputs and output: each must be the batch."""


@dataclass
class Product(Use):
    """`F.linear`: example b has sum_t g_bt a_bt^T on the weight and sum_t g_bt on the bias."""

    inputs: Tensor | None = None
    _square_gradient: Tensor | None = None

    @property
    def is_flat(self) -> bool:
        """One position per example: the gradient is a single outer product."""
        return self.inputs is not None and self.inputs.dim() == 2

    def flat_square_norm(self, *, of_bias: bool) -> Tensor:
        """||g||^2 for the bias, ||g||^2 ||a||^2 for the weight."""
        assert self.inputs is not None
        assert self.gradient is not None
        if self._square_gradient is None:  # weight and bias ask alike
            self._square_gradient = torch.linalg.vector_norm(self.gradient, dim=1).square_()
        if of_bias:
            return self._square_gradient
        return torch.linalg.vector_norm(self.inputs, dim=1).square_().mul_(self._square_gradient)

    def weighted_sum(self, factors_B: Tensor, out: Tensor, *, of_bias: bool) -> Tensor:
        """sum_b f_b sum_t g_bt a_bt^T, or without a_bt for the bias, into `out`."""
        assert self.inputs is not None
        assert self.gradient is not None
        f_R, a_RI, g_RO = (
            value if value.dtype == out.dtype else value.to(out.dtype)
            for value in (factors_B, self.inputs, self.gradient)
        )
        if not self.is_flat:
            f_R = f_R.repeat_interleave(math.prod(g_RO.shape[1:-1]))
            a_RI, g_RO = a_RI.flatten(0, -2), g_RO.flatten(0, -2)
        if of_bias:
            return torch.mv(g_RO.t(), f_R, out=out)
        # Either factor may carry f: the narrower is the smaller copy, gone before the next layer's.
        if out.shape[0] <= out.shape[1]:
            return torch.mm((g_RO * f_R.unsqueeze(1)).t(), a_RI, out=out)
        # The wide result is the quicker product (twice as quick for a layer of few inputs).
        return out.copy_(torch.mm((a_RI * f_R.unsqueeze(1)).t(), g_RO).t())

    def drop(self, bad_B: Tensor) -> None:
        super().drop(bad_B)
        assert self.inputs is not None
        self.inputs = _without(self.inputs, bad_B)
        self._square_gradient = None

    def first_dimensions(self) -> list[int]:
        assert self.inputs is not None
        return [self.inputs.shape[0] if self.inputs.dim() > 1 else -1]

    def factors(self) -> tuple[Tensor, Tensor]:
        """a and g as (B, T, I) and (B, T, O)."""
        assert self.inputs is not None
        assert self.gradient is not None
        return _positions(self.inputs), _positions(self.gradient)


@dataclass
class Rows(Use):
    """`F.embedding`: on row r, example b has the sum of g over its positions that read r."""

    ids: Tensor | None = None

    def first_dimensions(self) -> list[int]:
        assert self.ids is not None
        return [self.ids.shape[0] if self.ids.dim() else -1]

    def pairs(self) -> tuple[Tensor, Tensor]:
        """ids (B, T) and g (B, T, D)."""
        assert self.ids is not None
        assert self.gradient is not None
        ids = self.ids.flatten(1) if self.ids.dim() > 1 else self.ids[:, None]
        return ids, _positions(self.gradient)


@dataclass
class Normalised(Use):
    """`F.layer_norm`: gradients on scale and shift are sums over positions of g x and g."""

    inputs: Tensor | None = None
    shape: tuple[int, ...] = ()
    eps: float = 1e-5

    def drop(self, bad_B: Tensor) -> None:
        super().drop(bad_B)
        assert self.inputs is not None
        self.inputs = _without(self.inputs, bad_B)

    def first_dimensions(self) -> list[int]:
        assert self.inputs is not None
        return [self.inputs.shape[0] if self.inputs.dim() > len(self.shape) else -1]

    def per_example(self, *, scale: bool) -> Tensor:
        """(B, numbers in the parameter)."""
        assert self.inputs is not None
        assert self.gradient is not None
        value = self.gradient
        if scale:
            value = value * F.layer_norm(self.inputs, self.shape, eps=self.eps)
        return _positions(value.flatten(-len(self.shape))).sum(1)


@dataclass
class General(Use):
    """Any other operation, one example at a time through torch.func. For small parameters."""

    run: Callable[[Tensor, list[Tensor]], Tensor] | None = None
    """The operation as a function of the parameter and of its batched inputs."""
    parameter: Tensor | None = None
    inputs: tuple[Tensor, ...] = ()

    def drop(self, bad_B: Tensor) -> None:
        super().drop(bad_B)
        self.inputs = tuple(_without(value, bad_B) for value in self.inputs)

    def first_dimensions(self) -> list[int]:
        return [value.shape[0] for value in self.inputs] or [-1]

    def per_example(self) -> Tensor:
        """(B, numbers in the parameter), checked against the gradient of the whole batch."""
        assert self.run is not None
        assert self.parameter is not None
        assert self.gradient is not None
        run, parameter = self.run, self.parameter

        def of_one(gradient: Tensor, *inputs: Tensor) -> Tensor:
            pull = torch.func.vjp(lambda p: run(p, [x[None] for x in inputs]), parameter)[1]
            result: Tensor = pull(gradient[None])[0]
            return result

        try:
            each: Tensor = torch.func.vmap(of_one)(self.gradient, *self.inputs)
        except (RuntimeError, ValueError) as error:
            raise ValueError(self._message("cannot be run one example at a time")) from error
        pull = torch.func.vjp(lambda p: run(p, list(self.inputs)), parameter)[1]
        if not torch.allclose(each.sum(0), pull(self.gradient)[0], rtol=1e-3, atol=1e-5):
            raise ValueError(self._message("mixes the examples of a batch"))
        return each.flatten(1)

    def _message(self, fault: str) -> str:
        return (
            f"Expected operations that treat each example by itself, found {self.what!r}, which "
            f"{fault}. Use nn.Linear, LayerNorm or nn.Embedding."
        )


def operation_name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def weighted_sum(role: str, use: Use, factors_B: Tensor, out: Tensor) -> Tensor:
    """sum_b f_b g_b of one use, into `out`."""
    if isinstance(use, Product):
        return use.weighted_sum(factors_B, out, of_bias=role == "bias")
    if role == "rows" and isinstance(use, Rows):
        ids, g = use.pairs()
        scaled = (g * factors_B[:, None, None]).flatten(0, 1)
        return out.zero_().index_add_(0, ids.flatten(), scaled)
    return out.copy_((factors_B @ per_example(role, use, out)).view_as(out))


def per_example(role: str, use: Use, parameter: Tensor) -> Tensor:
    """Per-example gradients (B, numbers), for parameters small enough."""
    if isinstance(use, Normalised):
        return use.per_example(scale=role == "scale")
    if isinstance(use, General):
        return use.per_example()
    if isinstance(use, Product):
        a, g = use.factors()
        return g.sum(1) if role == "bias" else torch.einsum("bto,bti->boi", g, a).flatten(1)
    assert isinstance(use, Rows)
    ids, g = use.pairs()
    each = g.new_zeros(ids.shape[0], *parameter.shape)
    examples = torch.arange(ids.shape[0], device=ids.device)[:, None].expand_as(ids)
    return each.index_put_((examples, ids), g, accumulate=True).flatten(1)


def outer_square_norm(a: Tensor, g: Tensor) -> Tensor:
    """|| sum_t g_t a_t^T ||^2 for every example, from (B, T, I) and (B, T, O).

    Positions may cancel: not below what rounding may hide, as in `not_below_rounding`.
    """
    positions = a.shape[1]
    floor_B = (a.square().sum(2) * g.square().sum(2)).sum(1).mul_(positions)
    floor_B *= torch.finfo(floor_B.dtype).eps
    if positions * positions <= a.shape[2] * g.shape[2]:  # the T x T Gram matrices are smaller
        return ((a @ a.mT) * (g @ g.mT)).sum((1, 2)).maximum(floor_B)
    return torch.einsum("bto,bti->boi", g, a).square().sum((1, 2)).maximum(floor_B)


def unit_square_norm(a: Tensor, g: Tensor, leader_B: Tensor) -> Tensor:
    """The same for units: the examples of one are positions of a longer example."""
    squares_B = g.new_zeros(len(g))
    first_U, size_U = torch.unique_consecutive(leader_B, return_counts=True)
    for size in size_U.unique().tolist():
        leaders = first_U[size_U == size]
        members = leaders[:, None] + torch.arange(size, device=leaders.device)
        squares_B[leaders] = outer_square_norm(a[members].flatten(1, 2), g[members].flatten(1, 2))
    terms_BT = a.square().sum(2) * g.square().sum(2)
    units_BT = leader_B[:, None].expand_as(terms_BT)
    return not_below_rounding(squares_B, units_BT.flatten(), terms_BT.flatten())


def rows_square_norm(ids: Tensor, g: Tensor, num_rows: int, leader_B: Tensor | None) -> Tensor:
    """Positions of a unit that read one row add up before they are squared."""
    units_B = torch.arange(len(ids), device=ids.device) if leader_B is None else leader_B
    key_L = (units_B[:, None] * num_rows + ids).flatten()
    return row_square_norms(key_L, g.flatten(0, 1), num_rows, len(ids), may_cancel=True)


class _Source(torch.autograd.Function):
    """The beginning of a graph at an output that nothing before it could give a gradient to."""

    @staticmethod
    def forward(ctx: Any, wanted: Tensor, use: Use, output: list[Tensor]) -> Tensor:
        ctx.use = use
        ctx.set_materialize_grads(False)
        return output[0]  # in a list autograd does not take it for an input

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.use.keep(gradients[0])
        return None, None, None


_WANTED = torch.empty(0, requires_grad=True)


def _without(value: Tensor, bad_B: Tensor) -> Tensor:
    return torch.where(bad_B.view(-1, *[1] * (value.dim() - 1)), 0.0, value)


def _positions(value: Tensor) -> Tensor:
    """(B, ..., N) as (B, T, N)."""
    return value[:, None] if value.dim() == 2 else value.flatten(1, -2)

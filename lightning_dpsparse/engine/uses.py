"""How a dense parameter was used, and what each example's gradient on it is, in compact form.

A use is recorded in the forward pass; `gradient` arrives in the backward pass. Per-example
gradients of a weight matrix are never built: they are outer products, and norms and weighted sums
of outer products can be had from their factors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# B examples, T positions of an example, I and O inputs and outputs of a layer


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
            output = output + output.new_zeros((), requires_grad=True)

        def keep(gradient: Tensor) -> None:
            self.gradient = gradient.detach()

        output.register_hook(keep)
        return output

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
    _scaled: tuple[Tensor, Tensor] | None = None

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

    def scaled(self, factors_B: Tensor) -> Tensor:
        """f_b g_b, (B, T, O). Weight and bias of one group share it."""
        if self._scaled is None or self._scaled[0] is not factors_B:
            self._scaled = factors_B, self.factors()[1] * factors_B[:, None, None]
        return self._scaled[1]

    def drop(self, bad_B: Tensor) -> None:
        super().drop(bad_B)
        assert self.inputs is not None
        self.inputs = _without(self.inputs, bad_B)
        self._square_gradient = self._scaled = None

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


def _without(value: Tensor, bad_B: Tensor) -> Tensor:
    return torch.where(bad_B.view(-1, *[1] * (value.dim() - 1)), 0.0, value)


def _positions(value: Tensor) -> Tensor:
    """(B, ..., N) as (B, T, N)."""
    return value[:, None] if value.dim() == 2 else value.flatten(1, -2)


def operation_name(func: Any) -> str:
    return str(getattr(func, "__name__", func))

"""How a dense parameter was used, and what each example's gradient on it is, in compact form.

A use is recorded in the forward pass, and its `gradient` arrives in the backward pass. Per-example
gradients of a weight matrix are sums of outer products, whose norms and weighted sums follow from
their factors (`outer_products.py`).

Read next: `known_calls.py`, which makes these uses; `built_gradients.py`, for all other calls;
`ghost.py`, which clips with them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Self

from lightning_dpsparse.engine.norms import norms_of, row_square_norms
from lightning_dpsparse.engine.outer_products import Positions, outer_sum
from lightning_dpsparse.refused import Refused

# B examples, T positions of an example, R = B * T, I and O inputs and outputs of a layer


@dataclass
class Use(ABC):
    """One call that read a parameter."""

    what: str
    """Name of the operation, for messages."""
    gradient: Tensor | None = None
    """d loss / d output of the call. It stays None if the output never reached the loss."""
    reason: Tensor | None = None
    """A leaf that makes the output require a gradient, if nothing before the output does."""

    def __post_init__(self) -> None:
        self._versions = [value._version for value in self.batched()]

    def check_inputs(self) -> None:
        """Refuse inputs that were written to after the call.

        Autograd does not check this, because it does not compute the weight's gradient.
        """
        if [value._version for value in self.batched()] != self._versions:
            raise Refused(
                f"Expected the inputs of {self.what!r} to stay as they were until the backward "
                "pass, found that they were written to in place. Write to a new tensor: x = x + y, "
                "not x += y."
            )

    def watch(self, output: Tensor) -> Tensor:
        """Make the backward pass leave the output's gradient here. Return the output to use."""
        if not output.requires_grad:  # nothing before it requires one, so a leaf is added
            if not output._is_view():
                started: Tensor = _Source.apply(_WANTED, self, [output])
                return started
            self.reason = output.new_zeros((), requires_grad=True)
            output = output + self.reason
        index = output.output_nr

        def hook(gradients: tuple[Tensor | None, ...]) -> None:
            self.keep(gradients[index])

        # A hook on the tensor does the same and costs three times as much to set up.
        assert output.grad_fn is not None
        output.grad_fn.register_prehook(hook)
        return output

    def keep(self, gradient: Tensor | None) -> None:
        if gradient is not None:  # it is not copied: nobody writes to a gradient that others hold
            self.gradient = whole(gradient.detach() if gradient.requires_grad else gradient)

    def part(self, rows: slice) -> Self:
        """Return the same use by some of the examples."""
        assert self.gradient is not None
        if rows == slice(0, len(self.gradient)):
            return self
        return replace(self, gradient=self.gradient[rows], **self.inputs_of(rows))

    @abstractmethod
    def inputs_of(self, rows: slice) -> dict[str, Any]:
        """Return the fields that hold inputs, with some of the examples."""

    def drop(self, bad_B: Tensor) -> None:
        """Set the gradients and the inputs of some examples to zero."""
        if self.gradient is not None:
            self.gradient = without(self.gradient, bad_B)

    @abstractmethod
    def first_dimensions(self) -> list[int]:
        """Return the first dimension of each input, which must be the batch; -1 if it has none."""

    def batched(self) -> list[Tensor]:
        """Return the tensors that went into the call with examples in the first dimension."""
        return []


@dataclass
class Product(Use):
    """A call of `F.linear`.

    Example b has the gradient sum_t g_bt a_bt^T on the weight, and sum_t g_bt on the bias.
    """

    inputs: Tensor | None = None
    _norm_B: Tensor | None = None

    @property
    def is_flat(self) -> bool:
        """Whether an example has one position, so that its gradient is a single outer product."""
        return self.inputs is not None and self.inputs.dim() == 2

    def flat_square_norm(self, *, of_bias: bool) -> Tensor:
        """Compute ||g||^2 for the bias, or (||g|| ||a||)^2 for the weight.

        If the norm of g or a overflows, it is infinite, and the example counts nothing.
        """
        assert self.inputs is not None
        assert self.gradient is not None
        if self._norm_B is None:  # weight and bias share it
            self._norm_B = norms_of(self.gradient)
        if of_bias:
            return self._norm_B.square()
        return norms_of(self.inputs).mul_(self._norm_B).square_()

    def flat_weighted_sum(self, factors_B: Tensor, out: Tensor, *, of_bias: bool) -> Tensor:
        """Write sum_b f_b g_b a_b^T into `out`, or sum_b f_b g_b for the bias."""
        assert self.inputs is not None
        assert self.gradient is not None
        if of_bias:
            return torch.mv(self.gradient.to(out.dtype).t(), factors_B.to(out.dtype), out=out)
        outer_sum(self.inputs, self.gradient, factors_B, out=out)
        return out

    def drop(self, bad_B: Tensor) -> None:
        super().drop(bad_B)
        assert self.inputs is not None
        self.inputs = without(self.inputs, bad_B)
        self._norm_B = None

    def first_dimensions(self) -> list[int]:
        assert self.inputs is not None
        return [self.inputs.shape[0] if self.inputs.dim() > 1 else -1]

    def batched(self) -> list[Tensor]:
        assert self.inputs is not None
        return [self.inputs]

    def inputs_of(self, rows: slice) -> dict[str, Any]:
        assert self.inputs is not None
        return {"inputs": self.inputs[rows], "_norm_B": None}

    def positions(self) -> Positions:
        assert self.inputs is not None
        return Positions(positions_of(self.inputs), self.gradients())

    def gradients(self) -> Tensor:
        """Return g, (B, T, O)."""
        assert self.gradient is not None
        return positions_of(self.gradient)


@dataclass
class Turned(Product):
    """A product of a batch with a parameter, x @ W: example b has the gradient sum_t a_bt g_bt^T.

    It is that of a linear layer, with a and g in each other's place.
    """

    def flat_weighted_sum(self, factors_B: Tensor, out: Tensor, *, of_bias: bool) -> Tensor:
        assert self.inputs is not None
        assert self.gradient is not None
        outer_sum(self.gradient, self.inputs, factors_B, out=out)
        return out

    def positions(self) -> Positions:
        return Positions(*reversed(super().positions()))


@dataclass
class Convolution(Product):
    """A convolution without groups: a linear layer on the inputs behind every output.

    Sequences are images of one row.
    """

    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    borders: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Number of zeros around an image: left, right, top, bottom."""

    @property
    def is_flat(self) -> bool:
        return False

    def first_dimensions(self) -> list[int]:
        assert self.inputs is not None
        return [self.inputs.shape[0] if self.inputs.dim() == 4 else -1]

    def positions(self) -> Positions:
        assert self.inputs is not None
        padded = F.pad(self.inputs, self.borders)
        patches = F.unfold(padded, self.kernel, dilation=self.dilation, stride=self.stride)
        return Positions(patches.mT, self.gradients())

    def gradients(self) -> Tensor:
        assert self.gradient is not None
        return self.gradient.flatten(2).mT


@dataclass
class Rows(Use):
    """A call of `F.embedding`: on row r, example b has the sum of g over positions that read r."""

    ids: Tensor | None = None
    padding: int | None = None
    """The row that stands for padding. No example's gradient reaches it."""

    def first_dimensions(self) -> list[int]:
        assert self.ids is not None
        return [self.ids.shape[0] if self.ids.dim() else -1]

    def batched(self) -> list[Tensor]:
        assert self.ids is not None
        return [self.ids]

    def inputs_of(self, rows: slice) -> dict[str, Any]:
        assert self.ids is not None
        return {"ids": self.ids[rows]}

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Return ids (B, T) and g (B, T, D)."""
        assert self.ids is not None
        assert self.gradient is not None
        ids = self.ids.flatten(1) if self.ids.dim() > 1 else self.ids[:, None]
        g = positions_of(self.gradient)
        if self.padding is not None:
            g = g.masked_fill((ids == self.padding)[:, :, None], 0.0)
        return ids, g


@dataclass
class Normalised(Use):
    """A call of `F.layer_norm`.

    The gradients on scale and shift are the sums over positions of g x and of g.
    """

    inputs: Tensor | None = None
    shape: tuple[int, ...] = ()
    eps: float = 1e-5

    def drop(self, bad_B: Tensor) -> None:
        super().drop(bad_B)
        assert self.inputs is not None
        self.inputs = without(self.inputs, bad_B)

    def first_dimensions(self) -> list[int]:
        assert self.inputs is not None
        return [self.inputs.shape[0] if self.inputs.dim() > len(self.shape) else -1]

    def batched(self) -> list[Tensor]:
        assert self.inputs is not None
        return [self.inputs]

    def inputs_of(self, rows: slice) -> dict[str, Any]:
        assert self.inputs is not None
        return {"inputs": self.inputs[rows]}

    def terms(self, *, scale: bool) -> Tensor:
        """Compute what each position adds to the gradient, (B, T, numbers in the parameter)."""
        assert self.inputs is not None
        assert self.gradient is not None
        value = self.gradient
        if scale:
            value = value * F.layer_norm(self.inputs, self.shape, eps=self.eps)
        return positions_of(value.flatten(-len(self.shape)))


def whole(value: Tensor) -> Tensor:
    """Return a tensor in float32 at least.

    Inside autocast layers compute in 16 bits, and a norm that is exact to 8 bits would let a
    clipped gradient exceed its bound.
    """
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


def operation_name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def rows_square_norm(
    ids: Tensor, g: Tensor, num_rows: int, first_of_unit_B: Tensor | None
) -> Tensor:
    """Compute the squared norm of every unit's gradient on the rows of an embedding, (B,).

    Positions of a unit that read one row add up before they are squared.
    """
    units_B = (
        torch.arange(len(ids), device=ids.device) if first_of_unit_B is None else first_of_unit_B
    )
    key_L = (units_B[:, None] * num_rows + ids).flatten()
    return row_square_norms(key_L, g.flatten(0, 1), num_rows, len(ids))


class _Source(torch.autograd.Function):
    """Begins a graph at an output that does not require a gradient by itself."""

    @staticmethod
    def forward(ctx: Any, wanted: Tensor, use: Use, output: list[Tensor]) -> Tensor:
        ctx.use = use
        ctx.set_materialize_grads(False)
        return output[0]  # autograd takes no tensor in a list for an input

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.use.keep(gradients[0])
        return None, None, None


_WANTED = torch.empty(0, requires_grad=True)
"""The leaf that a graph begins with if `_Source` begins it."""


def without(value: Tensor, bad_B: Tensor) -> Tensor:
    return torch.where(beside(bad_B, value), 0.0, value)


def beside(each_B: Tensor, value: Tensor) -> Tensor:
    """Give a tensor with one number per example as many dimensions as `value` has."""
    return each_B.view(-1, *[1] * (value.dim() - 1))


def positions_of(value: Tensor) -> Tensor:
    """Reshape (B, ..., N) to (B, T, N)."""
    return value[:, None] if value.dim() == 2 else value.flatten(1, -2)

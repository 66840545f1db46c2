"""Calls whose per-example gradients are known in compact form, and how each is recorded.

A function here runs one call of torch on detached parameters, and notes its inputs as a `Use` of
every parameter that the call reads. Read next: `parameter_calls.py`, what a use can tell;
`recorder.py`, which sends calls here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.utils import _pair, _single

from lightning_dpsparse.engine.parameter_calls import (
    Convolution,
    Normalised,
    Product,
    Rows,
    Turned,
    Use,
    operation_name,
    whole,
)
from lightning_dpsparse.refused import Refused


class Notes(Protocol):
    """What a recorder offers to the functions below."""

    def is_read(self, value: object) -> bool:
        """Whether this is a parameter."""
        ...

    def record(self, parameter: Tensor, role: str, use: Use) -> Tensor:
        """Note the use, and return what the call may read instead of the parameter."""
        ...

    def other(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of which nothing is known."""
        ...


def _linear(notes: Notes, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if weight.dim() != 2:
        out: Tensor = notes.other(F.linear, (input, weight, bias), {})
        return out
    use = Product("linear", inputs=_noted(input))
    weight = notes.record(weight, "weight", use)
    offset = notes.record(bias, "bias", use) if bias is not None else None
    return use.watch(F.linear(input, weight, offset))


def _bilinear(
    notes: Notes, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Run a linear layer on all products of two inputs."""
    products = (input1.unsqueeze(-1) * input2.unsqueeze(-2)).flatten(-2)
    use = Product("bilinear", inputs=_noted(products))
    weight = notes.record(weight, "weight", use).flatten(1)
    offset = notes.record(bias, "bias", use) if bias is not None else None
    return use.watch(F.linear(products, weight, offset))


def _product(func: Callable[..., Tensor], notes: Notes, input: Tensor, other: Tensor) -> Tensor:
    """Run a product of a batch with a matrix that is a parameter, or else any other product."""
    is_turned = notes.is_read(other) and other.dim() == 2
    if not is_turned or notes.is_read(input) or input.dim() < 2:
        out: Tensor = notes.other(func, (input, other), {})
        return out
    use = Turned("matmul", inputs=_noted(input))
    return use.watch(torch.matmul(input, notes.record(other, "weight", use)))


def _embedding(
    notes: Notes,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if max_norm is not None or scale_grad_by_freq:
        raise Refused(
            "Expected F.embedding without max_norm and scale_grad_by_freq, found one of them: "
            "rows would be rewritten by who reads them, or scaled by how many do. Leave it out."
        )
    padding = None if padding_idx is None else padding_idx % len(weight)
    use = Rows("embedding", ids=input, padding=padding)
    return use.watch(F.embedding(input, notes.record(weight, "rows", use)))


def _layer_norm(
    notes: Notes,
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    use = Normalised("layer_norm", inputs=_noted(input), shape=tuple(normalized_shape), eps=eps)
    scale = notes.record(weight, "scale", use) if weight is not None else None
    shift = notes.record(bias, "shift", use) if bias is not None else None
    return use.watch(F.layer_norm(input, normalized_shape, scale, shift, eps))


def _convolution(
    func: Callable[..., Tensor],
    notes: Notes,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    *rest: Any,
    **named: Any,
) -> Tensor:
    settings = (stride, padding, *rest)
    dilation, groups = _dilation_and_groups(*rest, **named)
    if func not in (F.conv1d, F.conv2d) or groups != 1:
        # The bias is added afterwards, so that each call reads one parameter.
        out: Tensor = notes.other(func, (input, weight, None, *settings), named)
        if bias is None:
            return out
        added: Tensor = notes.other(torch.add, (out.movedim(1, -1), bias), {})
        return added.movedim(-1, 1)
    image, kernel, sizes = input, weight.shape[2:], _pair
    if func is F.conv1d:
        image, kernel, sizes = input.unsqueeze(-2), torch.Size((1, *kernel)), _row
        padding = padding if isinstance(padding, str) else _row(padding, above=0)
    use = Convolution(
        operation_name(func),
        inputs=_noted(image),
        kernel=(kernel[0], kernel[1]),
        stride=sizes(stride),
        dilation=sizes(dilation),
        borders=_borders(padding, kernel, sizes(dilation)),
    )
    weight = notes.record(weight, "weight", use)
    offset = notes.record(bias, "bias", use) if bias is not None else None
    return use.watch(func(input, weight, offset, *settings, **named))


def _noted(input: Tensor) -> Tensor:
    """Return an input as it is kept for the backward pass."""
    return whole(input.detach() if input.requires_grad else input)


def _dilation_and_groups(dilation: Any = 1, groups: int = 1, *rest: Any) -> tuple[Any, int]:
    return dilation, groups


def _row(size: Any, above: int = 1) -> tuple[int, int]:
    """A size for sequences as one for images of one row."""
    return above, _single(size)[0]


def _borders(padding: Any, kernel: Any, dilation: Any) -> tuple[int, int, int, int]:
    """Return the number of zeros at the left, right, top and bottom of an image.

    If the number of zeros is odd, `same` puts one more at the right and at the bottom.
    """
    if padding == "same":
        above, left = (d * (k - 1) // 2 for k, d in zip(kernel, dilation))
        below, right = (d * (k - 1) - d * (k - 1) // 2 for k, d in zip(kernel, dilation))
        return left, right, above, below
    high, wide = (0, 0) if padding == "valid" else _pair(padding)
    return wide, wide, high, high


_CONVOLUTIONS = (
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
)
_PRODUCTS = (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)

KNOWN_CALLS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    F.layer_norm: _layer_norm,
    torch.bilinear: _bilinear,
    **{func: partial(_convolution, func) for func in _CONVOLUTIONS},
    **{func: partial(_product, func) for func in _PRODUCTS},
}

"""Records every torch call that reads a dense parameter in a forward pass.

Any module may make the call: `nn.Linear`, a cross network with its own `F.linear`, or two layers
that share a weight. The call runs on a detached parameter, so that the backward pass computes no
weight gradient at all; it only leaves behind the gradient of the call's output.

Read next: `parameter_calls.py`, what is recorded; `ghost.py`, which clips with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.utils import _pair
from torch.overrides import TorchFunctionMode
from typing_extensions import Self

from lightning_dpsparse.engine.parameter_calls import (
    Convolution,
    General,
    Normalised,
    Product,
    Rows,
    Use,
    operation_name,
    whole,
)
from lightning_dpsparse.refused import Refused

T = TypeVar("T", bound=Tensor)

_DATA: Any = Tensor.data.__get__  # type: ignore[attr-defined]

MOST_NUMBERS_PER_EXAMPLE = 1 << 16
"""Parameters up to this size may have their per-example gradients built."""


class Recorder:
    """Records how each parameter is used while it is active. Use it around one forward pass.

    While it is active, parameters belong to a class of their own that sends every torch call on
    them here, and calls without a parameter cost nothing. A use that is not seen leaves a gradient
    in `.grad`, which `check_nothing_escaped` finds.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}
        self._watched = _watched(nn.Parameter, self), _watched(Tensor, self)
        self._all_calls: _AllCalls | None = None
        self.clear()

    def __enter__(self) -> Self:
        if all(type(parameter) is nn.Parameter for parameter in self.parameters.values()):
            for parameter in self.parameters.values():
                parameter.__class__ = self._watched[0]
        else:  # a parameter has a class of its own, which it must keep
            self._all_calls = _AllCalls(self)
            self._all_calls.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._all_calls is not None:
            self._all_calls.__exit__(*error)
            self._all_calls = None
            return
        for parameter in self.parameters.values():
            parameter.__class__ = nn.Parameter
        for part in self._slices.values():
            part.value.__class__ = Tensor

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch call that may read a parameter, and record it.

        Torch calls that are made in here are not recorded again: they go straight to torch.
        """
        if func == _DATA:  # `detach` does the same, but torch counts writes to its result
            return args[0].detach()
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func is F.embedding:
            return self._embedding(*args, **kwargs)
        if func is F.layer_norm:
            return self._layer_norm(*args, **kwargs)
        if func is F.conv2d:
            return self._conv2d(*args, **kwargs)
        return self._other(func, args, kwargs)

    def clear(self) -> None:
        """Forget the calls of a step."""
        self._name = self._names.copy()
        self._uses: dict[str, list[tuple[str, Use]]] = {}
        self._slices: dict[str, Slice] = {}

    def check_nothing_escaped(self) -> None:
        """Refuse a step in which autograd reached a parameter, because a use of it was not seen."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                raise Refused(
                    f"Expected every use of {name!r} to pass through a torch function, found a "
                    "gradient that did not. Do not cache views of parameters between steps."
                )

    def made(self, leaf: Tensor) -> bool:
        """Whether a leaf of the graph is one that recording put there."""
        return any(leaf is use.reason for uses in self._uses.values() for _, use in uses)

    @property
    def path(self) -> tuple[tuple[str, str, str], ...]:
        """The parameters that were read, and how. An ordinary model has the same in every step."""
        return tuple(
            (name, role, use.what) for name, uses in self._uses.items() for role, use in uses
        )

    def recorded(self) -> dict[str, list[tuple[str, Use]]]:
        """Return every call, by the name of the parameter that it read."""
        return self._uses

    def has_gradients(self) -> bool:
        """Whether a backward pass has left gradients here."""
        return any(use.gradient is not None for uses in self._uses.values() for _, use in uses)

    def reads_parameter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a parameter is among the arguments, or in a list among them."""
        given = [*args, *kwargs.values()]
        lists = [value for value in given if type(value) in (list, tuple)]
        return any(id(value) in self._name for values in (given, *lists) for value in values)

    def _record(self, parameter: Tensor, role: str, use: Use) -> Tensor:
        """Note the use, and return what the call may read instead of the parameter."""
        if id(parameter) not in self._name:
            return parameter
        self._uses.setdefault(self._name[id(parameter)], []).append((role, use))
        return parameter.detach()

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        use = Product("linear", inputs=_noted(input))
        weight = self._record(weight, "weight", use)
        offset = self._record(bias, "bias", use) if bias is not None else None
        return use.watch(F.linear(input, weight, offset))

    def _embedding(
        self,
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
        return use.watch(F.embedding(input, self._record(weight, "rows", use)))

    def _layer_norm(
        self,
        input: Tensor,
        normalized_shape: list[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        use = Normalised("layer_norm", inputs=_noted(input), shape=tuple(normalized_shape), eps=eps)
        scale = self._record(weight, "scale", use) if weight is not None else None
        shift = self._record(bias, "shift", use) if bias is not None else None
        return use.watch(F.layer_norm(input, normalized_shape, scale, shift, eps))

    def _conv2d(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        if groups != 1:
            given = (input, weight, bias, stride, padding, dilation, groups)
            output: Tensor = self._other(F.conv2d, given, {})
            return output
        kernel, dilations = (weight.shape[2], weight.shape[3]), _pair(dilation)
        use = Convolution(
            "conv2d",
            inputs=_noted(input),
            kernel=kernel,
            stride=_pair(stride),
            dilation=dilations,
            borders=_borders(padding, kernel, dilations),
        )
        weight = self._record(weight, "weight", use)
        offset = self._record(bias, "bias", use) if bias is not None else None
        return use.watch(F.conv2d(input, weight, offset, stride, padding, dilation))

    def _other(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run any other call, and record it if it is arithmetic on one small parameter."""
        values = [*args, *kwargs.values()]
        batched = [
            v for v in values if isinstance(v, Tensor) and id(v) not in self._name and v.dim()
        ]
        versions = [v._version for v in batched]
        out = func(*args, **kwargs)
        what = operation_name(func)
        made = out if isinstance(out, (list, tuple)) else [out]
        if not any(isinstance(v, Tensor) and v.is_floating_point() for v in made):
            return out
        if func is Tensor.detach:
            return out
        mine = [v for v in values if isinstance(v, Tensor) and id(v) in self._name]
        if what == "__getitem__" and isinstance(args[1], int) and mine:
            return self._slice(args[0], args[1])
        if [v._version for v in batched] != versions:
            raise Refused(
                f"Expected operations that leave their inputs as they are, found {what!r} with "
                f"{[self._name[id(v)] for v in mine]}: its gradient needs the input that it "
                "overwrites. Write the result to a tensor of its own."
            )
        if any(out is v for v in batched):  # `x.to(parameter)` had nothing to do
            return out
        small = len(mine) == 1 and mine[0].numel() <= MOST_NUMBERS_PER_EXAMPLE
        if not small or not batched or not isinstance(out, Tensor) or not out.dim():
            raise Refused(
                "Expected dense parameters in nn.Linear, nn.Conv2d, LayerNorm, nn.Embedding, or in "
                f"arithmetic of up to {MOST_NUMBERS_PER_EXAMPLE:,} numbers with a batch, found "
                f"{what!r} on {[self._name[id(v)] for v in mine] or 'a list of them'}. Rewrite it "
                "with F.linear, or freeze it."
            )
        index = next(i for i, v in enumerate(values) if v is mine[0])
        names = list(kwargs)

        def run(parameter: Tensor, inputs: list[Tensor]) -> Tensor:
            rest = iter(inputs)
            given = [
                parameter if i == index else next(rest) if isinstance(v, Tensor) and v.dim() else v
                for i, v in enumerate(values)
            ]
            positional, named = given[: len(args)], dict(zip(names, given[len(args) :]))
            result: Tensor = func(*positional, **named)
            return result

        inputs = tuple(value.detach() for value in batched)
        use = General(what, run=run, parameter=mine[0].detach(), inputs=inputs)
        return use.watch(run(self._record(mine[0], "general", use), batched))

    def _slice(self, parameter: Tensor, index: int) -> Tensor:
        """Return parameter[index] as a parameter of its own. Different slices never overlap."""
        name = self._name[id(parameter)]
        owner = self._slices.get(name)
        base, above = (owner.base, owner.index) if owner else (name, ())
        where = (*above, index % len(parameter))
        key = f"{name}[{where[-1]}]"
        if key not in self._slices:
            part = Slice(base, where, parameter.detach()[where[-1]])
            if self._all_calls is None:
                part.value.__class__ = self._watched[1]
            self._slices[key] = part
            self._name[id(part.value)] = key
        return self._slices[key].value


def _noted(input: Tensor) -> Tensor:
    """Return an input as it is kept for the backward pass."""
    return whole(input.detach() if input.requires_grad else input)


def _watched(kind: type[T], capture: Recorder) -> type[T]:
    """Make a class of tensors that sends every torch call on them through the capture."""

    class Watched(kind):  # type: ignore[misc, valid-type]
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return kind(*args, **kwargs)  # a copy, by deepcopy for example, is not watched

        @classmethod
        def __torch_function__(
            cls,
            func: Callable[..., Any],
            types: Any,
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                return capture.call(func, args, kwargs or {})

    return Watched


class _AllCalls(TorchFunctionMode):
    """Looks at every torch call, for parameters whose class must stay as it is."""

    def __init__(self, capture: Recorder) -> None:
        super().__init__()
        self._capture = capture

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._capture.reads_parameter(args, kwargs):
            return self._capture.call(func, args, kwargs)
        return func(*args, **kwargs)


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


@dataclass(frozen=True)
class Slice:
    """A slice of a parameter by an integer. It is kept alive so that its `id` stays its own."""

    base: str
    index: tuple[int, ...]
    value: Tensor

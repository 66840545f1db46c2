"""Tensors that a forward pass computes from parameters alone, before any example comes in.

`exp(-s)` in front of a loss, a weight with a mask or with a norm of its own, a table of positions:
layers read them as they read parameters, and an example's gradient on them is known in the same
way. What is clipped is the gradient on the parameters behind them, which follows by the chain rule.

Read next: `recorder.py`, which finds them; `ghost.py`, which applies the chain rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_dpsparse.engine.parameter_calls import operation_name
from lightning_dpsparse.engine.parameter_slices import Slice
from lightning_dpsparse.refused import Refused

Exchange = Mapping[int, Tensor]
"""What to use in place of a tensor, by its `id`."""


@dataclass(frozen=True)
class Call:
    """A call of torch, whose tensors can be exchanged. Those in lists are found, too."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def what(self) -> str:
        """Name of the operation, for messages."""
        return operation_name(self.func)

    def tensors(self) -> Iterator[Tensor]:
        for value in (*self.args, *self.kwargs.values()):
            for part in value if type(value) in (list, tuple) else [value]:
                if isinstance(part, Tensor):
                    yield part

    def run(self, exchange: Exchange, dtype: torch.dtype | None = None) -> Any:
        """Make the call with other tensors. All numbers that are kept are cast to `dtype`."""

        def exchanged(value: Any) -> Any:
            if type(value) in (list, tuple):
                return type(value)(exchanged(part) for part in value)
            if dtype is not None and isinstance(value, Tensor) and id(value) not in exchange:
                return value.detach().to(dtype) if value.is_floating_point() else value
            return exchange.get(id(value), value)

        args = [exchanged(value) for value in self.args]
        kwargs = {name: exchanged(value) for name, value in self.kwargs.items()}
        return self.func(*args, **kwargs)


@dataclass(frozen=True)
class Computed:
    """What a call makes of parameters. It is kept, so that the `id` of its value is its own."""

    call: Call
    parents: Mapping[int, str | Slice | Computed]
    """Where the tensors of the call come from, by `id`: a parameter by name, rows of one, or
    something computed before. All others are the same for every example."""
    value: Tensor
    part: int | None = None
    """Which of the call's results this is; None if there is only one."""
    sources: frozenset[str] = field(init=False)
    """Names of the parameters that it is computed from."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_versions", self._versions_now())
        object.__setattr__(self, "sources", self._find_sources())

    @property
    def what(self) -> str:
        """What it is, for messages."""
        names = sorted(self.sources)
        return f"{self.call.what!r} of {', '.join(map(repr, names))}"

    def check_unchanged(self) -> None:
        """Refuse a call one of whose constants was written to."""
        if self._versions_now() != self._versions:  # type: ignore[attr-defined]
            raise Refused(
                f"Expected what {self.what} reads to stay as it was until the backward pass, found "
                "that it was written to in place. Write to a new tensor."
            )

    def _versions_now(self) -> list[int]:
        return [value._version for value in self.call.tensors()]

    def _find_sources(self) -> frozenset[str]:
        found: set[str] = set()
        for parent in self.parents.values():
            found |= parent.sources if isinstance(parent, Computed) else {_base(parent)}
        return frozenset(found)

    @property
    def is_turned(self) -> bool:
        """Whether it has the numbers of one parameter in another order, or with another sign."""
        if len(self.parents) != 1 or not _keeps_numbers(self.call.func):
            return False
        (read,) = {id(v): v for v in self.call.tensors() if id(v) in self.parents}.values()
        if read.dtype != self.value.dtype or read.numel() != self.value.numel():
            return False  # the bits of a view are other numbers
        (parent,) = self.parents.values()
        return parent.is_turned if isinstance(parent, Computed) else isinstance(parent, str)

    def of(self, values: Mapping[str, Tensor], known: dict[int, Tensor] | None = None) -> Tensor:
        """Compute it from other values of its parameters.

        `known` holds what was computed from them already: many may be made of the same.
        """
        known = {} if known is None else known
        if id(self) not in known:
            exchange = {key: _of(parent, values, known) for key, parent in self.parents.items()}
            first = next(iter(exchange.values()))
            out = self.call.run(exchange, first.dtype)
            known[id(self)] = out if self.part is None else out[self.part]
        return known[id(self)]


def _base(parent: str | Slice) -> str:
    return parent if isinstance(parent, str) else parent.base


def _of(
    parent: str | Slice | Computed, values: Mapping[str, Tensor], known: dict[int, Tensor]
) -> Tensor:
    if isinstance(parent, Computed):
        return parent.of(values, known)
    return values[parent] if isinstance(parent, str) else values[parent.base][parent.index]


def _keeps_numbers(func: Callable[..., Any]) -> bool:
    return func in (_T, _MT) or getattr(func, "__name__", "") in _TURNS


_T: Any = Tensor.T.__get__  # type: ignore[attr-defined]
_MT: Any = Tensor.mT.__get__  # type: ignore[attr-defined]
_TURNS = {
    "__neg__",
    "clone",
    "contiguous",
    "flatten",
    "movedim",
    "neg",
    "permute",
    "reshape",
    "squeeze",
    "swapaxes",
    "t",
    "transpose",
    "unsqueeze",
    "view",
}

_SPREADS = {Tensor.expand, Tensor.repeat, Tensor.broadcast_to, torch.broadcast_to, torch.tile}


def copies_of(call: Call) -> int | None:
    """How many copies a call makes of a whole parameter, cls.expand(B, -1, -1) say, if it does."""
    if call.func not in _SPREADS or not isinstance(call.args[0], Tensor):
        return None
    sizes, dims = sizes_of(call), call.args[0].dim()
    if len(sizes) < dims or (len(sizes) == dims and (not dims or len(call.args[0]) > 1)):
        return None
    return int(sizes[0])


def sizes_of(call: Call) -> list[int]:
    """The sizes that such a call was given, one by one or in a list."""
    rest = call.args[1:]
    return list(rest[0]) if len(rest) == 1 and not isinstance(rest[0], int) else list(rest)


def spread(call: Call) -> Callable[[Tensor, list[Tensor]], Tensor]:
    """The same as a function of the parameter and of something with as many rows as copies."""

    def run(parameter: Tensor, like: list[Tensor]) -> Tensor:
        copies: Tensor = call.func(parameter, (len(like[0]), *sizes_of(call)[1:]))
        return copies

    return run

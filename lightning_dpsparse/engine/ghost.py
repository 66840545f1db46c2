"""Per-example or per-user norms and clipped sums of dense layers from one backward pass.

`DenseCapture` watches every torch call of the forward pass that reads a dense parameter, whatever
module makes it: `nn.Linear`, a cross network's own `F.linear`, a weight that two layers share. The
call runs on a detached parameter, so that the backward pass computes no weight gradient at all; it
only leaves behind the gradient of the call's output. Norms come from these, and once the clip
factors are known, so does the clipped sum: one matrix product per layer, the work of the ordinary
weight gradient.

References: Goodfellow 2015 (arXiv:1510.01799); Li et al. 2022, ghost clipping (arXiv:2110.05679);
Bu et al. 2023, book-keeping (arXiv:2210.00038).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_dpsparse.engine.uses import (
    General,
    Normalised,
    Product,
    Rows,
    Use,
    operation_name,
    outer_square_norm,
    per_example,
    rows_square_norm,
    unit_square_norm,
    weighted_sum,
)

T = TypeVar("T", bound=Tensor)

# B examples

MOST_NUMBERS_PER_EXAMPLE = 1 << 16
"""Parameters up to this size may have their per-example gradients built."""

_REFUSED = {
    nn.modules.batchnorm._BatchNorm: "mixes the examples of a batch. Use LayerNorm",
    nn.RNNBase: "hides its steps in one kernel. Build it from nn.Linear",
    nn.MultiheadAttention: "hides its products in one call. Build attention from nn.Linear",
}


def check_layers(module: nn.Module) -> None:
    """Refuse layers whose per-example gradients do not exist or cannot be seen."""
    for path, layer in module.named_modules():
        for kind, fault in _REFUSED.items():
            if isinstance(layer, kind):
                raise ValueError(
                    f"Expected layers that treat each example by itself, found "
                    f"{type(layer).__name__} at {path!r}, which {fault}."
                )


class DenseCapture:
    """Records how each parameter is used while it is active. Use it around one forward pass.

    While it is active, parameters belong to a class of their own that sends every torch call on
    them here, and calls without a parameter cost nothing. What gets past it ends in `.grad`.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}
        self._watched = _watched(nn.Parameter, self), _watched(Tensor, self)
        self._all_calls: _AllCalls | None = None
        self._pieces: tuple[Tensor, dict[str, Tensor]] | None = None
        self.clear()

    def __enter__(self) -> DenseCapture:
        if all(type(parameter) is nn.Parameter for parameter in self.parameters.values()):
            for parameter in self.parameters.values():
                parameter.__class__ = self._watched[0]
        else:  # a class with ways of its own, which it keeps
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
        """A torch call that may read a parameter. Everything in here goes straight to torch."""
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func is F.embedding:
            return self._embedding(*args, **kwargs)
        if func is F.layer_norm:
            return self._layer_norm(*args, **kwargs)
        return self._other(func, args, kwargs)

    def clear(self) -> None:
        """Forget a step."""
        self._name = self._names.copy()
        self._uses: dict[str, list[tuple[str, Use]]] = {}
        self._slices: dict[str, _Slice] = {}

    def square_norms(
        self, num_examples: int, leader_B: Tensor | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, squared norms (B,)) of every parameter that took part.

        A parameter that was read in slices comes up once for each of them. With `leader_B`, the
        first example of every example's unit, norms are those of a unit's summed gradient: they
        stand at the leaders, and all other examples have zero.
        """
        for name in self._uses:
            live = self._live(name, num_examples)
            if live:
                base = self._slices[name].base if name in self._slices else name
                yield base, self._square_norm(name, live, leader_B)

    def new_flat(self) -> Tensor:
        """Memory for a gradient of all parameters, end to end."""
        first = next(iter(self.parameters.values()), torch.empty(0))
        return first.new_empty(sum(parameter.numel() for parameter in self.parameters.values()))

    def pieces(self, flat: Tensor) -> dict[str, Tensor]:
        """Each parameter's part of it."""
        if self._pieces is None or self._pieces[0] is not flat:  # mostly the same memory again
            parts = flat.split([parameter.numel() for parameter in self.parameters.values()])
            named = zip(self.parameters.items(), parts)
            self._pieces = flat, {name: part.view_as(p) for (name, p), part in named}
        return self._pieces[1]

    def clipped_sum(self, name: str, factors_B: Tensor, out: Tensor) -> Tensor:
        """sum_b f_b g_b for one parameter, into `out`; zero if no example touched it."""
        live = self._reached(name)
        if len(live) == 1:
            return weighted_sum(*live[0], factors_B, out)
        out.zero_()
        for role, use in live:
            out += weighted_sum(role, use, factors_B, torch.empty_like(out))
        for key, part in self._slices.items():
            if part.base == name:
                for role, use in self._reached(key):
                    out[part.index] += weighted_sum(
                        role, use, factors_B, torch.empty_like(part.value)
                    )
        return out

    def drop_examples(self, bad_B: Tensor) -> None:
        """Leave out examples whose gradient is not finite: zero times infinity is not zero."""
        recorded = {id(use): use for uses in self._uses.values() for _, use in uses}
        for use in recorded.values():
            use.drop(bad_B)

    def check_nothing_escaped(self) -> None:
        """Every use must have been seen: autograd itself may not have reached a parameter."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                raise ValueError(
                    f"Expected every use of {name!r} to pass through a torch function, found a "
                    "gradient that did not. Do not cache views of parameters between steps."
                )

    # ---- recording ------------------------------------------------------------------------------

    def reads_parameter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a parameter is among the arguments, or in a list among them."""
        given = [*args, *kwargs.values()]
        lists = [value for value in given if type(value) in (list, tuple)]
        return any(id(value) in self._name for values in (given, *lists) for value in values)

    def _record(self, parameter: Tensor, role: str, use: Use) -> Tensor:
        """Note the use, and hand back what the call may read instead of the parameter."""
        if id(parameter) not in self._name:
            return parameter
        self._uses.setdefault(self._name[id(parameter)], []).append((role, use))
        return parameter.detach()

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        use = Product("linear", inputs=input.detach() if input.requires_grad else input)
        weight = self._record(weight, "weight", use)
        offset = self._record(bias, "bias", use) if bias is not None else None
        return use.watch(F.linear(input, weight, offset))

    def _embedding(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        use = Rows("embedding", ids=input)
        return use.watch(F.embedding(input, self._record(weight, "rows", use), *args, **kwargs))

    def _layer_norm(
        self,
        input: Tensor,
        normalized_shape: list[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        use = Normalised(
            "layer_norm", inputs=input.detach(), shape=tuple(normalized_shape), eps=eps
        )
        scale = self._record(weight, "scale", use) if weight is not None else None
        shift = self._record(bias, "shift", use) if bias is not None else None
        return use.watch(F.layer_norm(input, normalized_shape, scale, shift, eps))

    def _other(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Sizes, devices and the like pass; arithmetic on one small parameter is recorded."""
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
        if func in (Tensor.detach, Tensor.data.__get__):  # type: ignore[attr-defined]
            return out
        mine = [v for v in values if isinstance(v, Tensor) and id(v) in self._name]
        if what == "__getitem__" and isinstance(args[1], int) and mine:
            return self._slice(args[0], args[1])
        if [v._version for v in batched] != versions:
            raise ValueError(
                f"Expected operations that leave their inputs as they are, found {what!r} with "
                f"{[self._name[id(v)] for v in mine]}: its gradient needs the input that it "
                "overwrites. Write the result to a tensor of its own."
            )
        if any(out is v for v in batched):  # `x.to(parameter)` had nothing to do
            return out
        small = len(mine) == 1 and mine[0].numel() <= MOST_NUMBERS_PER_EXAMPLE
        if not small or not batched or not isinstance(out, Tensor) or not out.dim():
            raise ValueError(
                "Expected dense parameters in nn.Linear, LayerNorm, nn.Embedding, or in arithmetic "
                f"of up to {MOST_NUMBERS_PER_EXAMPLE:,} numbers with a batch, found {what!r} on "
                f"{[self._name[id(v)] for v in mine] or 'a list of them'}. Rewrite it with "
                "F.linear, or freeze it."
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
        """parameter[index] as a parameter of its own. Distinct integers never overlap."""
        name = self._name[id(parameter)]
        owner = self._slices.get(name)
        base, above = (owner.base, owner.index) if owner else (name, ())
        where = (*above, index % len(parameter))
        key = f"{name}[{where[-1]}]"
        if key not in self._slices:
            part = _Slice(base, where, parameter.detach()[where[-1]])
            if self._all_calls is None:
                part.value.__class__ = self._watched[1]
            self._slices[key] = part
            self._name[id(part.value)] = key
        return self._slices[key].value

    # ---- norms and sums -------------------------------------------------------------------------

    def _reached(self, name: str) -> list[tuple[str, Use]]:
        """Uses that reached the loss."""
        return [pair for pair in self._uses.get(name, ()) if pair[1].gradient is not None]

    def _live(self, name: str, num_examples: int) -> list[tuple[str, Use]]:
        """The same, each with the batch in front."""
        live = self._reached(name)
        for _, use in live:
            assert use.gradient is not None
            found = {*use.first_dimensions(), use.gradient.shape[0]}
            if found != {num_examples}:
                raise ValueError(
                    f"Expected the batch of {num_examples} examples as the first dimension of "
                    f"{use.what!r} on {name!r}, found sizes {sorted(found)}. Keep examples in the "
                    "first dimension, and let no layer run without them."
                )
        if live and any(key.startswith(f"{name}[") and key in self._uses for key in self._slices):
            raise ValueError(f"Expected {name!r} read whole or in slices, found both.")
        return live

    def _square_norm(
        self, name: str, uses: list[tuple[str, Use]], leader_B: Tensor | None
    ) -> Tensor:
        parameter = self._slices[name].value if name in self._slices else self.parameters[name]
        roles = {role for role, _ in uses}
        first = uses[0][1]
        if leader_B is None and len(uses) == 1 and isinstance(first, Product) and first.is_flat:
            return first.flat_square_norm(of_bias=roles == {"bias"})
        if roles == {"weight"}:
            pairs = [use.factors() for _, use in uses if isinstance(use, Product)]
            a, g = (torch.cat(side, dim=1) for side in zip(*pairs))
            return outer_square_norm(a, g) if leader_B is None else unit_square_norm(a, g, leader_B)
        if roles == {"rows"}:
            pairs = [use.pairs() for _, use in uses if isinstance(use, Rows)]
            ids, g = (torch.cat(side, dim=1) for side in zip(*pairs))
            return rows_square_norm(ids, g, len(parameter), leader_B)
        if parameter.numel() > MOST_NUMBERS_PER_EXAMPLE and len(roles) > 1:
            raise ValueError(
                f"Expected {name!r} ({parameter.numel():,} numbers) in one kind of layer, found "
                f"{sorted(use.what for _, use in uses)}. Give each layer a weight of its own."
            )
        total = sum(per_example(role, use, parameter) for role, use in uses)
        assert isinstance(total, Tensor)
        if leader_B is None:
            return total.square().sum(1)
        # The whole parameter is one row, on which a unit's examples meet.
        return rows_square_norm(torch.zeros_like(leader_B)[:, None], total[:, None], 1, leader_B)


def _watched(kind: type[T], capture: DenseCapture) -> type[T]:
    """A class of tensors that has every torch call on them pass through the capture."""

    class Watched(kind):  # type: ignore[misc, valid-type]
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return kind(*args, **kwargs)  # deepcopy's, say: a copy is nobody's parameter

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
    """Looks at every torch call there is, for parameters whose class must stay as it is."""

    def __init__(self, capture: DenseCapture) -> None:
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


@dataclass(frozen=True)
class _Slice:
    """An integer index into a parameter, kept alive so that its identity stays its own."""

    base: str
    index: tuple[int, ...]
    value: Tensor

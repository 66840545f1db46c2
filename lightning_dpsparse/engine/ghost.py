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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_dpsparse.engine.norms import not_below_rounding, row_square_norms
from lightning_dpsparse.engine.uses import (
    General,
    Normalised,
    Product,
    Rows,
    Use,
    operation_name,
)

# B examples, T positions of an example, I and O inputs and outputs, D width of a row

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


class DenseCapture(TorchFunctionMode):
    """Records how each parameter is used while it is active. Use it around one forward pass."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.parameters = dict(parameters)
        self._pieces: tuple[Tensor, dict[str, Tensor]] | None = None
        self.clear()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not self._is_mine(args, kwargs) or not torch.is_grad_enabled():
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
        self._name = {id(parameter): name for name, parameter in self.parameters.items()}
        self._uses: dict[str, list[tuple[str, Use]]] = {name: [] for name in self.parameters}
        self._slices: dict[str, _Slice] = {}

    def square_norms(
        self, num_examples: int, leader_B: Tensor | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, squared norms (B,)) of every parameter that took part.

        A parameter that was read in slices comes up once for each of them. With `leader_B`, the
        first example of every example's unit, norms are those of a unit's summed gradient: they
        stand at the leaders, and all other examples have zero.
        """
        for name, uses in self._uses.items():
            live = self._live(name, uses, num_examples)
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
        live = [(role, use) for role, use in self._uses[name] if use.gradient is not None]
        if len(live) == 1:
            return _weighted(*live[0], factors_B, out)
        out.zero_()
        for role, use in live:
            out += _weighted(role, use, factors_B, torch.empty_like(out))
        for key, part in self._slices.items():
            if part.base == name:
                for role, use in self._uses[key]:
                    if use.gradient is not None:
                        out[part.index] += _weighted(
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

    def _is_mine(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a parameter is among the arguments. Asked of every torch call: keep it quick."""
        names = self._name
        for value in args:
            if id(value) in names:
                return True
            if type(value) in (list, tuple) and any(id(v) in names for v in value):
                return True
        return bool(kwargs) and self._is_mine(tuple(kwargs.values()), {})

    def _record(self, parameter: Tensor, role: str, use: Use) -> Tensor:
        """Note the use, and hand back what the call may read instead of the parameter."""
        if id(parameter) not in self._name:
            return parameter
        self._uses[self._name[id(parameter)]].append((role, use))
        return parameter.detach()

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        use = Product("linear", inputs=input.detach())
        weight = self._record(weight, "weight", use)
        offset = self._record(bias, "bias", use) if bias is not None else None
        if not input.requires_grad and not weight.requires_grad:
            # A gradient must reach the output though nothing before it wants one: a bias is cheap.
            offset = weight.new_zeros(weight.shape[0]) if offset is None else offset.detach()
            offset.requires_grad_()
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
        out = func(*args, **kwargs)
        what = operation_name(func)
        made = out if isinstance(out, (list, tuple)) else [out]
        if not any(isinstance(v, Tensor) and v.is_floating_point() for v in made):
            return out
        if func in (Tensor.detach, Tensor.data.__get__):  # type: ignore[attr-defined]
            return out
        values = [*args, *kwargs.values()]
        mine = [v for v in values if isinstance(v, Tensor) and id(v) in self._name]
        if what == "__getitem__" and isinstance(args[1], int) and mine:
            return self._slice(args[0], args[1])
        batched = [
            v for v in values if isinstance(v, Tensor) and id(v) not in self._name and v.dim()
        ]
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
            self._slices[key], self._uses[key] = part, []
            self._name[id(part.value)] = key
        return self._slices[key].value

    # ---- norms and sums -------------------------------------------------------------------------

    def _live(
        self, name: str, uses: list[tuple[str, Use]], num_examples: int
    ) -> list[tuple[str, Use]]:
        """Uses that reached the loss, each with the batch in front."""
        live = [(role, use) for role, use in uses if use.gradient is not None]
        for _, use in live:
            assert use.gradient is not None
            found = {*use.first_dimensions(), use.gradient.shape[0]}
            if found != {num_examples}:
                raise ValueError(
                    f"Expected the batch of {num_examples} examples as the first dimension of "
                    f"{use.what!r} on {name!r}, found sizes {sorted(found)}. Keep examples in the "
                    "first dimension, and let no layer run without them."
                )
        if live and any(key.startswith(f"{name}[") and self._uses[key] for key in self._slices):
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
            return _outer_square_norm(a, g) if leader_B is None else _by_unit(a, g, leader_B)
        if roles == {"rows"}:
            pairs = [use.pairs() for _, use in uses if isinstance(use, Rows)]
            ids, g = (torch.cat(side, dim=1) for side in zip(*pairs))
            return _row_square_norm(ids, g, len(parameter), leader_B)
        if parameter.numel() > MOST_NUMBERS_PER_EXAMPLE and len(roles) > 1:
            raise ValueError(
                f"Expected {name!r} ({parameter.numel():,} numbers) in one kind of layer, found "
                f"{sorted(use.what for _, use in uses)}. Give each layer a weight of its own."
            )
        total = sum(_per_example(role, use, parameter) for role, use in uses)
        assert isinstance(total, Tensor)
        if leader_B is None:
            return total.square().sum(1)
        # The whole parameter is one row, on which a unit's examples meet.
        return _row_square_norm(torch.zeros_like(leader_B)[:, None], total[:, None], 1, leader_B)


@dataclass(frozen=True)
class _Slice:
    """An integer index into a parameter, kept alive so that its identity stays its own."""

    base: str
    index: tuple[int, ...]
    value: Tensor


def _weighted(role: str, use: Use, factors_B: Tensor, out: Tensor) -> Tensor:
    """sum_b f_b g_b of one use, into `out`."""
    if isinstance(use, Product):
        scaled = use.scaled(factors_B).flatten(0, 1)
        if role == "bias":
            return torch.sum(scaled, 0, out=out)
        return torch.mm(scaled.T, use.factors()[0].flatten(0, 1), out=out)
    if role == "rows" and isinstance(use, Rows):
        ids, g = use.pairs()
        scaled = (g * factors_B[:, None, None]).flatten(0, 1)
        return out.zero_().index_add_(0, ids.flatten(), scaled)
    return out.copy_((factors_B @ _per_example(role, use, out)).view_as(out))


def _per_example(role: str, use: Use, parameter: Tensor) -> Tensor:
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


def _outer_square_norm(a: Tensor, g: Tensor) -> Tensor:
    """|| sum_t g_t a_t^T ||^2 for every example, from (B, T, I) and (B, T, O)."""
    positions = a.shape[1]
    if positions * positions <= a.shape[2] * g.shape[2]:
        # The T x T Gram matrices are smaller. Where positions cancel, rounding may go below zero.
        return ((a @ a.mT) * (g @ g.mT)).sum((1, 2)).clamp_min(0.0)
    return torch.einsum("bto,bti->boi", g, a).square().sum((1, 2))


def _by_unit(a: Tensor, g: Tensor, leader_B: Tensor) -> Tensor:
    """The same for units: the examples of one are positions of a longer example."""
    squares_B = g.new_zeros(len(g))
    first_U, size_U = torch.unique_consecutive(leader_B, return_counts=True)
    for size in size_U.unique().tolist():
        leaders = first_U[size_U == size]
        members = leaders[:, None] + torch.arange(size, device=leaders.device)
        squares_B[leaders] = _outer_square_norm(a[members].flatten(1, 2), g[members].flatten(1, 2))
    terms_BT = a.square().sum(2) * g.square().sum(2)
    units_BT = leader_B[:, None].expand_as(terms_BT)
    return not_below_rounding(squares_B, units_BT.flatten(), terms_BT.flatten())


def _row_square_norm(ids: Tensor, g: Tensor, num_rows: int, leader_B: Tensor | None) -> Tensor:
    """Positions of a unit that read one row add up before they are squared."""
    units_B = torch.arange(len(ids), device=ids.device) if leader_B is None else leader_B
    key_L = (units_B[:, None] * num_rows + ids).flatten()
    return row_square_norms(
        key_L, g.flatten(0, 1), num_rows, len(ids), of_units=leader_B is not None
    )

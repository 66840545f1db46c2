"""Per-example or per-user norms and clipped sums of dense layers from one backward pass.

Clipping needs the norm of every example's gradient, and building these gradients would take a copy
of the dense layers per example. The recorder (`recorder.py`) keeps, for every call that read a
parameter, its inputs and the gradient of its output. Norms are computed from these, and so is the
clipped sum once the clip factors are known: it takes one matrix product per layer, which is the
work of the ordinary weight gradient.

References: Goodfellow 2015 (arXiv:1510.01799); Li et al. 2022, ghost clipping (arXiv:2110.05679);
Bu et al. 2023, book-keeping (arXiv:2210.00038).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_dpsparse.engine.dense import Form
from lightning_dpsparse.engine.norms import not_below_rounding
from lightning_dpsparse.engine.outer_products import (
    Positions,
    by_position,
    outer_sum,
    weight_square_norm,
)
from lightning_dpsparse.engine.parameter_calls import (
    Product,
    Rows,
    Use,
    built,
    rows_square_norm,
)
from lightning_dpsparse.engine.recorder import MOST_NUMBERS_PER_EXAMPLE, Recorder
from lightning_dpsparse.refused import Refused

# B examples

_REFUSED = {
    nn.modules.batchnorm._BatchNorm: "mixes the examples of a batch. Use LayerNorm",
    nn.RNNBase: "hides its steps in one kernel. Build it from nn.Linear",
    nn.MultiheadAttention: "hides its products in one call. Build attention from nn.Linear",
}


def check_layers(module: nn.Module) -> None:
    """Refuse layers whose per-example gradients do not exist or cannot be seen."""
    for path, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
            _check_embedding(path, layer)
        for name, parameter in layer.named_parameters(recurse=False):
            if is_lazy(parameter):
                raise Refused(
                    f"Expected parameters of known shape, found {name!r} of {path!r} still to be "
                    "made by a first pass. Give the layer its sizes."
                )
        for kind, fault in _REFUSED.items():
            if isinstance(layer, kind):
                raise Refused(
                    f"Expected layers that treat each example by itself, found "
                    f"{type(layer).__name__} at {path!r}, which {fault}."
                )


def _check_embedding(path: str, layer: nn.Embedding | nn.EmbeddingBag) -> None:
    if layer.max_norm is not None:
        raise Refused(
            f"Expected no max_norm in {type(layer).__name__} at {path!r}, found {layer.max_norm}: "
            "rows that are read would be written to in the forward pass, and tell which they "
            "were. Leave it out."
        )
    if layer.scale_grad_by_freq:
        raise Refused(
            f"Expected scale_grad_by_freq=False in {type(layer).__name__} at {path!r}, found True: "
            "an example's gradient would depend on how many others read its rows. Leave it out."
        )


def padding_rows(module: nn.Module) -> list[tuple[Tensor, int]]:
    """Return every row that stands for padding, and so never learns, with its table's weight."""
    return [
        (layer.weight, layer.padding_idx)
        for layer in module.modules()
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.padding_idx is not None
    ]


class DenseCapture(Recorder):
    """Knows every example's dense gradient after one forward and backward pass.

    A parameter is clipped and released in its own numbers, or in those of its form (dense.py).
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(parameters)
        self._forms: dict[str, Form] = {}
        self._pieces: tuple[Tensor, dict[str, Tensor]] | None = None

    def set_forms(self, forms: Mapping[str, Form]) -> None:
        """Set the forms of a step, before its first forward pass.

        Parameters without a form are released as they are.
        """
        self._forms = dict(forms)
        if forms:
            self._pieces = None

    def square_norms(
        self, num_examples: int, first_of_unit_B: Tensor | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, squared norms (B,)) of what is released of every parameter that took part.

        A parameter that was read in slices comes up once for each slice. With `first_of_unit_B`,
        the first example of every example's unit, norms are those of a unit's summed gradient: they
        stand at the first example of the unit, and all other examples have zero.
        """
        for name in self._uses:
            live = self._live(name, num_examples)
            if live:
                base = self._slices[name].base if name in self._slices else name
                yield base, self._square_norm(name, live, first_of_unit_B)

    @property
    def size(self) -> int:
        """Number of numbers that a step releases of all parameters together."""
        return sum(self._sizes())

    def new_flat(self) -> Tensor:
        """Return new memory for what is released of all parameters, end to end."""
        first = next(iter(self.parameters.values()), torch.empty(0))
        return first.new_empty(self.size)

    def pieces(self, flat: Tensor) -> dict[str, Tensor]:
        """Return each parameter's part of `flat`, which has the size of `new_flat`."""
        if self._pieces is None or self._pieces[0] is not flat:  # the memory is mostly the same
            named = zip(self.parameters.items(), flat.split(self._sizes()))
            self._pieces = (
                flat,
                {n: part if n in self._forms else part.view_as(p) for (n, p), part in named},
            )
        return self._pieces[1]

    def gradients(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield every parameter with the gradient that was released of it."""
        for name, piece in self.pieces(flat).items():
            parameter, form = self.parameters[name], self._forms.get(name)
            yield parameter, piece if form is None else form.rebuild(piece).view_as(parameter)

    def clipped_sum(self, name: str, factors_B: Tensor, out: Tensor) -> Tensor:
        """Write sum_b f_b g_b for one parameter into `out`; zero if no example touched it."""
        live = self._reached(name)
        if live and name in self._forms:
            self._forms[name].weighted_sum(_positions(live), factors_B, out)
            return out
        _weighted_sum(live, factors_B, out)
        for key, part in self._slices.items():
            if part.base == name:
                piece = torch.empty_like(part.value)
                out[part.index] += _weighted_sum(self._reached(key), factors_B, piece)
        return out

    def drop_examples(self, bad_B: Tensor) -> None:
        """Leave out examples whose gradient is not finite: zero times infinity is not zero."""
        recorded = {id(use): use for uses in self._uses.values() for _, use in uses}
        for use in recorded.values():
            use.drop(bad_B)

    def _sizes(self) -> list[int]:
        return [
            self._forms[name].size if name in self._forms else parameter.numel()
            for name, parameter in self.parameters.items()
        ]

    def _reached(self, name: str) -> list[tuple[str, Use]]:
        """Return the uses of a parameter whose outputs reached the loss."""
        return [pair for pair in self._uses.get(name, ()) if pair[1].gradient is not None]

    def _live(self, name: str, num_examples: int) -> list[tuple[str, Use]]:
        """Return the uses that reached the loss, after a check that each has the batch in front."""
        live = self._reached(name)
        for _, use in live:
            assert use.gradient is not None
            use.check_inputs()
            found = {*use.first_dimensions(), use.gradient.shape[0]}
            if found != {num_examples}:
                raise Refused(
                    f"Expected the batch of {num_examples} examples as the first dimension of "
                    f"{use.what!r} on {name!r}, found sizes {sorted(found)}. Keep examples in the "
                    "first dimension, and let no layer run without them."
                )
        if live and any(key.startswith(f"{name}[") and key in self._uses for key in self._slices):
            raise Refused(
                f"Expected {name!r} read whole or in slices, found both. Read it in one way."
            )
        return live

    def _square_norm(
        self, name: str, uses: list[tuple[str, Use]], first_of_unit_B: Tensor | None
    ) -> Tensor:
        parameter = self._slices[name].value if name in self._slices else self.parameters[name]
        roles = {role for role, _ in uses}
        base = self._slices[name].base if name in self._slices else name
        if base in self._forms and (roles != {"weight"} or base != name):
            raise Refused(
                f"Expected {base!r} to be the weight of linear layers or convolutions and nothing "
                f"else, found {sorted({use.what for _, use in uses})}. Exclude it in the plan's "
                "`dense`."
            )
        if name in self._forms:
            return self._forms[name].square_norms(_positions(uses), first_of_unit_B)
        flat = _flat(uses)
        if first_of_unit_B is None and flat is not None:
            return flat.flat_square_norm(of_bias=roles == {"bias"})
        if roles == {"weight"}:
            return weight_square_norm(_positions(uses), first_of_unit_B)
        if roles == {"rows"}:
            return rows_square_norm(*_pairs(uses), len(parameter), first_of_unit_B)
        if parameter.numel() > MOST_NUMBERS_PER_EXAMPLE and len(roles) > 1:
            raise Refused(
                f"Expected {name!r} ({parameter.numel():,} numbers) in one kind of layer, found "
                f"{sorted(use.what for _, use in uses)}. Give each layer a weight of its own."
            )
        total_BN, terms = built(uses, parameter)
        if first_of_unit_B is not None:
            total_BN = total_BN.double()
            total_BN = torch.zeros_like(total_BN).index_add_(0, first_of_unit_B, total_BN)
        squares_B, *terms_BT = (
            torch.linalg.vector_norm(value, dim=-1).to(total_BN.dtype).square_()
            for value in (total_BN, *terms)
        )
        return not_below_rounding(squares_B, torch.cat(terms_BT, dim=1), first_of_unit_B).to(
            parameter.dtype
        )


def _weighted_sum(uses: list[tuple[str, Use]], factors_B: Tensor, out: Tensor) -> Tensor:
    """Write sum_b f_b g_b over all these uses of one parameter into `out`.

    The terms of an example or user may cancel. They are added to each other before other terms are,
    or directly one after another, so that little is lost to rounding: see `not_below_rounding`.
    """
    roles, flat = {role for role, _ in uses}, _flat(uses)
    if not uses:
        out.zero_()
    elif flat is not None:
        flat.flat_weighted_sum(factors_B, out, of_bias=roles == {"bias"})
    elif roles == {"weight"}:
        outer_sum(*by_position(_positions(uses), factors_B), out=out.flatten(1))
    elif roles == {"rows"}:
        ids, g = _pairs(uses)
        scaled = (g * factors_B[:, None, None]).flatten(0, 1)
        out.zero_().index_add_(0, ids.flatten(), scaled)
    else:
        out.copy_((factors_B @ built(uses, out)[0]).view_as(out))
    return out


def _flat(uses: list[tuple[str, Use]]) -> Product | None:
    """Return the use, if it is the only one and has one position per example."""
    first = uses[0][1] if len(uses) == 1 else None
    return first if isinstance(first, Product) and first.is_flat else None


def _positions(uses: list[tuple[str, Use]]) -> Positions:
    """Join the positions of all uses, whose gradients add up before they are squared."""
    each = [use.positions() for _, use in uses if isinstance(use, Product)]
    return each[0] if len(each) == 1 else Positions(*_joined(each))


def _pairs(uses: list[tuple[str, Use]]) -> tuple[Tensor, Tensor]:
    """Join the ids and the gradients of all uses that read rows."""
    ids, g = _joined([use.pairs() for _, use in uses if isinstance(use, Rows)])
    return ids, g


def _joined(each: Sequence[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
    return (torch.cat(side, dim=1) for side in zip(*each))

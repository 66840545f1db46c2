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

from lightning_dpsparse.engine.constants import Constants
from lightning_dpsparse.engine.dense import Form
from lightning_dpsparse.engine.indirect_reads import indirect_reads
from lightning_dpsparse.engine.parameter_calls import Use
from lightning_dpsparse.engine.parameter_slices import Slice
from lightning_dpsparse.engine.recorder import Recorder
from lightning_dpsparse.engine.use_norms import joined_positions, square_norm, weighted_sum
from lightning_dpsparse.refused import Refused

# B examples

_REFUSED = {
    nn.modules.batchnorm._BatchNorm: "mixes the examples of a batch. Use LayerNorm",
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
        if type(layer).__name__ == "OptimizedModule" or layer._compiled_call_impl is not None:
            raise Refused(
                f"Expected layers that run as they are written, found {path or 'the module'!r} "
                "compiled: calls on its parameters cannot be seen. Leave torch.compile out."
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

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], constants: Constants | None = None
    ) -> None:
        super().__init__(parameters, constants)
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
        indirect = indirect_reads(self.parameters, self.read, self._reached)
        for base, reads in indirect.items():
            _check_form(base, self._forms, sorted(reads.parts), is_weight=False)
            for key in reads.parts:
                self._live(key, num_examples)
            yield base, reads.square_norm(num_examples, first_of_unit_B)
        for name in self._uses:
            base = self.read.slices[name].base if name in self.read.slices else name
            if base in indirect or name in self.read.computed:
                continue
            live = self._live(name, num_examples)
            if live:
                mine = self.read.slices.get(name) or Slice(name, (), self.parameters[name])
                slices = [item for item in self.read.slices.items() if self._reached(item[0])]
                _check_overlap(mine, slices)
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
            self._forms[name].weighted_sum(joined_positions(live), factors_B, out)
            return out
        indirect = indirect_reads(self.parameters, self.read, self._reached)
        if name in indirect:
            return indirect[name].weighted_sum(factors_B, out)
        weighted_sum(live, factors_B, out)
        for key, part in self.read.slices.items():
            if part.base == name:
                piece = torch.empty_like(part.value)
                out[part.index] += weighted_sum(self._reached(key), factors_B, piece)
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
                    f"{use.what!r} on {name!r}, found sizes {sorted(found)}. Keep all examples "
                    "there: batch_first=True in attention and recurrent layers; and where only "
                    "some examples count, multiply the losses of the others by zero."
                )
        return live

    def _square_norm(
        self, name: str, uses: list[tuple[str, Use]], first_of_unit_B: Tensor | None
    ) -> Tensor:
        part = self.read.slices.get(name)
        base, parameter = (name, self.parameters[name]) if part is None else (part.base, part.value)
        what = sorted({use.what for _, use in uses})
        is_weight = part is None and {role for role, _ in uses} == {"weight"}
        _check_form(base, self._forms, what, is_weight=is_weight)
        if name in self._forms:
            return self._forms[name].square_norms(joined_positions(uses), first_of_unit_B)
        return square_norm(uses, parameter, first_of_unit_B)


def _check_form(
    base: str, forms: Mapping[str, Form], found: Sequence[str], *, is_weight: bool
) -> None:
    """Refuse a form for a parameter that is more than the weight of linear layers."""
    if base in forms and not is_weight:
        raise Refused(
            f"Expected {base!r} to be the weight of linear layers or convolutions and nothing "
            f"else, found {list(found)}. Exclude it in the plan's `dense`."
        )


def _check_overlap(mine: Slice, others: Sequence[tuple[str, Slice]]) -> None:
    """Refuse rows that are read in more than one slice, or in a slice and with all others."""
    for key, other in others:
        if mine.index != other.index and mine.overlaps(other):
            raise Refused(
                f"Expected {mine.base!r} read whole or in slices that have no rows in common, "
                f"found {mine.key_of(mine.index)!r} beside {key!r}. Read it in one way."
            )

"""The tensors that stand for parameters in a forward pass, by name.

These are the parameters themselves, rows of them, and what is computed from them alone. Each has a
name of its own, so that layers may read them in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lightning_dpsparse.engine.computed_parameters import Call, Computed
from lightning_dpsparse.engine.parameter_slices import Place, Slice, rows_of_parts


class ReadTensors:
    """Knows parameters, and what is made of them, by the `id` of the tensor."""

    def __init__(self, parameters: Mapping[str, Tensor], watch: Callable[[Tensor], None]) -> None:
        self._parameters, self._watch = parameters, watch
        self._name = {id(parameter): name for name, parameter in parameters.items()}
        self.slices: dict[str, Slice] = {}
        self.computed: dict[str, Computed] = {}

    def __contains__(self, value: object) -> bool:
        return id(value) in self._name

    def name(self, value: object) -> str:
        return self._name[id(value)]

    def names(self, call: Call) -> list[str]:
        """The names of what a call reads."""
        return [self.name(value) for value in call.tensors() if value in self]

    def values(self) -> dict[str, Tensor]:
        """The tensors that were made since the pass began."""
        made = {key: part.value for key, part in self.slices.items()}
        return made | {key: part.value for key, part in self.computed.items()}

    def parts_of(self, base: str) -> dict[str, Slice | Computed | None]:
        """A parameter itself (None), rows of it, and what is computed from it."""
        found: dict[str, Slice | Computed | None] = {base: None}
        found |= {key: part for key, part in self.slices.items() if part.base == base}
        return found | {key: part for key, part in self.computed.items() if base in part.sources}

    def add(self, call: Call, out: Any) -> Any:
        """Name what a call makes of parameters alone, and return it in the form of `out`."""
        first = self._origin(call.args[0]) if call.args else None
        places = None
        if isinstance(first, (str, Slice)):
            places = rows_of_parts(call.func, call.args, call.kwargs)
        is_one = isinstance(out, Tensor)
        if places is not None:
            made = [self._rows(call.args[0], place) for place in places]
        else:
            values = [out] if is_one else list(out)
            made = [self._result(call, v, None if is_one else i) for i, v in enumerate(values)]
        return made[0] if is_one else tuple(made)

    def _rows(self, owner: Tensor, place: Place) -> Tensor:
        name = self.name(owner)
        part = self.slices.get(name) or Slice(name, (), owner)
        index = part.index_of(place)
        key = part.key_of(index)
        if key not in self.slices:
            self.slices[key] = Slice(part.base, index, part.value.detach()[place])
            self._note(key, self.slices[key].value)
        return self.slices[key].value

    def _result(self, call: Call, value: Tensor, number: int | None) -> Tensor:
        origins = {id(tensor): self._origin(tensor) for tensor in call.tensors()}
        parents = {key: origin for key, origin in origins.items() if origin is not None}
        made = Computed(call, parents, value.detach(), number)
        key = f"{call.what}({', '.join(sorted(made.sources))})#{len(self.computed)}"
        self.computed[key] = made
        return self._note(key, self.computed[key].value)

    def _note(self, key: str, value: Tensor) -> Tensor:
        if value.is_floating_point():
            value.requires_grad_()  # a use that nobody saw leaves a gradient here
        self._watch(value)
        self._name[id(value)] = key
        return value

    def _origin(self, value: object) -> str | Slice | Computed | None:
        name = self._name.get(id(value))
        if name is None:
            return None
        return self.computed.get(name) or self.slices.get(name) or name

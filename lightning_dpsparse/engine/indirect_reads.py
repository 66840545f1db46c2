"""Gradients on a parameter of which the loss reads something computed.

If that is the parameter itself, transposed for instance, norms are those on what was computed, and
sums are turned back. Otherwise gradients are built: on everything that is read of the parameter,
then by the chain rule on the parameter, and added up before they are squared. That is exact and
slow: it takes as many numbers for an example as the larger of the two has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_dpsparse.engine.built_gradients import (
    Build,
    built,
    built_by_parts,
    built_square_norm,
    built_sum,
)
from lightning_dpsparse.engine.computed_parameters import Computed
from lightning_dpsparse.engine.parameter_slices import Slice
from lightning_dpsparse.engine.read_tensors import ReadTensors
from lightning_dpsparse.engine.use_norms import RoleUse, square_norm, weighted_sum

# B examples


class IndirectReads:
    """What the loss reads of one parameter.

    Args:
        name: The parameter's name.
        parameters: All parameters, since something may be computed from several.
        parts: The parameter itself (None), rows of it, what is computed from it; by name.
        uses_of: Returns the uses of a name that reached the loss.
    """

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, Tensor],
        parts: Mapping[str, Slice | Computed | None],
        uses_of: Callable[[str], Sequence[RoleUse]],
    ) -> None:
        self._name, self._parameters = name, parameters
        self.parts = {key: part for key, part in parts.items() if uses_of(key)}
        self._uses = {key: uses_of(key) for key in self.parts}

    def square_norm(self, num_examples: int, first_of_unit_B: Tensor | None) -> Tensor:
        """Compute the squared norms of all examples' gradients, or of all units', (B,)."""
        turned = self._turned()
        if turned is not None:
            key, part = turned
            return square_norm(self._uses[key], part.value, first_of_unit_B)
        return built_square_norm(
            self._build(), self._most_numbers(), num_examples, first_of_unit_B, self._parameter
        )

    def weighted_sum(self, factors_B: Tensor, out: Tensor) -> Tensor:
        """Write sum_b f_b g_b into `out`."""
        turned = self._turned()
        if turned is None:
            built_sum(self._build(), factors_B, out, self._most_numbers())
            return out
        key, part = turned
        total = weighted_sum(self._uses[key], factors_B, torch.empty_like(part.value))
        _, pull, *_ = torch.func.vjp(lambda p: part.of({self._name: p}), self._parameter.detach())
        return out.copy_(pull(total)[0])

    @property
    def _parameter(self) -> Tensor:
        return self._parameters[self._name]

    def _turned(self) -> tuple[str, Computed] | None:
        """The one thing that is read, if it is the parameter in another order."""
        if len(self.parts) != 1:
            return None
        ((key, part),) = self.parts.items()
        return (key, part) if isinstance(part, Computed) and part.is_turned else None

    def _build(self) -> Build:
        each = [
            (built(self._uses[key], self._parameter if part is None else part.value), part)
            for key, part in self.parts.items()
        ]
        return built_by_parts(each, self._name, self._parameters)

    def _most_numbers(self) -> int:
        """The numbers of the largest thing whose gradients are built."""
        values = [part.value for part in self.parts.values() if part is not None]
        return max(value.numel() for value in (self._parameter, *values))


def indirect_reads(
    parameters: Mapping[str, Tensor],
    read: ReadTensors,
    uses_of: Callable[[str], Sequence[RoleUse]],
) -> dict[str, IndirectReads]:
    """The parameters of which the loss reads something computed."""
    live = [part for key, part in read.computed.items() if uses_of(key)]
    names = {name for part in live for name in part.sources}
    return {
        name: IndirectReads(name, parameters, read.parts_of(name), uses_of)
        for name in parameters
        if name in names
    }

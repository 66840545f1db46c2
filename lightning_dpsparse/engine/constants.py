"""Which tensors are the same for every example: masks, numbers of positions, tables of sines.

What a call makes of parameters and constants alone belongs to no example. A tensor does not say
what it is, so the number of its rows must: data has as many as there are examples, or as many times
as many, in every batch. Constants have the same number in all of them, whatever the batch.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from lightning_dpsparse.refused import Refused

Kind = tuple[object, ...]
"""A call and the parameters that it reads, and the dimensions of the tensor in question."""


class Constants:
    """Tells constants from data.

    Buffers of the module are constants. Of other tensors the number of rows may be that of the
    examples by chance. Once a call has had another number, it counts as one on constants; if it was
    taken for one on examples before, the run is refused. The probe looks at a new kind of step in
    batches of several sizes, before anything is released, so that chance cannot hide it.
    """

    def __init__(self, buffers: Iterable[Tensor]) -> None:
        self._buffers = {id(value): value for value in buffers}
        self._found: set[Kind] = set()
        self._taken_for_data: set[Kind] = set()
        self.num_examples: int | None = None
        """Number of examples of the pass; None if it is not known."""

    def holds(self, value: Tensor, kind: Kind) -> bool:
        """Whether a tensor that a call reads beside parameters is a constant."""
        if id(value) in self._buffers:
            return True
        if value.requires_grad or self.num_examples is None:
            return False
        return self._is_constant(len(value), (*kind, value.dim()))

    def spreads(self, copies: int, kind: Kind) -> bool:
        """Whether a call that copies a parameter makes one copy for every example."""
        if self.num_examples is None:
            return False
        return not self._is_constant(copies, (*kind, "copies"))

    def _is_constant(self, rows: int, kind: Kind) -> bool:
        if rows % self.num_examples if self.num_examples else rows:
            if kind in self._taken_for_data:
                raise Refused(
                    f"Expected {kind[0]!r} on {', '.join(map(repr, kind[1:-1]))} to read one row "
                    "for each example in every batch or in none, found both. If what it reads is "
                    "the same for all examples, register it as a buffer of the module."
                )
            self._found.add(kind)
        elif kind not in self._found:
            self._taken_for_data.add(kind)
        return kind in self._found

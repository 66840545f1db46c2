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
    examples by chance, so passes of several sizes are compared: rows of data grow with the batch.
    Two small passes are made for this before the first step (`plugin/rehearsal.py`). A call that
    was taken for one on examples in a step, and that turns out to be none, is refused: the probe
    sees to that before anything is released.
    """

    def __init__(self, buffers: Iterable[Tensor]) -> None:
        self._buffers = {id(value): value for value in buffers}
        self._found: set[Kind] = set()
        self._rows: dict[Kind, tuple[int, int]] = {}
        """Examples and rows when a kind was seen last."""
        self._taken_for_data: set[Kind] = set()
        self._num_examples: int | None = None
        self._is_rehearsal = False

    def expect(self, num_examples: int | None, *, is_rehearsal: bool) -> None:
        """Tell the number of examples of the next pass, and whether its gradients are used."""
        self._num_examples, self._is_rehearsal = num_examples, is_rehearsal

    def holds(self, value: Tensor, kind: Kind) -> bool:
        """Whether a tensor that a call reads beside parameters is a constant."""
        if id(value) in self._buffers:
            return True
        if value.requires_grad or self._num_examples is None:
            return False
        return self._is_constant(len(value), self._num_examples, (*kind, value.dim()))

    def spreads(self, copies: int, kind: Kind) -> bool:
        """Whether a call that copies a parameter makes one copy for every example."""
        if self._num_examples is None:
            return False
        return not self._is_constant(copies, self._num_examples, (*kind, "copies"))

    def _is_constant(self, rows: int, examples: int, kind: Kind) -> bool:
        examples_before, rows_before = self._rows.get(kind, (examples, rows))
        self._rows[kind] = examples, rows
        is_multiple = rows % examples == 0 if examples else rows == 0
        if kind in self._found:
            return True
        if is_multiple and rows * examples_before == rows_before * examples:
            if not self._is_rehearsal:
                self._taken_for_data.add(kind)
            return False
        if kind in self._taken_for_data:
            raise Refused(
                f"Expected {kind[0]!r} on {', '.join(map(repr, kind[1:-1]))} to read one row for "
                "each example in every batch or in none, found both. If what it reads is the same "
                "for all examples, register it as a buffer of the module."
            )
        self._found.add(kind)
        return True

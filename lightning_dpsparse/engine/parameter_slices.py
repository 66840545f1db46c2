"""Rows of a parameter that are read apart from the others, as parameters of their own.

A stacked parameter, of which each layer reads its part, has a gradient that falls into parts: the
squared norm is the sum of theirs, as long as no two of them overlap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Place = int | slice
"""One row, or rows in a row, of a first dimension."""

_PARTS = {
    Tensor.__getitem__,
    Tensor.chunk,
    Tensor.narrow,
    Tensor.select,
    Tensor.split,
    Tensor.unbind,
    torch.chunk,
    torch.narrow,
    torch.select,
    torch.split,
    torch.unbind,
}
"""Functions that take rows out of a tensor."""


@dataclass(frozen=True)
class Slice:
    """Some rows of a parameter. It is kept alive so that the `id` of its value stays its own."""

    base: str
    """Name of the parameter."""
    index: tuple[Place, ...]
    """Where the rows are in it: numbers for leading dimensions, and then perhaps a range."""
    value: Tensor

    def index_of(self, place: Place) -> tuple[Place, ...]:
        """Where in the parameter a place in this slice is."""
        if not self.index or isinstance(self.index[-1], int):
            return (*self.index, place)
        *above, rows = self.index
        assert isinstance(rows, slice)
        if isinstance(place, int):
            return (*above, rows.start + place)
        return (*above, slice(rows.start + place.start, rows.start + place.stop))

    def key_of(self, index: tuple[Place, ...]) -> str:
        """A name for the rows at an index of the parameter, "weight[1, 2:4]" for instance."""
        places = ", ".join(_shown(place) for place in index)
        return f"{self.base}[{places}]" if index else self.base

    def overlaps(self, other: Slice) -> bool:
        """Whether a row of one belongs to the other, too."""
        pairs = zip(self.index, other.index)
        return self.base == other.base and all(_meet(one, two) for one, two in pairs)


def rows_of_parts(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Place] | None:
    """The rows of each part that a call takes out of its first argument, in order.

    None if the call does something else, or takes what is not a row or a range of rows.
    """
    if func not in _PARTS or not args[0].dim():
        return None
    if func is Tensor.__getitem__ and not isinstance(args[1], (int, slice)):
        return None
    # What happens to a tensor whose only moving dimension is the first tells which rows are taken.
    # It has no numbers: where its parts would begin and how they would move says it all.
    moving = torch.empty_strided(args[0].shape, [1] + [0] * (args[0].dim() - 1), device="meta")
    taken = func(moving, *args[1:], **kwargs)
    parts = taken if isinstance(taken, (list, tuple)) else [taken]
    places = [_place(part, args[0]) for part in parts]
    return None if None in places else [place for place in places if place is not None]


def _place(part: Tensor, whole: Tensor) -> Place | None:
    start = int(part.storage_offset())
    steps = [step for step, size in zip(part.stride(), part.shape) if size > 1]
    if part.shape == whole.shape[1:] and not any(steps):
        return start
    if part.dim() != whole.dim() or part.shape[1:] != whole.shape[1:] or not len(part):
        return None
    is_in_order = steps[:1] == [1] if len(part) > 1 else True
    is_whole = not any(steps[1:] if len(part) > 1 else steps)
    return slice(start, start + len(part)) if is_in_order and is_whole else None


def _meet(one: Place, two: Place) -> bool:
    a, b = (p if isinstance(p, slice) else slice(p, p + 1) for p in (one, two))
    return max(a.start, b.start) < min(a.stop, b.stop)


def _shown(place: Place) -> str:
    return str(place) if isinstance(place, int) else f"{place.start}:{place.stop}"

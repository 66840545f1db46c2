"""Where the probe's batches come from: the examples of a real batch, arranged in other ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_dpsparse.plugin.probe.repeatable import seed_all
from lightning_dpsparse.sharded.examples import leaves, num_examples, take_examples


class Source(Protocol):
    """Something that makes batches of a real batch's examples."""

    def batch(self, positions: Sequence[int]) -> Any:
        """A batch of the examples at these positions of the real one, in this order."""
        ...


class FromBatch:
    """Cuts examples out of the real batch."""

    def __init__(self, batch: Any, size: int) -> None:
        self._batch, self._size = batch, size

    def batch(self, positions: Sequence[int]) -> Any:
        return take_examples(self._batch, self._size, list(positions))


class FromData:
    """Reads examples from the data set again, one at a time, and collates them.

    The collate function may do something to examples, too.

    Args:
        read: Reads some examples of the data set.
        collate: The loader's own collate function.
        indices: Numbers of the real batch's examples.
    """

    def __init__(
        self,
        read: Callable[[list[int]], Any],
        collate: Callable[[Any], Any],
        indices: Sequence[int],
        seed: int,
    ) -> None:
        self._read, self._collate = read, collate
        self._indices, self._seed = indices, seed

    def batch(self, positions: Sequence[int]) -> Any:
        indices = [self._indices[position] for position in positions]
        examples = self._one_by_one(indices)
        if examples is None:  # a data set that reads many at once, in a form of its own
            seed_all(self._seed)
            examples = self._read(indices)
        seed_all(self._seed)
        return self._collate(examples)

    def _one_by_one(self, indices: list[int]) -> list[Any] | None:
        examples: list[Any] = []
        for index in indices:
            seed_all(self._seed + index)  # what reading one draws must not shift others'
            found = self._read([index])
            if not isinstance(found, list):
                return None
            examples.extend(found)
        return examples


def are_alike(batch: Any, size: int, one: int, two: int) -> bool:
    """Whether two examples of a batch hold the same values."""
    a, b = (list(leaves(take_examples(batch, size, [i]))) for i in (one, two))
    return all(_same(x, y) for x, y in zip(a, b))


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor):
        return bool(torch.equal(x, y))
    if hasattr(x, "lengths") and hasattr(x, "values"):  # jagged
        return bool(torch.equal(x.lengths(), y.lengths()) and torch.equal(x.values(), y.values()))
    if isinstance(x, np.ndarray):
        return bool(np.array_equal(x, y))
    try:
        return bool(x == y)
    except (TypeError, ValueError, RuntimeError):
        return True


def size_of(batch: Any, fallback: int | None) -> int:
    return num_examples(batch, fallback)

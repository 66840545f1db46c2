"""Batch samplers of a private run: which examples come next, by their numbers.

Poisson samples have a sampler of their own (`sampling.poisson`). Here are a fixed order that goes
on where the run is, all data once for counting ids and for a calibration, and a sampler that notes
what another draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lightning_dpsparse.plugin.deliveries import Deliveries
from lightning_dpsparse.plugin.loaders import EvaluationBatches
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sampling.poisson import Phase
from lightning_dpsparse.sampling.units import Units

_COUNTED_AT_ONCE = 8192
"""How many units are read at once when rows are selected by the data."""


class InOrder:
    """A rank's share of some units, each once."""

    def __init__(self, units: Units, phase: Phase | None, rank: int, world_size: int) -> None:
        first, count = (0, units.count) if phase is None else (phase.first, phase.count)
        self._units = units
        self._start = first + count * rank // world_size
        self._stop = first + count * (rank + 1) // world_size

    def __len__(self) -> int:
        return -(-(self._stop - self._start) // _COUNTED_AT_ONCE)

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(self._start, self._stop, _COUNTED_AT_ONCE):
            some = np.arange(start, min(start + _COUNTED_AT_ONCE, self._stop))
            yield self._units.examples(some)[0].tolist()


class EveryExample:
    """The examples of a rank's share of all units, each once, in batches of one size.

    The last batch may be smaller. Ranks read together: one that has fewer batches than
    `num_batches` gives the data's first example again, which its reader must not count.
    """

    def __init__(self, units: Units, size: int, rank: int, world_size: int) -> None:
        self._units, self._size = units, size
        self._start = units.count * rank // world_size
        self._stop = units.count * (rank + 1) // world_size
        self.num_examples = sum(len(some) for some in self._pieces())
        """Number of examples of the share."""
        self.num_batches = -(-self.num_examples // size)
        """Number of batches that are given. The ranks agree on the largest."""

    def _pieces(self) -> Iterator[list[int]]:
        for start in range(self._start, self._stop, _COUNTED_AT_ONCE):
            some = np.arange(start, min(start + _COUNTED_AT_ONCE, self._stop))
            yield self._units.examples(some)[0].tolist()

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        waiting: list[int] = []
        given = 0
        for some in self._pieces():
            waiting += some
            while len(waiting) >= self._size:
                yield waiting[: self._size]
                waiting, given = waiting[self._size :], given + 1
        if waiting:
            yield waiting
            given += 1
        for _ in range(given, self.num_batches):
            yield [0]


class FromStep:
    """The batches of one pass that are still to come, by the run's step."""

    def __init__(self, batches: EvaluationBatches, present_step: Callable[[], int]) -> None:
        self._batches, self._present_step = batches, present_step

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        done = self._present_step() % len(self._batches)
        return (batch for i, batch in enumerate(self._batches) if i >= done)


class Noted:
    """The batches of a sampler, each of which is noted before it is read."""

    def __init__(self, batches: Any, deliveries: Deliveries) -> None:
        self._batches, self._deliveries = batches, deliveries

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        for indices in self._batches:
            if len(set(indices)) < len(indices):
                raise Refused(
                    "Expected every example once in a batch, found one several times: it would "
                    "count as several at the price of one. Draw without replacement."
                )
            self._deliveries.note_drawn(list(indices))
            yield indices

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

"""The examples of a batch that the probe looks at, and batches that are made of them.

Some examples of the real batch, of which no two belong to one unit, are read again or cut out of
it. The probe then arranges them in other ways: some replaced by others, copied, or left out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_dpsparse.plugin.deliveries import Delivery
from lightning_dpsparse.plugin.probe.repeatable import same_draws
from lightning_dpsparse.plugin.probe.sources import FromBatch, FromData, Source, size_of
from lightning_dpsparse.sharded.build import on_every_rank

_MOST, _LEAST = 32, 8
"""How many examples each rank looks at. Where there are fewer than the least, they are repeated."""


@dataclass(frozen=True)
class Reader:
    """How the loader reads examples of its data set."""

    read: Callable[[list[int]], Any]
    collate: Callable[[Any], Any]


class Subjects:
    """The examples that this rank looks at.

    Args:
        delivery: The batch of the step.
        reader: How to read its examples again; None if that cannot be done.
        leaders: Positions of examples of which no two belong to one unit; None is all.
    """

    def __init__(
        self,
        delivery: Delivery,
        reader: Reader | None,
        leaders: Sequence[int] | None,
        seed: int,
    ) -> None:
        self._delivery, self._reader, self._seed = delivery, reader, seed
        self._coins = random.Random(seed)
        self._source: Source | None = None
        self.batch_size = size_of(delivery.batch, delivery.num_examples)
        everyone = list(range(self.batch_size)) if leaders is None else list(leaders)
        step = max(1, len(everyone) // _MOST)
        self.positions = everyone[::step][:_MOST]
        """Where the examples stand in the batch; empty on a rank that drew nobody."""
        while self.positions and len(self.positions) < _LEAST:
            self.positions = (self.positions * _LEAST)[:_LEAST]

    def meet_other_ranks(self) -> list[int]:
        """How many examples each rank looks at. All ranks call it together."""
        self.counts = [int(count) for count in on_every_rank(len(self.positions))]  # type: ignore[call-overload]
        return self.counts

    @property
    def whole_batch(self) -> Any:
        """The batch of the step, as the loader gave it."""
        return self._delivery.batch

    def batch_of(self, positions: Sequence[int]) -> Any:
        """A batch of the examples at these positions. Its draws are the same every time."""
        if not self.positions:
            return self.whole_batch  # an empty one
        if self._source is None:
            self._source = self._find_source()
        with same_draws(self._seed):
            return self._source.batch(positions)

    def _find_source(self) -> Source:
        """Examples are read again where that works: the collate function is measured, too."""
        from_batch = FromBatch(self.whole_batch, self.batch_size)
        indices = self._delivery.indices
        if self._reader is None or not indices:
            return from_batch
        from_data = FromData(self._reader.read, self._reader.collate, indices, self._seed)
        try:
            with same_draws(self._seed):
                made = from_data.batch(self.positions[:2])
            size_of(made, 2)
        except Exception:  # a data set that only workers can read, say
            return from_batch
        return from_data

    def digits(self) -> range:
        """Binary digits that number the examples of the rank with the most of them."""
        return range(math.ceil(math.log2(max(2, *self.counts))))

    def halves(self) -> list[list[int]]:
        """Sets of examples, by number. Of any two, each is in one of the sets without the other."""
        everyone = range(len(self.positions))
        return [
            [i for i in everyone if (i >> d) % 2 == half] for d in self.digits() for half in (0, 1)
        ]

    def others(self, drawn: list[int], count: int | None = None) -> list[int]:
        """For every number one whose example stands there when those drawn are replaced."""
        others = list(range(len(self.positions) if count is None else count))
        rest = sorted(set(others) - set(drawn))
        for i in drawn:
            others[i] = self._coins.choice(rest or drawn)
        return others

    def whole_batch_with_a_quarter_replaced(self) -> tuple[Any, list[int]]:
        """The batch at its full size with other examples in it, and which were replaced."""
        batch, size = self.whole_batch, self.batch_size
        drawn = sorted(self._coins.sample(range(size), (size + 3) // 4))
        others = self.others(drawn, size)
        return FromBatch(batch, size).batch(others) if size else batch, drawn

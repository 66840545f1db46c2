"""Poisson samples: every unit is in every batch with the same probability, independently.

A step's batch is a function of (run key, step, rank) alone. Nothing is remembered between batches,
and drawing one takes time in proportion to its own size, however large the data. `units.py` says
what is drawn, and `schedule.py` what steps on such samples cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lightning_dpsparse.noise.keys import RunKey, Stream
from lightning_dpsparse.sampling.units import Ints, Units


@dataclass(frozen=True)
class Phase:
    """A stretch of steps that draw from one range of the units."""

    first: int
    stop: int
    rate: float
    """Probability with which each unit is drawn in each step."""
    steps: int | None = None
    """Number of steps; None is without end."""
    name: str | None = None
    """Name of the part of the data, if no unit is in two parts."""

    @property
    def count(self) -> int:
        """Number of units to draw from."""
        return self.stop - self.first


def phase_at(phases: Sequence[Phase], step: int) -> Phase | None:
    """The phase that a step of the schedule belongs to; None after the last."""
    for phase in phases:
        if phase.steps is None or step < phase.steps:
            return phase
        step -= phase.steps
    return None


class PoissonSampler:
    """Draws every rank's share of a batch.

    Guarantees: each unit of the phase is drawn with exactly its rate, independently of all others
    and of other steps. A batch beyond `max_batch` is cut to a uniformly random part of it, over all
    ranks together. The ranks' parts of the data are fixed.
    """

    def __init__(
        self,
        units: Units,
        phases: list[Phase],
        key: RunKey,
        rank: int,
        world_size: int,
        max_batch: int | None = None,
    ) -> None:
        self._units, self._phases, self._key = units, phases, key
        self._rank, self._world, self._max_batch = rank, world_size, max_batch

    def phase(self, step: int) -> Phase | None:
        """The phase that a step belongs to; None after the last."""
        return phase_at(self._phases, step)

    def draw(self, step: int) -> tuple[Ints, list[int] | None]:
        """This rank's examples of a step, and how many each unit has (None: one each)."""
        phase = self.phase(step)
        if phase is None:
            raise IndexError(f"Expected a step of the schedule, found step {step} after its end.")
        count = self._count(phase, step)
        start, stop = self._part(phase, self._rank)
        generator = self._generator("members", step, self._rank)
        drawn = generator.choice(stop - start, count, replace=False, shuffle=False)
        return self._units.examples(phase.first + start + np.sort(drawn).astype(np.int64))

    def _count(self, phase: Phase, step: int) -> int:
        if self._max_batch is None:
            return self._binomial(phase, step, self._rank)
        # Every rank draws the counts of all ranks. They share the key, and so need no messages.
        counts = [self._binomial(phase, step, rank) for rank in range(self._world)]
        if sum(counts) > self._max_batch:
            generator = self._generator("truncation", step, 0)
            counts = generator.multivariate_hypergeometric(counts, self._max_batch).tolist()
        return counts[self._rank]

    def _binomial(self, phase: Phase, step: int, rank: int) -> int:
        start, stop = self._part(phase, rank)
        return int(self._generator("count", step, rank).binomial(stop - start, phase.rate))

    def _part(self, phase: Phase, rank: int) -> tuple[int, int]:
        """A rank's part of the phase's units."""
        return phase.count * rank // self._world, phase.count * (rank + 1) // self._world

    def _generator(self, what: str, step: int, rank: int) -> np.random.Generator:
        seed = self._key.bytes_for(Stream("sampling", what, step, (rank, 0)), 16)
        return np.random.Generator(np.random.Philox(key=int.from_bytes(seed, "big")))


class PoissonBatches:
    """A batch sampler for `DataLoader`: `length` batches from the run's present step on.

    The step is asked for when the first batch is asked for: what is drawn depends neither on the
    number of the epoch nor on where a resumed epoch stands.
    """

    def __init__(self, sampler: PoissonSampler, length: int, present_step: Callable[[], int]):
        self.draws, self._length, self._present_step = sampler, length, present_step

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[list[int]]:
        first = self._present_step()
        for step in range(first, first + self._length):
            if self.draws.phase(step) is None:
                return
            yield self.draws.draw(step)[0].tolist()


def day_phases(
    bounds: list[int], batch: float, steps: int, names: list[str] | None = None
) -> list[Phase]:
    """One phase for every day, in order, with steps in proportion to its units."""
    total = bounds[-1] - bounds[0]
    phases, done = [], 0
    for day, (first, stop) in enumerate(pairwise(bounds)):
        until = round(steps * (stop - bounds[0]) / total)
        if stop > first and until > done:
            name = names[day] if names else None
            phases.append(Phase(first, stop, min(1.0, batch / (stop - first)), until - done, name))
            done = until
    return phases

"""The ledger: what the training of a model has cost so far.

A run may be interrupted, continued from a checkpoint, and continued again with another plan. Each
uninterrupted stretch is a *segment*. Its mechanism prices the first t steps of a segment as a
whole, because t steps need not cost t times what one step costs: noise that is correlated over
steps makes a whole run one event. The ledger therefore remembers what it held before the open
segment, and replaces the price of t steps by that of t + 1. Once a new segment begins, the charges
of earlier ones stay as they are.

`budget.py` charges a ledger step by step; `run_plan.py` says what the steps cost; `journal.py`
keeps the ledger on disk.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

from dp_accounting.dp_event import DpEvent

from lightning_dpsparse.accounting.calibration import (
    EventCounts,
    epsilon_of,
    epsilons_of,
    rdp_epsilon_of,
)
from lightning_dpsparse.accounting.charges import Charge
from lightning_dpsparse.accounting.events import event_from_data, event_to_data
from lightning_dpsparse.accounting.ledger_data import check_ledger_data
from lightning_dpsparse.accounting.privacy_loss import FINE


@dataclass
class Entry:
    """An event, how often it was run, and on which part of the data."""

    event: DpEvent
    count: int
    partition: str | None = None
    steps: int = 0
    """Number of steps that this entry pays for."""


@dataclass(frozen=True)
class Segment:
    """Where the open segment of a ledger began."""

    first_step: int
    """Number of its first step in the schedule."""
    before: Ledger
    """The ledger as it was when the segment began."""


@dataclass
class Ledger:
    """Everything that a model's training cost, from its first step on, whoever ran it.

    A step is charged before it runs. Steps that failed, drew nobody, or were lost with a killed
    process are therefore in it.
    """

    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Name of the line of runs that continue one another."""
    entries: list[Entry] = field(default_factory=list)
    steps: int = 0
    """Number of steps that were charged."""
    lost: int = 0
    """Number of steps that were charged, and that are not in the model."""
    protects: str | None = None
    """Whom the charges protect, in words. The first run sets it."""
    segment: Segment | None = field(default=None, compare=False, repr=False)
    """The open segment. It is kept in memory only: whoever reads a file begins a new one."""

    @property
    def position(self) -> int:
        """Number of steps that the model has taken: where it stands in the schedule."""
        return self.steps - self.lost

    # ---- charging -------------------------------------------------------------------------------

    def charge(
        self, event: DpEvent, partition: str | None = None, *, steps: int = 1, times: int = 1
    ) -> None:
        """Add some steps, which cost the event so many times."""
        self.steps += steps
        last = self.entries[-1] if self.entries else None
        if last is not None and (last.event, last.partition) == (event, partition):
            last.count += times
            last.steps += steps
        elif times:
            self.entries.append(Entry(event, times, partition, steps))

    def open_segment(self, first_step: int) -> None:
        """Let what was charged so far stand. `first_step` is the next step of the schedule."""
        self.segment = None
        self.segment = Segment(first_step, self.copy())

    def charge_segment(self, charges: Sequence[Charge]) -> None:
        """Let the open segment cost these charges, and no longer what it was charged before."""
        assert self.segment is not None
        before = self.segment.before.copy()
        self.entries, self.steps = before.entries, before.steps
        for charge in charges:
            self.charge(charge.event, charge.partition, steps=charge.steps, times=charge.times)

    # ---- asking ---------------------------------------------------------------------------------

    def events_by_part(self) -> list[EventCounts]:
        """The events that a unit of each part of the data may have been in.

        No unit is in two parts, so that a unit pays for its own part and for what used all data.
        """
        names: list[str | None] = []
        names.extend(sorted({e.partition for e in self.entries if e.partition is not None}))
        return [
            [(e.event, e.count) for e in self.entries if e.partition in (None, name)]
            for name in names or [None]
        ]

    def epsilon(self, delta: float, grid: float = FINE) -> float:
        """The most that any unit has lost."""
        return max(epsilon_of(counts, delta, grid) for counts in self.events_by_part())

    def epsilons(self, deltas: Sequence[float]) -> list[float]:
        """The most that any unit has lost, at several deltas."""
        if not self.entries:
            return [0.0] * len(deltas)
        parts = [epsilons_of(counts, deltas) for counts in self.events_by_part()]
        return [max(column) for column in zip(*parts)]

    def rdp_epsilon(self, delta: float) -> float | None:
        """The same by Renyi accounting; None if it has no way for some event."""
        found = [rdp_epsilon_of(counts, delta) for counts in self.events_by_part()]
        if any(epsilon is None for epsilon in found):
            return None
        return max((epsilon for epsilon in found if epsilon is not None), default=0.0)

    def first(self, steps: int) -> Ledger:
        """The ledger as it stood after its first so many steps, as far as its entries tell.

        An entry that pays for more steps than these is charged in proportion, rounded up. That is
        exact for independent steps, and an upper bound where one event pays for many steps.
        """
        earlier = Ledger(self.run)
        for entry in self.entries:
            if earlier.steps == steps:
                break
            covered = min(entry.steps, steps - earlier.steps)
            times = -(-entry.count * covered // entry.steps) if entry.steps else entry.count
            earlier.charge(entry.event, entry.partition, steps=covered, times=times)
        return earlier

    # ---- copies ---------------------------------------------------------------------------------

    def copy(self) -> Ledger:
        """A ledger that can be charged without changing this one."""
        return replace(self, entries=[replace(entry) for entry in self.entries])

    def to_data(self) -> dict[str, Any]:
        """The ledger as plain Python values."""
        entries = [
            {
                "event": event_to_data(e.event),
                "count": e.count,
                "partition": e.partition,
                "steps": e.steps,
            }
            for e in self.entries
        ]
        return {
            "run": self.run,
            "entries": entries,
            "steps": self.steps,
            "lost": self.lost,
            "protects": self.protects,
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Ledger:
        """The ledger that `to_data` wrote, with or without the steps of its entries."""
        check_ledger_data(data)
        counts, steps = [int(e["count"]) for e in data["entries"]], int(data["steps"])
        entries = [
            Entry(event_from_data(e["event"]), count, e["partition"], int(e.get("steps", spread)))
            for e, count, spread in zip(data["entries"], counts, _in_proportion(steps, counts))
        ]
        return cls(str(data["run"]), entries, steps, int(data["lost"]), data["protects"])


def _in_proportion(steps: int, counts: Sequence[int]) -> list[int]:
    """Steps of entries that were saved without them: as many in all, in proportion to counts."""
    total = sum(counts)
    return [
        round(steps * stop / total) - round(steps * start / total)
        for start, stop in pairwise(accumulate(counts, initial=0))
    ]

"""What was run, and a copy of it on disk that outlives a killed process."""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dp_accounting.dp_event import DpEvent

from lightning_dpsparse.accounting.calibration import Charges, epsilon_of
from lightning_dpsparse.accounting.events import from_data, to_data
from lightning_dpsparse.accounting.privacy_loss import FINE
from lightning_dpsparse.refused import Refused


@dataclass
class Entry:
    """An event, how often it was run, and on which part of the data."""

    event: DpEvent
    count: int
    partition: str | None = None


@dataclass
class Ledger:
    """Everything a model's training cost, from its first step on, whoever ran it.

    A step is charged before it runs: steps that failed, drew nobody, or were lost with a killed
    process are in it.
    """

    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Name of the line of runs that continue one another."""
    entries: list[Entry] = field(default_factory=list)
    steps: int = 0
    lost: int = 0
    """Steps that were charged, and are not in the model."""
    protects: str | None = None
    """Whom, in words; set by the first run."""

    def charge(
        self, event: DpEvent, partition: str | None = None, *, steps: int = 1, times: int = 1
    ) -> None:
        """Some more steps, which cost the event so many times."""
        self.steps += steps
        last = self.entries[-1] if self.entries else None
        if last is not None and (last.event, last.partition) == (event, partition):
            last.count += times
        elif times:
            self.entries.append(Entry(event, times, partition))

    def charges(self) -> list[Charges]:
        """What a unit of each part of the data may have been in: parts do not share a unit."""
        names: list[str | None] = []
        names.extend(sorted({e.partition for e in self.entries if e.partition is not None}))
        return [
            [(e.event, e.count) for e in self.entries if e.partition in (None, name)]
            for name in names or [None]
        ]

    def epsilon(self, delta: float, grid: float = FINE) -> float:
        """The most that any unit lost."""
        return max(epsilon_of(charges, delta, grid) for charges in self.charges())

    def first(self, count: int) -> Ledger:
        """The ledger as it stood when so many events had been charged."""
        earlier = Ledger(self.run)
        for entry in self.entries:
            times = min(count, entry.count)
            if times:
                earlier.charge(entry.event, entry.partition, steps=times, times=times)
            count -= times
        return earlier

    def copy(self) -> Ledger:
        return Ledger.from_data(self.to_data())

    def to_data(self) -> dict[str, Any]:
        """Plain Python values."""
        entries = [
            {"event": to_data(e.event), "count": e.count, "partition": e.partition}
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
        entries = [
            Entry(from_data(e["event"]), int(e["count"]), e["partition"]) for e in data["entries"]
        ]
        return cls(
            str(data["run"]), entries, int(data["steps"]), int(data["lost"]), data["protects"]
        )


class Journal:
    """The ledger on disk, always ahead of what has run. One process holds it at a time.

    Guarantees: after a kill at any moment the file charges for every step that may have begun.
    """

    def __init__(self, folder: Path, run: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{run}.json"
        self._lock = (folder / f"{run}.lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise Refused(
                f"Expected one training at a time to continue run {run}, found another process at "
                "it. Both would spend the same budget. Wait for it, or stop it."
            ) from error

    def read(self) -> Ledger | None:
        """What is on disk; None if nothing is."""
        return read_ledger(self.path)

    def write(self, ledger: Ledger) -> None:
        """Replace the file, and be sure that it has reached the disk."""
        draft = self.path.with_suffix(".draft")
        with draft.open("w") as file:
            json.dump(ledger.to_data(), file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path)

    def close(self) -> None:
        self._lock.close()


def read_ledger(path: Path) -> Ledger | None:
    return Ledger.from_data(json.loads(path.read_text())) if path.exists() else None

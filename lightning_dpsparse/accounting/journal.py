"""The journal: the ledger on disk, always ahead of the steps that were taken.

Every line of runs has one journal, `RUN.journal`, an append-only log (`durable.record_log`). The
newest record says what has been charged. A record is written, and has reached the disk, before the
steps that it charges for begin. So nothing that a crash or a power cut can do leaves a step
uncharged.

A checkpoint remembers the position of the journal when it was saved (`Position`), and what had been
charged by then. When a run goes on from a checkpoint, the two may disagree: the journal may be an
older copy, or one that another branch of the run has written on. `reconcile` takes the larger of
the two, or both where neither contains the other, and says so.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.checks import check_mapping, check_names
from lightning_dpsparse.durable.record_log import Record, RecordLog, read_log
from lightning_dpsparse.refused import Refused

_CHECKPOINTS = 16
"""Number of checkpoints that a journal remembers."""

Writers = tuple[tuple[str, int], ...]
"""Who wrote a journal: a random name of every process, and the sequence of its first record."""


def journal_path(folder: Path, run: str) -> Path:
    """Where the journal of a line of runs is."""
    return folder / f"{run}.journal"


@dataclass(frozen=True)
class Position:
    """A point in the history of a journal."""

    sequence: int
    writers: Writers

    @classmethod
    def of(cls, mark: Mapping[str, Any]) -> Position:
        """The position that a checkpoint remembers."""
        writers = tuple((str(name), int(first)) for name, first in mark["writers"])
        return cls(int(mark["sequence"]), writers)

    def contains(self, other: Position) -> bool:
        """Whether the history up to here holds the history up to another point.

        One process writes at a time, so that its records are in one line. Two histories branch
        where another process went on from a copy: before the end of what the first one wrote.
        """
        shared = len(other.writers)
        if self.writers[:shared] != other.writers:
            return False
        if len(self.writers) == shared:
            return self.sequence >= other.sequence
        return self.writers[shared][1] > other.sequence


@dataclass(frozen=True)
class JournalState:
    """What a journal says: its newest record."""

    ledger: Ledger
    position: Position
    launch: str | None
    """Name of the launch that wrote it: restarts of one job have the same."""
    notes: Mapping[str, Any]
    """What the report of the run says beside its charges, as plain values."""
    checkpoints: tuple[str, ...]
    """Checkpoints that the run saved, the newest last. Relative paths are from the journal."""
    may_lack_a_record: bool = False
    """Whether a record may have been lost at the end."""
    damaged: int = 0
    """Number of earlier records that cannot be read any more."""


def read_journal(path: Path) -> JournalState | None:
    """What a journal says; None if there is none, or if nothing was ever written to it."""
    found = read_log(path)
    if found.newest is None:
        if found.may_lack_a_record:
            raise Refused(
                f"Expected the charges of a run in {str(path)!r}, found zeros: the file was lost. "
                "Restore it from a copy. Without one, remove it: a run then goes on with what its "
                "checkpoint knows, and the report says so."
            )
        return None
    try:
        return _state(found.newest, found.may_lack_a_record, found.damaged)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, Refused):
            raise
        raise Refused(
            f"Expected the journal of a run in {str(path)!r}, found another kind of file. Restore "
            "it from a copy, or name another folder in default_root_dir."
        ) from None


def _state(record: Record, may_lack_a_record: bool = False, damaged: int = 0) -> JournalState:
    data = record.data
    check_mapping("notes", data["notes"])
    check_names("checkpoints", data["checkpoints"])
    writers = tuple((str(name), int(first)) for name, first in data["writers"])
    return JournalState(
        Ledger.from_data(data["ledger"]),
        Position(record.sequence, writers),
        data["launch"],
        data["notes"],
        tuple(data["checkpoints"]),
        may_lack_a_record,
        damaged,
    )


class Journal:
    """The journal of a run that is being trained. One process holds it at a time.

    Guarantees: once `write` has returned, the charges that it was given survive a kill and a power
    cut.

    Args:
        folder: Where journals are.
        run: Name of the line of runs.
        after: The position that a checkpoint knows, which may be later than the journal's own: what
            comes now has been charged on top of both.
        launch: Name of the launch of this process.
        notes: Returns what the report says beside the charges, as plain values.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        *,
        after: Position | None = None,
        launch: str | None = None,
        notes: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        try:
            self._log = RecordLog(journal_path(folder, run))
        except BlockingIOError:
            raise Refused(
                f"Expected one training at a time to continue run {run}, found another process at "
                "it. Both would spend the same budget. Wait for it, or stop it."
            ) from None
        self._launch, self._notes = launch, notes
        newest = self._log.newest
        self.before = None if newest is None else _state(newest)
        """What the journal said when it was opened; None if nothing."""
        known = self.before
        self._charged = None if known is None else known.ledger
        self._checkpoints = () if known is None else known.checkpoints
        here = Position(-1, ()) if known is None else known.position
        if after is not None and after.contains(here):
            here = after
        self._log.next_sequence = max(self._log.next_sequence, here.sequence + 1)
        name = secrets.token_hex(6)
        self._writers: Writers = (*here.writers, (name, self._log.next_sequence))

    @property
    def path(self) -> Path:
        """The file."""
        return self._log.path

    def write(self, ledger: Ledger) -> None:
        """Charge what is in a ledger, and return once that has reached the disk."""
        self._charged = ledger.copy()
        self._log.append(
            {
                "writers": self._writers,
                "launch": self._launch,
                "notes": dict(self._notes()),
                "checkpoints": self._checkpoints,
                "ledger": ledger.to_data(),
            }
        )

    def note_checkpoint(self, path: Path) -> None:
        """Remember a checkpoint that has just become whole. Those that are gone are forgotten."""
        assert self._charged is not None
        folder = self.path.parent
        name = _relative(path, folder)
        kept = [c for c in self._checkpoints if c != name and (folder / c).exists()]
        self._checkpoints = (*kept, name)[-_CHECKPOINTS:]
        self.write(self._charged)

    def mark(self) -> dict[str, Any]:
        """What a checkpoint keeps of the journal: where it stands, and what it has charged."""
        assert self._charged is not None
        assert self._log.newest is not None
        return {
            "folder": str(self.path.parent.absolute()),
            "sequence": self._log.newest.sequence,
            "digest": self._log.newest.digest,
            "writers": [list(writer) for writer in self._writers],
            "charged": self._charged.to_data(),
        }

    @property
    def is_open(self) -> bool:
        """Whether records can still be written."""
        return self._log.is_open

    def close(self) -> None:
        """Let another process go on with the run."""
        self._log.close()


def _relative(path: Path, folder: Path) -> str:
    """A path as it is written into a journal: relative where both may be moved together."""
    path, root = path.absolute(), folder.absolute().parent
    return f"../{path.relative_to(root)}" if path.is_relative_to(root) else str(path)


# ---- going on -----------------------------------------------------------------------------------


def find_journal(
    mark: Mapping[str, Any], run: str, near: Sequence[Path]
) -> tuple[Path, JournalState | None]:
    """The folder of the journal that a checkpoint means, and what it says; None if it is gone.

    `near` are folders that it may have been moved or copied to, the likeliest first. If there is
    more than one, the one that charges for most counts, and of equal ones the likeliest: a folder
    that was copied goes on by itself.
    """
    folders = dict.fromkeys([*near, Path(mark["folder"])])
    found = [(folder, read_journal(journal_path(folder, run))) for folder in folders]
    there = [(folder, state) for folder, state in found if state is not None]
    return max(  # of equal ones the first
        there,
        key=lambda f: (f[1].ledger.steps, f[1].position.sequence),
        default=(Path(mark["folder"]), None),
    )


def reconcile(mark: Mapping[str, Any], journal: JournalState | None) -> tuple[Ledger, list[str]]:
    """What has been charged, by a checkpoint and by the journal, and what the report must say.

    Guarantees: the ledger charges for all that either of them charges for.
    """
    charged, saved_at = Ledger.from_data(mark["charged"]), Position.of(mark)
    if journal is None:
        return charged, [
            f"The journal of run {charged.run} was not found: steps that a killed process took "
            "after the checkpoint are not counted."
        ]
    words = []
    if journal.damaged:
        words.append(f"{journal.damaged:,} earlier records of the journal cannot be read.")
    if journal.position.contains(saved_at):
        return journal.ledger, words
    if saved_at.contains(journal.position):
        words.append(
            f"The journal of run {charged.run} is older than the checkpoint: it charges for "
            f"{journal.ledger.steps:,} steps, and the checkpoint for {charged.steps:,}, which "
            "counts. Steps that a killed process took after the checkpoint are not counted."
        )
        return charged, words
    words.append(
        f"The journal of run {charged.run} was written by another branch of the run, which went on "
        f"from a copy: its {journal.ledger.steps:,} steps and the checkpoint's {charged.steps:,} "
        "are both charged."
    )
    return _joined(journal.ledger, charged), words


def _joined(one: Ledger, other: Ledger) -> Ledger:
    """A ledger that charges for all that two ledgers charge for, one after the other."""
    both = one.copy()
    for entry in other.entries:
        both.charge(entry.event, entry.partition, steps=entry.steps, times=entry.count)
    both.steps = one.steps + other.steps
    return both

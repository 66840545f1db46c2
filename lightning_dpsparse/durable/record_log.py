"""An append-only file of records, in which a torn write, a flipped bit and an old copy show.

A line is a record, as JSON, behind a digest of it and of the digest of the line before:

    digest_n = SHA-256(digest_(n-1) + text_n),    text_n = {"sequence": n, ...}

A record counts once its line has been synced. A power cut may leave a part of a line at the end,
which was never confirmed to anybody: it is cut off. A whole line with a wrong digest was damaged
later. Two files with the same record, by sequence and digest, have the same history up to it, so
that whoever remembers a position can tell whether a file is older than that, or another one.

A file would grow for ever, so it is written anew, with its newest record only, when it has become
long. The digests go on: the first line of a file says what came before it (`after`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_dpsparse.durable.files import make_folder, sync_folder
from lightning_dpsparse.durable.locks import close_locked, is_still_at, open_locked
from lightning_dpsparse.refused import Refused

LINES = 256
"""Number of lines after which a file is written anew."""


@dataclass(frozen=True)
class Record:
    """One record, and its position: what came before it is fixed by sequence and digest."""

    sequence: int
    digest: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Contents:
    """What a log holds."""

    newest: Record | None = None
    """The newest record; None if there is none."""
    lines: int = 0
    """Number of lines up to the newest record."""
    size: int = 0
    """Number of bytes up to the end of the newest record."""
    damaged: int = 0
    """Number of lines before the newest record that are not as they were written."""
    is_torn: bool = False
    """Whether a part of a line follows: the last write was cut off."""
    may_lack_a_record: bool = False
    """Whether zeros follow. That is a write which was cut off, or a record that was lost later."""
    has_end: bool = True
    """Whether the line of the newest record has a proper end."""


def read_log(path: Path) -> Contents:
    """What a log holds. A log whose newest line was damaged after it was written is refused."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Contents()
    except OSError as error:
        raise Refused(
            f"Expected a file that can be read at {str(path)!r}, found that it cannot: "
            f"{error.strerror}. Make it readable, or restore it from a copy."
        ) from None
    newest, line, lines, size, end = None, "", 0, 0, 0
    readable = 0
    for number, raw in enumerate(data.split(b"\n")[:-1], 1):
        end += len(raw) + 1
        record = _record(raw, line)
        line = raw[:64].decode(errors="replace")
        if record is not None:
            newest, lines, size, readable = record, number, end, readable + 1
    tail = data[size:]
    if tail and b"\0" not in tail:
        if b"\n" in tail:
            raise Refused(
                f"Expected a whole record at the end of {str(path)!r}, found one that was damaged "
                "after it was written. Restore the file from a copy. Without one, remove it: the "
                "run then goes on with what its checkpoint knows, and the report says so."
            )
        # Perhaps only the end of the line is wrong. Then the record may have been confirmed.
        record = _record(tail, line) or _record(tail[:-1], line)
        if record is not None:
            return Contents(record, lines + 1, len(data), lines - readable, has_end=False)
    return Contents(newest, lines, size, lines - readable, bool(tail), b"\0" in tail)


def _record(raw: bytes, before: str) -> Record | None:
    """The record of a line; None if the line is not as it was written."""
    digest, _, text = raw.partition(b" ")
    try:
        data = json.loads(text)
        after, sequence = str(data.pop("after", before)), int(data.pop("sequence"))
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return None
    if digest != _digest(after, text).encode():
        return None
    return Record(sequence, _digest(after, text), data)


def _digest(before: str, text: bytes) -> str:
    return hashlib.sha256(before.encode() + text).hexdigest()


class RecordLog:
    """A log that this process appends to. If another one has it open: `BlockingIOError`.

    Guarantees: once `append` has returned, no kill and no power cut takes the record away. After a
    failed `append` the log holds what it held before, and takes no further record.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        make_folder(path.parent)
        descriptor = open_locked(path)
        if descriptor is None:
            raise BlockingIOError(f"another process holds {str(path)!r}")
        self._descriptor: int | None = descriptor
        try:
            found = read_log(path)
            if found.is_torn:
                os.ftruncate(descriptor, found.size)
            os.fsync(descriptor)
            sync_folder(path.parent)
        except BaseException:
            self.close()
            raise
        self.newest, self._size = found.newest, found.size
        self.next_sequence = 0 if found.newest is None else found.newest.sequence + 1
        """Sequence of the next record. It may be raised, and never lowered."""
        # A record whose line has no proper end must not get another line behind it.
        self._lines = found.lines if found.has_end else LINES

    @property
    def is_open(self) -> bool:
        """Whether records can still be appended."""
        return self._descriptor is not None

    def append(self, data: Mapping[str, Any]) -> Record:
        """Write a record, and return once it has reached the disk."""
        descriptor, newest = self._descriptor, self.newest
        if descriptor is None or not is_still_at(descriptor, self.path):
            raise Refused(
                f"Expected {str(self.path)!r} where it was when training began, found that it is "
                "gone: it was moved, deleted or replaced. Nothing was updated. Leave a run's "
                "folder alone until the run has ended."
            )
        is_first = newest is None or self._lines >= LINES
        before = "" if newest is None else newest.digest
        record, line = _line(self.next_sequence, before, data, is_first=is_first)
        try:
            if is_first and newest is not None:
                self._begin_anew(line)
            else:
                _write_all(descriptor, line)
                os.fsync(descriptor)
        except OSError as error:
            self._give_up()
            raise Refused(
                f"Expected to write to {str(self.path)!r}, found that it failed: "
                f"{error.strerror or error}. Nothing was updated. Make the disk writable, with "
                "room on it, and go on from the last checkpoint."
            ) from error
        self.newest, self._size = record, len(line) + (0 if is_first else self._size)
        self._lines = 1 if is_first else self._lines + 1
        self.next_sequence += 1
        return record

    def _begin_anew(self, line: bytes) -> None:
        """Put a file in the place of the present one that holds one line."""
        draft = self.path.with_suffix(".draft")
        descriptor = open_locked(draft, is_new=True)
        assert descriptor is not None  # whoever holds the log holds its draft
        try:
            _write_all(descriptor, line)
            os.fsync(descriptor)
            os.replace(draft, self.path)
            sync_folder(self.path.parent)
        except BaseException:
            close_locked(descriptor)
            raise
        old, self._descriptor = self._descriptor, descriptor
        assert old is not None
        close_locked(old)

    def _give_up(self) -> None:
        """Take back a part of a line, if that still works, and close the log."""
        if self._descriptor is not None and is_still_at(self._descriptor, self.path):
            with suppress(OSError):  # the next reader cuts it off
                os.ftruncate(self._descriptor, self._size)
        self.close()

    def close(self) -> None:
        """Let another process go on with the log."""
        if self._descriptor is not None:
            close_locked(self._descriptor)
            self._descriptor = None


def _line(
    sequence: int, before: str, data: Mapping[str, Any], *, is_first: bool
) -> tuple[Record, bytes]:
    """A record and its line. The first line of a file says what came before it."""
    head = {"after": before} if is_first else {}
    text = json.dumps({"sequence": sequence, **head, **data}, separators=(",", ":")).encode()
    digest = _digest(before, text)
    return Record(sequence, digest, data), digest.encode() + b" " + text + b"\n"


def _write_all(descriptor: int, data: bytes) -> None:
    written = 0
    while written < len(data):
        written += os.write(descriptor, data[written:])

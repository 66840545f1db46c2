"""Files and folders that have two states: what programs see, and what a power cut would leave.

Every inode keeps its durable state and the changes that are pending since. A sync applies the
pending changes to the durable state. A power cut leaves either the durable state alone, or, by a
seed, one of the states that a disk may be in when it took some of the pending changes and not the
others. `tests/support/lossy_volume.py` gives these inodes the operations of a file system.
"""

from __future__ import annotations

import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

SECTOR, PAGE = 512, 4096

Write = tuple[int, bytes]  # an offset, and what was written there
Resize = tuple[int, None]  # the new size
Entries = dict[bytes, "Inode"]
EntryChange = dict[bytes, "Inode | None"]  # names that change as one; None is a removed name


@dataclass(frozen=True, kw_only=True)
class Attributes:
    """What `chmod`, `chown` and `utime` change, with times in nanoseconds."""

    mode: int
    uid: int = 0
    gid: int = 0
    atime: int = field(default_factory=time.time_ns)
    mtime: int = field(default_factory=time.time_ns)
    ctime: int = field(default_factory=time.time_ns)


class Inode:
    """A symbolic link, a socket or a pipe; files and folders add what they hold."""

    def __init__(self, number: int, attributes: Attributes, target: bytes = b"") -> None:
        self.number, self.attributes, self.target = number, attributes, target
        self.durable_attributes = attributes  # those of its creation come with its name
        self.links = self.opens = 0
        self.pending: list[Any] = []

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.attributes.mode)

    @property
    def size(self) -> int:
        return len(self.target)

    def set(self, **changes: int) -> None:
        """Change attributes, and the time of the change."""
        self.attributes = replace(self.attributes, **{"ctime": time.time_ns(), **changes})

    def sync(self, *, only_data: bool = False) -> None:
        if not only_data:
            self.durable_attributes = self.attributes

    def lose(self, rng: Random | None) -> None:
        """Go back to the durable state, or to one that `rng` finds between that and the current."""
        if rng is None or rng.random() < 0.5:
            self.attributes = self.durable_attributes
        self.durable_attributes = self.attributes


class File(Inode):
    def __init__(self, number: int, attributes: Attributes) -> None:
        super().__init__(number, attributes)
        self.data, self.durable = bytearray(), bytearray()
        self.pending: list[Write | Resize] = []
        self.doubtful: list[Write | Resize] = []  # a sync failed; no later one will write them
        self._was_refused = False

    @property
    def size(self) -> int:
        return len(self.data)

    def write(self, offset: int, payload: bytes) -> None:
        self._change((offset, payload))

    def resize(self, size: int) -> None:
        self._change((size, None))

    def _change(self, change: Write | Resize) -> None:
        apply_change(self.data, change)
        self.pending.append(change)
        now = time.time_ns()
        self.attributes = replace(self.attributes, mtime=now, ctime=now)

    def sync(self, *, only_data: bool = False) -> None:
        super().sync(only_data=only_data)
        for change in self.pending:
            apply_change(self.durable, change)
        self.pending.clear()
        self.doubtful.clear()

    def fail_sync(self) -> None:
        """Let a sync fail as Linux does: programs still see the data, and it counts as clean."""
        self._was_refused = True
        self.doubtful += self.pending
        self.pending.clear()

    def lose(self, rng: Random | None) -> None:
        super().lose(rng)
        changes = [*self.doubtful, *self.pending]
        if changes and rng is not None:
            self.durable = torn(self.durable, changes, rng)
        if changes or self._was_refused:
            self.data = bytearray(self.durable)
        self.pending, self.doubtful, self._was_refused = [], [], False


class Folder(Inode):
    def __init__(self, number: int, attributes: Attributes) -> None:
        super().__init__(number, attributes)
        self.entries: Entries = {}
        self.durable: Entries = {}
        self.pending: list[EntryChange] = []

    @property
    def size(self) -> int:
        return 0

    def change(self, changes: EntryChange) -> None:
        """Add, replace and remove names in one step, as a rename inside a folder does."""
        _rename(self.entries, changes)
        self.pending.append(changes)
        now = time.time_ns()
        self.attributes = replace(self.attributes, mtime=now, ctime=now)

    def sync(self, *, only_data: bool = False) -> None:
        super().sync(only_data=only_data)
        for changes in self.pending:
            _rename(self.durable, changes)
        self.pending.clear()

    def lose(self, rng: Random | None) -> None:
        super().lose(rng)
        if rng is not None:
            arrives = rng.choice((0.0, 0.5, 0.5, 1.0))
            for changes in self.pending:
                if rng.random() < arrives:
                    _rename(self.durable, changes)
        self.entries, self.pending = dict(self.durable), []


def _rename(entries: Entries, changes: EntryChange) -> None:
    for name, inode in changes.items():
        if inode is None:
            entries.pop(name, None)
        else:
            entries[name] = inode


def apply_change(data: bytearray, change: Write | Resize) -> None:
    """Write or resize in place; what nobody wrote is zeros."""
    offset, payload = change
    if payload is None and offset < len(data):
        del data[offset:]
        return
    if offset > len(data):
        data.extend(bytes(offset - len(data)))
    if payload is not None:
        data[offset : offset + len(payload)] = payload


def torn(durable: bytearray, changes: Sequence[Write | Resize], rng: Random) -> bytearray:
    """A state of the disk that took some of the changes: none, all, the first ones, or any."""
    way = rng.choices(("none", "all", "first", "any"), (1, 1, 3, 3))[0]
    if way == "any":
        return _any_came(durable, changes, rng)
    came = {"none": 0, "all": len(changes)}.get(way, rng.randint(0, len(changes)))
    data = bytearray(durable)
    for change in changes[:came]:
        apply_change(data, change)
    if way == "first" and came < len(changes):
        offset, payload = changes[came]
        if payload:
            end = offset + rng.randint(0, len(payload))
            if end < len(data):  # sectors that hold old data change as a whole
                end -= end % SECTOR
            if end > offset:
                apply_change(data, (offset, payload[: end - offset]))
    return data


def _any_came(durable: bytearray, changes: Sequence[Write | Resize], rng: Random) -> bytearray:
    """Every sector, or page, as it was after a number of changes of its own; the size, too."""
    unit = rng.choice((SECTOR, PAGE)) if sum(len(c[1] or b"") for c in changes) < 1 << 20 else PAGE
    last = _LastChanges(rng, len(changes))
    data, sizes = bytearray(durable), [len(durable)]
    for index, (offset, payload) in enumerate(changes):
        size = sizes[-1]
        # A smaller size clears what was behind it; a write changes what it covers.
        end = size if payload is None else offset + len(payload)
        if end > len(data):
            data.extend(bytes(end - len(data)))
        start = offset
        while start < end:
            stop = min(end, start - start % unit + unit)
            if index < last[start // unit]:
                part = slice(start - offset, stop - offset)
                data[start:stop] = bytes(stop - start) if payload is None else payload[part]
            start = stop
        sizes.append(offset if payload is None else max(size, end))
    size = rng.choice((sizes[0], sizes[-1], rng.choice(sizes)))
    if rng.random() < 0.25:
        size = rng.randint(min(sizes), max(sizes))
    apply_change(data, (size, None))
    return data


class _LastChanges(dict[int, int]):
    """How many of the changes each sector or page has seen; chosen when first asked for."""

    def __init__(self, rng: Random, number: int) -> None:
        super().__init__()
        self._rng, self._number = rng, number

    def __missing__(self, unit: int) -> int:
        self[unit] = self._rng.choice((0, self._number, self._rng.randint(0, self._number)))
        return self[unit]


class Survivors:
    """What can be reached from the root once every inode has lost what the cut takes.

    A folder that was renamed into another and synced there alone has two names on the disk. No
    folder may have two parents, so it is copied for the second name; its files have both names.
    """

    def __init__(self, seed: int | None, first_free_number: int) -> None:
        self._seed, self.next_number = seed, first_free_number
        self.used = 0
        self._seen: set[int] = set()
        self._above: list[int] = []

    def of(self, inode: Inode) -> Inode | None:
        """The inode as it is found after the cut; None is a folder inside itself."""
        number = inode.number
        if number in self._above:
            return None
        if number not in self._seen:
            self._seen.add(number)
            inode.lose(None if self._seed is None else Random(f"{self._seed}/{number}"))
            inode.links = inode.opens = 0
            self.used += inode.size if isinstance(inode, File) else 0
        elif isinstance(inode, Folder):
            inode = self._copied(inode)
        if isinstance(inode, Folder):
            self._above.append(number)
            found = {name: self.of(child) for name, child in inode.entries.items()}
            inode.entries = {name: child for name, child in found.items() if child is not None}
            inode.durable = dict(inode.entries)
            self._above.pop()
        inode.links += 1
        return inode

    def _copied(self, folder: Folder) -> Folder:
        copy = Folder(self.next_number, folder.attributes)
        copy.entries = dict(folder.entries)
        self._seen.add(self.next_number)
        self.next_number += 1
        return copy

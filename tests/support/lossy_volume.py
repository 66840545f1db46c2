"""The operations of a file system on inodes that forget: POSIX, read as an adversary would.

A volume also has a capacity, faults that a test orders, and an end: once it is dead, every
operation fails with EIO, and only `reboot` gives a volume again.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator

from tests.support.lossy_inodes import Attributes, EntryChange, File, Folder, Inode, Survivors

ROOT = 1
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
# What a fault can be ordered for, and what `after` counts: bytes of writes, calls of all others.
OPERATIONS = ("write", "read", "fsync", "create", "rename", "unlink")
_SHOWN = 1 << 40  # bytes, of a disk without a capacity
_LARGEST = 1 << 36  # bytes of a file: they are in memory


def error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class Volume:
    def __init__(self, capacity: int | None = None) -> None:
        self.root = Folder(ROOT, Attributes(mode=stat.S_IFDIR | 0o755))
        self.root.links = 1
        self.capacity, self.first_capacity = capacity, capacity
        self.used = self.changes = 0
        self.dead = self.read_only = False
        self.dies_after: int | None = None  # changes from now
        self.faults: dict[str, tuple[int, int]] = {}  # the error, and how much still succeeds
        self.next_number = ROOT + 1

    # What the test orders.

    def limit(self, bytes_free: int | None) -> None:
        """Leave that much space; None brings the first capacity back."""
        self.capacity = self.first_capacity if bytes_free is None else self.used + bytes_free

    def reboot(self, seed: int | None) -> Volume:
        """The volume as it is found after a cut: without a seed, only what was synced."""
        self.dead = True
        survivors = Survivors(seed, self.next_number)
        volume = Volume(self.first_capacity)
        volume.capacity = self.capacity
        root = survivors.of(self.root)
        assert isinstance(root, Folder)
        volume.root, volume.used = root, survivors.used
        volume.next_number, volume.changes = survivors.next_number, self.changes
        return volume

    # Space and faults.

    @property
    def free(self) -> int:
        return max(0, (_SHOWN if self.capacity is None else self.capacity) - self.used)

    @property
    def total(self) -> int:
        return max(self.used, _SHOWN if self.capacity is None else self.capacity)

    def _begin_change(self) -> None:
        if self.read_only:
            raise error(errno.EROFS)
        self._count_change()

    def _count_change(self) -> None:
        if self.dies_after is not None:
            if self.dies_after == 0:
                self.dead = True
                raise error(errno.EIO)
            self.dies_after -= 1
        self.changes += 1

    def _spend(self, operation: str, amount: int = 1) -> int:
        """How much of this operation succeeds; the ordered error if nothing does."""
        if operation not in self.faults:
            return amount
        number, left = self.faults[operation]
        if left == 0 and amount > 0:
            raise error(number)
        spent = min(left, amount)
        self.faults[operation] = (number, left - spent)
        return spent

    # Names.

    def lookup(self, folder: Folder, name: bytes) -> Inode:
        try:
            return folder.entries[name]
        except KeyError:
            raise error(errno.ENOENT) from None

    def create(self, folder: Folder, name: bytes, attributes: Attributes, target: bytes) -> Inode:
        """A new file, folder, symbolic link or special file, by the type in its mode."""
        self._begin_change()
        self._check_new(folder, name)
        self._spend("create")
        if self.free == 0:
            raise error(errno.ENOSPC)
        mode, number = attributes.mode, self.next_number
        inode = Inode(number, attributes, target)
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            inode = (File if stat.S_ISREG(mode) else Folder)(number, attributes)
        self.next_number += 1
        self._set_entries(folder, {name: inode})
        return inode

    def link(self, inode: Inode, folder: Folder, name: bytes) -> None:
        self._begin_change()
        self._check_new(folder, name)
        self._spend("create")
        self._set_entries(folder, {name: inode})
        inode.set()

    def remove(self, folder: Folder, name: bytes, *, is_folder: bool) -> None:
        self._begin_change()
        inode = self.lookup(folder, name)
        if inode.is_folder != is_folder:
            raise error(errno.ENOTDIR if is_folder else errno.EISDIR)
        if isinstance(inode, Folder) and inode.entries:
            raise error(errno.ENOTEMPTY)
        self._spend("unlink")
        self._set_entries(folder, {name: None})

    def rename(self, old: Folder, name: bytes, new: Folder, new_name: bytes, flags: int) -> None:
        self._begin_change()
        if flags & ~(RENAME_NOREPLACE | RENAME_EXCHANGE):
            raise error(errno.EINVAL)
        moved, replaced = self.lookup(old, name), new.entries.get(new_name)
        if flags & RENAME_NOREPLACE and replaced is not None:
            raise error(errno.EEXIST)
        if flags & RENAME_EXCHANGE and replaced is None:
            raise error(errno.ENOENT)
        if replaced is not None and not flags & RENAME_EXCHANGE:
            if moved.is_folder != replaced.is_folder:
                raise error(errno.ENOTDIR if moved.is_folder else errno.EISDIR)
            if isinstance(replaced, Folder) and replaced.entries:
                raise error(errno.ENOTEMPTY)
        self._spend("rename")
        left = replaced if flags & RENAME_EXCHANGE else None
        if old is new:
            self._set_entries(old, {name: left, new_name: moved})
        else:  # each folder by itself: one may reach the disk without the other
            moved.links += 1
            self._set_entries(old, {name: left})
            self._set_entries(new, {new_name: moved})
            moved.links -= 1

    def _check_new(self, folder: Folder, name: bytes) -> None:
        if name in folder.entries:
            raise error(errno.EEXIST)
        if folder.links == 0:
            raise error(errno.ENOENT)  # it was removed while a program was in it

    def _set_entries(self, folder: Folder, changes: EntryChange) -> None:
        before = [folder.entries.get(name) for name in changes]
        folder.change(changes)
        for inode in filter(None, changes.values()):
            inode.links += 1
        for inode in filter(None, before):
            inode.links -= 1
            self._release_space(inode)

    # Contents.

    def open(self, inode: Inode, flags: int) -> None:
        if self.read_only and flags & os.O_ACCMODE != os.O_RDONLY:
            raise error(errno.EROFS)
        inode.opens += 1

    def close(self, inode: Inode) -> None:
        inode.opens -= 1
        self._release_space(inode)

    def _release_space(self, inode: Inode) -> None:
        if inode.links == 0 and inode.opens == 0:
            self.used -= inode.size if isinstance(inode, File) else 0

    def read(self, file: File, offset: int, size: int) -> memoryview:
        self._spend("read")
        return memoryview(file.data)[offset : offset + size]

    def write(self, file: File, offset: int, payload: memoryview, flags: int) -> int:
        """How much was written: less than all of it where the space or a fault ends inside."""
        self._begin_change()
        if offset + len(payload) > _LARGEST:
            raise error(errno.EFBIG)
        size = min(self._spend("write", len(payload)), file.size + self.free - offset)
        if size <= 0 and payload:
            raise error(errno.ENOSPC)
        self.used += max(0, offset + size - file.size)
        file.write(offset, bytes(payload[:size]))
        if flags & (os.O_SYNC | os.O_DSYNC):
            file.sync(only_data=True)
        return size

    def resize(self, file: File, size: int) -> None:
        self._begin_change()
        if size > _LARGEST:
            raise error(errno.EFBIG)
        if size - file.size > self.free:
            raise error(errno.ENOSPC)
        self.used += size - file.size
        file.resize(size)

    def set_attributes(self, inode: Inode, changes: dict[str, int]) -> None:
        self._begin_change()
        if "mode" in changes:
            changes["mode"] |= stat.S_IFMT(inode.attributes.mode)
        inode.set(**changes)

    # Syncs.

    def sync(self, inodes: list[Inode], *, only_data: bool = False) -> None:
        """Make the current state of these inodes durable, and of no other."""
        if self.read_only:
            if any(inode.pending for inode in inodes):
                raise error(errno.EROFS)
            return
        self._count_change()
        try:
            self._spend("fsync")
        except OSError:
            for inode in inodes:
                if isinstance(inode, File):
                    inode.fail_sync()
            raise
        for inode in inodes:
            inode.sync(only_data=only_data)

    def everything(self) -> Iterator[Inode]:
        """Every inode that has a name."""
        folders = [self.root]
        while folders:
            folder = folders.pop()
            yield folder
            for inode in folder.entries.values():
                if isinstance(inode, Folder):
                    folders.append(inode)
                else:
                    yield inode

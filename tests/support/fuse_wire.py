"""The kernel's side of the lossy disk: requests of FUSE in, replies out.

This speaks the protocol of `/dev/fuse` itself (`linux/fuse.h`, version 7.38) and needs no library.
A binding by paths would hide what the disk is about: requests here name inodes, so that hard links
and files without a name are what they are, renames come with their flags, and `syncfs` arrives.

The kernel caches nothing: names and attributes are valid for no time, and files are opened for
direct I/O, so that each `write` of a program is a request before it returns.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import time
import traceback
from collections.abc import Callable
from typing import Any

from tests.support.lossy_inodes import Attributes, File, Folder, Inode
from tests.support.lossy_volume import ROOT, Volume, error

MAX_WRITE = 1 << 20
_HEADERS = 4096  # bytes that a request may have before what it writes
_BLOCK = 512
_IN, _OUT = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
_ATTR, _ENTRY = struct.Struct("<6Q10I"), struct.Struct("<4Q2I")
_SETATTR, _INIT_OUT = struct.Struct("<II6QIIIIIIII"), struct.Struct("<4I2H2I2HI7I")
_DIRENT = struct.Struct("<QQII")
_BIG_WRITES, _MAX_PAGES, _INIT_EXT = 1 << 5, 1 << 22, 1 << 30
_DIRECT_IO_ALLOW_MMAP = 1 << (36 - 32)  # in the second word of flags
_OPEN_FILE = 1 | 1 << 5  # direct I/O, and nothing to flush: a close succeeds on a dead disk, too
_MODE, _UID, _GID, _SIZE, _ATIME, _MTIME, _ATIME_NOW, _MTIME_NOW = (
    1 << bit for bit in (0, 1, 2, 3, 4, 5, 7, 8)
)

Reply = bytes | memoryview | None  # None: the kernel waits for no reply


class Connection:
    """One mount of a volume. `serve` answers one request; it is False once the mount is gone."""

    def __init__(self, descriptor: int, volume: Volume, may_sync: Callable[[int], bool]) -> None:
        self.descriptor, self.volume, self._may_sync = descriptor, volume, may_sync
        self.syncs_heard = 0
        self._nodes: dict[int, Inode] = {ROOT: volume.root}
        self._lookups: dict[int, int] = {}
        self._listings: dict[int, list[tuple[bytes, Inode]]] = {}
        self._next_handle = 1
        self._buffer = bytearray(MAX_WRITE + _HEADERS)
        self._view = memoryview(self._buffer)

    def serve(self) -> bool:
        try:
            size = os.readv(self.descriptor, [self._buffer])
        except BlockingIOError:
            return True
        except OSError as failure:
            return failure.errno in (errno.ENOENT, errno.EINTR)  # the request was taken back
        _, opcode, unique, node, *caller, _, _ = _IN.unpack_from(self._buffer)
        body = self._view[_IN.size : size]
        number, reply = 0, None
        try:
            reply = self._answer(opcode, node, body, caller)
            if reply is None:
                return True
        except OSError as failure:
            number = failure.errno or errno.EIO
        except MemoryError:
            number = errno.ENOSPC
        except Exception:  # a fault of this file; the programs on the disk must not hang by it
            traceback.print_exc()
            number = errno.EIO
        content = reply or b""
        with contextlib.suppress(OSError):  # the caller is gone, or the mount
            header = _OUT.pack(_OUT.size + len(content), -number, unique)
            os.writev(self.descriptor, [header, content])
        if isinstance(content, memoryview):
            content.release()  # or the file that it shows could not grow
        return True

    def _answer(self, opcode: int, node: int, body: memoryview, caller: list[int]) -> Reply:
        if opcode in _SILENT:
            if not self.volume.dead:
                _SILENT[opcode](self, node, body)
            return _SILENT_REPLY[opcode]
        if opcode == 26:
            return self._init(body)
        if self.volume.dead:
            raise error(errno.EIO)
        if opcode not in _ANSWERS:
            raise error(errno.ENOSYS)
        if node not in self._nodes:
            raise error(errno.ESTALE)
        return _ANSWERS[opcode](self, self._nodes[node], body, caller)

    # The mount.

    def _init(self, body: memoryview) -> bytes:
        flags2 = struct.unpack_from("<I", body, 16)[0] if len(body) >= 20 else 0
        flags = _BIG_WRITES | _MAX_PAGES | _INIT_EXT
        return _INIT_OUT.pack(
            7, 38, 0, flags, 16, 12, MAX_WRITE, 1, MAX_WRITE // 4096, 0,
            flags2 & _DIRECT_IO_ALLOW_MMAP, *[0] * 7,
        )  # fmt: skip

    def _statfs(self, inode: Inode, body: memoryview, caller: list[int]) -> bytes:
        total, free = self.volume.total // _BLOCK, self.volume.free // _BLOCK
        files = (1 << 20, 1 << 20)
        return struct.pack("<5Q10I", total, free, free, *files, _BLOCK, 255, _BLOCK, *[0] * 7)

    def _syncfs(self, inode: Inode, body: memoryview, caller: list[int]) -> bytes:
        self.syncs_heard += 1
        if self._may_sync(caller[2]):
            self.volume.sync(list(self.volume.everything()))
        return b""

    # Names. Every entry that is told is one lookup, which the kernel gives back by forgetting.

    def _entry(self, inode: Inode) -> bytes:
        self._nodes[inode.number] = inode
        self._lookups[inode.number] = self._lookups.get(inode.number, 0) + 1
        return _ENTRY.pack(inode.number, 0, 0, 0, 0, 0) + _attributes(inode)

    def _lookup(self, folder: Folder, body: memoryview, caller: list[int]) -> bytes:
        return self._entry(self.volume.lookup(folder, _names(body)[0]))

    def _forget(self, node: int, body: memoryview) -> None:
        self._forget_one(node, *struct.unpack_from("<Q", body))

    def _forget_many(self, node: int, body: memoryview) -> None:
        (count,) = struct.unpack_from("<I", body)
        for pair in struct.iter_unpack("<QQ", body[8 : 8 + 16 * count]):
            self._forget_one(*pair)

    def _forget_one(self, node: int, lookups: int) -> None:
        self._lookups[node] = self._lookups.get(node, 0) - lookups
        if self._lookups[node] <= 0 and node != ROOT:
            del self._lookups[node]
            self._nodes.pop(node, None)

    def _make(self, folder: Any, name: bytes, mode: int, caller: list[int], to: bytes = b"") -> Any:
        attributes = Attributes(mode=mode, uid=caller[0], gid=caller[1])
        return self.volume.create(folder, name, attributes, to)

    def _mknod(self, folder: Folder, body: memoryview, caller: list[int]) -> bytes:
        mode = struct.unpack_from("<I", body)[0]
        return self._entry(self._make(folder, _names(body[16:])[0], mode, caller))

    def _mkdir(self, folder: Folder, body: memoryview, caller: list[int]) -> bytes:
        mode = struct.unpack_from("<I", body)[0] | stat.S_IFDIR
        return self._entry(self._make(folder, _names(body[8:])[0], mode, caller))

    def _symlink(self, folder: Folder, body: memoryview, caller: list[int]) -> bytes:
        name, target = _names(body)
        return self._entry(self._make(folder, name, stat.S_IFLNK | 0o777, caller, target))

    def _readlink(self, inode: Inode, body: memoryview, caller: list[int]) -> bytes:
        return inode.target

    def _link(self, folder: Folder, body: memoryview, caller: list[int]) -> bytes:
        inode = self._nodes[struct.unpack_from("<Q", body)[0]]
        self.volume.link(inode, folder, _names(body[8:])[0])
        return self._entry(inode)

    def _unlink(self, folder: Folder, body: memoryview, caller: list[int]) -> bytes:
        self.volume.remove(folder, _names(body)[0], is_folder=False)
        return b""

    def _rmdir(self, folder: Folder, body: memoryview, caller: list[int]) -> bytes:
        self.volume.remove(folder, _names(body)[0], is_folder=True)
        return b""

    def _rename(self, folder: Folder, body: memoryview, caller: list[int]) -> bytes:
        return self._move(folder, struct.unpack_from("<Q", body)[0], 0, body[8:])

    def _rename2(self, folder: Folder, body: memoryview, caller: list[int]) -> bytes:
        node, flags = struct.unpack_from("<QI", body)
        return self._move(folder, node, flags, body[16:])

    def _move(self, folder: Folder, node: int, flags: int, names: memoryview) -> bytes:
        new = self._nodes[node]
        assert isinstance(new, Folder)
        old_name, new_name = _names(names)
        self.volume.rename(folder, old_name, new, new_name, flags)
        return b""

    # Attributes.

    def _getattr(self, inode: Inode, body: memoryview, caller: list[int]) -> bytes:
        return bytes(16) + _attributes(inode)

    def _setattr(self, inode: Inode, body: memoryview, caller: list[int]) -> bytes:
        fields = _SETATTR.unpack_from(body)
        valid, size = fields[0], fields[3]
        (atime, mtime), (atime_rest, mtime_rest) = fields[5:7], fields[8:10]
        mode, uid, gid = fields[11], fields[13], fields[14]
        if valid & _SIZE:
            if not isinstance(inode, File):
                raise error(errno.EINVAL)
            self.volume.resize(inode, size)
        changes: dict[str, int] = {}
        for bit, name, value in (
            (_MODE, "mode", stat.S_IMODE(mode)),
            (_UID, "uid", uid),
            (_GID, "gid", gid),
            (_ATIME, "atime", atime * 10**9 + atime_rest),
            (_MTIME, "mtime", mtime * 10**9 + mtime_rest),
            (_ATIME_NOW, "atime", time.time_ns()),
            (_MTIME_NOW, "mtime", time.time_ns()),
        ):
            if valid & bit:
                changes[name] = value
        if changes and not (valid & _SIZE and set(changes) <= {"atime", "mtime"}):
            self.volume.set_attributes(inode, changes)
        return self._getattr(inode, body, caller)

    # Files.

    def _handle(self, inode: Inode, flags: int) -> bytes:
        self.volume.open(inode, flags)
        handle = self._next_handle
        self._next_handle += 1
        return struct.pack("<QII", handle, 0 if inode.is_folder else _OPEN_FILE, 0)

    def _open(self, inode: Inode, body: memoryview, caller: list[int]) -> bytes:
        return self._handle(inode, struct.unpack_from("<I", body)[0])

    def _create(self, folder: Folder, body: memoryview, caller: list[int]) -> bytes:
        flags, mode = struct.unpack_from("<II", body)
        name = _names(body[16:])[0]
        inode = self._make(folder, name, mode | stat.S_IFREG, caller)
        return self._entry(inode) + self._handle(inode, flags)

    def _read(self, file: File, body: memoryview, caller: list[int]) -> memoryview:
        _, offset, size = struct.unpack_from("<QQI", body)
        return self.volume.read(file, offset, size)

    def _write(self, file: File, body: memoryview, caller: list[int]) -> bytes:
        _, offset, size, _, _, flags = struct.unpack_from("<QQIIQI", body)
        written = self.volume.write(file, offset, body[40 : 40 + size], flags)
        return struct.pack("<II", written, 0)

    def _fallocate(self, file: File, body: memoryview, caller: list[int]) -> bytes:
        _, offset, length, mode = struct.unpack_from("<QQQI", body)
        if mode:
            raise error(errno.EOPNOTSUPP)
        if offset + length > file.size:
            self.volume.resize(file, offset + length)
        return b""

    def _release(self, node: int, body: memoryview) -> None:
        self._listings.pop(struct.unpack_from("<Q", body)[0], None)
        self.volume.close(self._nodes[node])

    def _fsync(self, inode: Inode, body: memoryview, caller: list[int]) -> bytes:
        flags = struct.unpack_from("<QI", body)[1]
        self.volume.sync([inode], only_data=bool(flags & 1))
        return b""

    def _readdir(self, folder: Folder, body: memoryview, caller: list[int]) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        if offset == 0 or handle not in self._listings:
            self._listings[handle] = [(b".", folder), (b"..", folder), *folder.entries.items()]
        reply = b""
        for index, (name, inode) in enumerate(self._listings[handle][offset:], offset + 1):
            kind = stat.S_IFMT(inode.attributes.mode) >> 12
            entry = _DIRENT.pack(inode.number, index, len(name), kind) + name
            entry += bytes(-len(entry) % 8)
            if len(reply) + len(entry) > size:
                break
            reply += entry
        return reply

    def _nothing(self, node: int, body: memoryview) -> None:
        """Requests that change nothing here."""


_ANSWERS: dict[int, Callable[..., Reply]] = {
    1: Connection._lookup, 3: Connection._getattr, 4: Connection._setattr,
    5: Connection._readlink, 6: Connection._symlink, 8: Connection._mknod, 9: Connection._mkdir,
    10: Connection._unlink, 11: Connection._rmdir, 12: Connection._rename, 13: Connection._link,
    14: Connection._open, 15: Connection._read, 16: Connection._write, 17: Connection._statfs,
    20: Connection._fsync, 27: Connection._open, 28: Connection._readdir, 30: Connection._fsync,
    35: Connection._create, 43: Connection._fallocate, 45: Connection._rename2,
    50: Connection._syncfs,
}  # fmt: skip
# Also a dead disk takes these: forgetting, closing, unmounting. An interrupt has no reply.
_SILENT: dict[int, Callable[..., None]] = {
    2: Connection._forget, 18: Connection._release, 29: Connection._release,
    36: Connection._nothing, 38: Connection._nothing, 42: Connection._forget_many,
}  # fmt: skip
_SILENT_REPLY: dict[int, bytes | None] = {2: None, 18: b"", 29: b"", 36: None, 38: b"", 42: None}


def _names(body: memoryview) -> list[bytes]:
    return bytes(body).split(b"\0")[:-1]


def _attributes(inode: Inode) -> bytes:
    kept = inode.attributes
    seconds, rest = zip(*(divmod(moment, 10**9) for moment in (kept.atime, kept.mtime, kept.ctime)))
    return _ATTR.pack(
        inode.number, inode.size, -(-inode.size // _BLOCK), *seconds, *rest,
        kept.mode, inode.links, kept.uid, kept.gid, 0, 4096, 0,
    )  # fmt: skip

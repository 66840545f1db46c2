"""System calls that Python does not have: mounts, loop devices, `syncfs`, and namespaces."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_SHARED, _BIND, _DETACH = 1 << 20, 1 << 12, 2
_LOOP_CTL_GET_FREE, _LOOP_CONFIGURE, _LOOP_AUTOCLEAR = 0x4C82, 0x4C0A, 4


def mount(source: str, target: Path, kind: str, options: str = "") -> None:
    _call("mount", source.encode(), os.fsencode(target), kind.encode(), 0, options.encode())


def share_mounts(folder: Path) -> None:
    """Let mounts below this folder appear in mount namespaces that are made later, too."""
    path = os.fsencode(folder)
    _call("mount", path, path, None, _BIND, None)
    _call("mount", None, path, None, _SHARED, None)


def unmount(target: Path, *, lazy: bool = False) -> None:
    """Lazily: programs that hold files there keep them, and nobody else finds it."""
    _call("umount2", os.fsencode(target), _DETACH if lazy else 0)


def sync_file_system(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _call("syncfs", descriptor)
    finally:
        os.close(descriptor)


def enter_namespace(path: str) -> None:
    """Move the calling thread, and no other, into a namespace."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _call("setns", descriptor, 0)
    finally:
        os.close(descriptor)


def attach_loop(backing: int) -> tuple[Path, int]:
    """A loop device over an open file, and a descriptor that keeps it.

    The kernel frees the device once the descriptor is closed and nothing is mounted from it.
    """
    control = os.open("/dev/loop-control", os.O_RDWR)
    try:
        while True:
            path = Path(f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}")
            descriptor = os.open(path, os.O_RDWR)
            # struct loop_config: the file, the block size, then struct loop_info64 with flags.
            config = bytearray(304)
            struct.pack_into("<II", config, 0, backing, 512)
            struct.pack_into("<I", config, 8 + 52, _LOOP_AUTOCLEAR)
            try:
                fcntl.ioctl(descriptor, _LOOP_CONFIGURE, config)
                return path, descriptor
            except OSError as failure:
                os.close(descriptor)
                if failure.errno != errno.EBUSY:  # another process took it first
                    raise
    finally:
        os.close(control)


def _call(name: str, *args: object) -> None:
    if getattr(_libc, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")

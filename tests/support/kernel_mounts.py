"""System calls that Python does not have: mounts, loop devices, `syncfs`, and namespaces."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_SHARED, _SLAVE, _BIND, _RECURSIVE, _DETACH = 1 << 20, 1 << 19, 1 << 12, 1 << 14, 2
_NEW_MOUNTS, _NEW_HOSTNAME, _NEW_NETWORK = 0x00020000, 0x04000000, 0x40000000
_LOOP_CTL_GET_FREE, _LOOP_CONFIGURE, _LOOP_AUTOCLEAR = 0x4C82, 0x4C0A, 4


def mount(source: str, target: Path, kind: str, options: str = "") -> None:
    _call("mount", source.encode(), os.fsencode(target), kind.encode(), 0, options.encode())


def bind(source: Path, target: Path) -> None:
    """Show a file or folder, with all that is mounted below it, at a second place."""
    flags = _BIND | _RECURSIVE
    _call("mount", os.fsencode(source), os.fsencode(target), None, flags, None)


@contextlib.contextmanager
def mount_point(prefix: str) -> Iterator[Path]:
    """An empty folder to mount on; it goes afterwards, with what is mounted there.

    Mounts on it appear in mount namespaces that were made later, too, and so do reboots of a disk.
    """
    with contextlib.ExitStack() as closing:
        parent = Path(tempfile.mkdtemp(prefix=prefix))
        closing.callback(parent.rmdir)
        parent.chmod(0o755)  # also for processes of other users
        _call("mount", os.fsencode(parent), os.fsencode(parent), None, _BIND, None)
        closing.callback(unmount, parent, lazy=True)
        _call("mount", None, os.fsencode(parent), None, _SHARED, None)
        path = parent / "disk"
        path.mkdir()
        closing.callback(path.rmdir)
        closing.callback(unmount_if_mounted, path)
        closing.enter_context(_cleaner(path))
        yield path


@contextlib.contextmanager
def _cleaner(path: Path) -> Iterator[None]:
    """A process that removes a mount point when this process ends without doing so."""
    script = 'cat; umount -l "$1"; umount -l "$2"; rmdir "$1" "$2"'
    process = subprocess.Popen(
        ["sh", "-c", script, "sh", str(path), str(path.parent)],
        stdin=subprocess.PIPE,  # it ends with this process
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # an interrupt from the keyboard is for this process alone
    )
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def unmount(target: Path, *, lazy: bool = False) -> None:
    """Lazily: programs that hold files there keep them, and nobody else finds it."""
    _call("umount2", os.fsencode(target), _DETACH if lazy else 0)


def unmount_if_mounted(target: Path) -> None:
    with contextlib.suppress(OSError):
        unmount(target, lazy=True)


def sync_file_system(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _call("syncfs", descriptor)
    finally:
        os.close(descriptor)


def leave_namespaces() -> None:
    """Give this process a network, a hostname and mounts of its own.

    What the machine mounts and unmounts on a `mount_point` happens here, too, but not vice versa.
    """
    _call("unshare", _NEW_MOUNTS | _NEW_HOSTNAME | _NEW_NETWORK)
    _call("mount", None, b"/", None, _RECURSIVE | _SLAVE, None)


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

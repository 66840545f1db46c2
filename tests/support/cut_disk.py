"""A real file system whose power can be cut: ext4 or xfs on an image in memory.

    with CutDisk("ext4") as disk:
        (disk.path / "journal").write_bytes(b"one")
        disk.cut()      # nothing more reaches the image, and nothing is flushed
        disk.reboot()   # the image is mounted again, and the file system recovers by its journal

`LossyDisk` loses all that POSIX allows. This one loses what such a file system really loses, which
is less: an `fsync` commits the names of all files before it, too. The cut is the file system's own
shutdown without a flush of its log. What was not synced is lost; but after about 30 seconds the
kernel writes by itself, and a `sync` of any process on the machine reaches this disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Literal

from tests.support.kernel_mounts import (
    attach_loop,
    mount,
    mount_point,
    sync_file_system,
    unmount_if_mounted,
)

FileSystem = Literal["ext4", "xfs"]
_SHUTDOWN, _NO_LOG_FLUSH = 0x8004587D, 2  # _IOR('X', 125, __u32), the same for both
_MAKE = {"ext4": ["mkfs.ext4", "-q", "-F", "-m", "0"], "xfs": ["mkfs.xfs", "-q", "-f"]}
# The first mount and the image of it that a reboot mounts may be there at once: one UUID twice.
_MOUNT = {"ext4": "commit=600", "xfs": "nouuid"}
_SIZE = {"ext4": 64 << 20, "xfs": 300 << 20}  # xfs makes no smaller ones


class CutDisk:
    """A mounted disk of `size` bytes. Nothing is left of it when it is closed."""

    path: Path
    """Where it is mounted. A reboot mounts it there again."""

    def __init__(self, file_system: FileSystem = "ext4", size: int | None = None) -> None:
        self._kind, self._size = file_system, size or _SIZE[file_system]

    def __enter__(self) -> CutDisk:
        with contextlib.ExitStack() as closing:
            self._image = _new_image(self._size)
            closing.callback(lambda: os.close(self._image))
            command = [*_MAKE[self._kind], f"/proc/self/fd/{self._image}"]
            subprocess.run(command, check=True, pass_fds=[self._image], capture_output=True)
            self.path = closing.enter_context(mount_point("cut-disk-"))
            self._mount()
            if (self.path / "lost+found").exists():
                (self.path / "lost+found").rmdir()
            sync_file_system(self.path)
            self._closing = closing.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):  # it may be cut already
            self.cut()  # quicker than to write all that nobody will read
        self._closing.close()

    def cut(self) -> None:
        """Cut the power: programs stay, and their operations fail with EIO."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(descriptor)

    def reboot(self) -> None:
        """Mount what had reached the disk, which cuts the power first if it is on.

        Programs may still hold files of the old mount. So it goes on with its image, which nobody
        else will see, and the new mount is of a copy.
        """
        with contextlib.suppress(OSError):
            self.cut()
        unmount_if_mounted(self.path)
        old, self._image = self._image, _new_image(self._size)
        _copy_holes_and_data(old, self._image, self._size)
        os.close(old)
        self._mount()

    def _mount(self) -> None:
        device, keeper = attach_loop(self._image)
        try:
            mount(str(device), self.path, self._kind, _MOUNT[self._kind])
        finally:
            os.close(keeper)


def _new_image(size: int) -> int:
    image = os.memfd_create("cut-disk")
    os.ftruncate(image, size)
    return image


def _copy_holes_and_data(source: int, target: int, size: int) -> None:
    at = 0
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError:  # a hole until the end
            return
        end = os.lseek(source, at, os.SEEK_HOLE)
        while at < end:
            at += os.pwrite(target, os.pread(source, min(end - at, 1 << 20), at), at)


@lru_cache(maxsize=2)
def why_no_loop(file_system: FileSystem = "ext4") -> str | None:
    """Why this machine cannot mount such an image; None if it can. For `pytest.mark.skipif`."""
    program = _MAKE[file_system][0]
    if shutil.which(program) is None:
        return f"{program} is not installed"
    try:
        with CutDisk(file_system):
            return None
    except (OSError, subprocess.CalledProcessError) as failure:
        return f"an image of {file_system} cannot be mounted here: {failure}"

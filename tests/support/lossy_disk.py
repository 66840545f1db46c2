"""A disk in memory that forgets, at a power cut, what no program has synced.

    with LossyDisk() as disk:
        (disk.path / "journal").write_bytes(b"one")   # neither the data nor the name is durable
        disk.cut()                                    # from here on every operation fails with EIO
        disk.reboot()                                 # the same path again, and no journal

What is durable is what POSIX promises, and nothing that file systems give beyond it:

- `fsync` or `fdatasync` of a file: its data and its size. Not its name, and after `fdatasync` not
  its mode. `O_SYNC` and `O_DSYNC` sync the file at each write.
- `fsync` of a folder: the names in it, each with the mode of its creation. A rename inside a folder
  is one change; one between two folders is two, and each folder keeps its own.
- `sync` and `syncfs` by the test or by processes that it started: everything, where the kernel
  tells (`hears_sync`). Others' are ignored: they would make a test pass or fail by chance.

After a failed `fsync` a file is as Linux leaves it: programs still read the data, and a later
`fsync` succeeds without it. To a folder a failed `fsync` does nothing, and a later one counts.

The file system is a process of its own (`tests/support/lossy_server.py`) that speaks FUSE. It keeps
in memory what programs see, what is durable, and all writes in between; holes of a file count as
data. Extended attributes and `O_TMPFILE` are refused. Locks are the kernel's; a reboot ends them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from functools import lru_cache
from multiprocessing import Pipe
from multiprocessing.reduction import send_handle
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from tests.support.kernel_mounts import (
    attach_loop,
    mount,
    mount_point,
    sync_file_system,
    unmount,
    unmount_if_mounted,
)
from tests.support.lossy_volume import OPERATIONS

_REPOSITORY = Path(__file__).parents[2]
_OPTIONS = "rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
_PATIENCE = 60.0  # seconds for one order


class LossyDisk:
    """A mounted disk of `capacity` bytes, or without a limit; the folder goes when it is closed."""

    path: Path
    """Where it is mounted. A reboot mounts it there again."""
    hears_sync: bool
    """Whether this kernel tells a FUSE file system of `sync` and `syncfs`."""

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = capacity

    def __enter__(self) -> LossyDisk:
        with contextlib.ExitStack() as closing:
            self.path = closing.enter_context(mount_point("lossy-disk-"))
            self._start_server()
            closing.callback(self._stop_server)
            self._attach()
            sync_file_system(self.path)
            self.hears_sync = self._order("syncs_heard") > 0
            self._order("set", "changes", 0)
            self._closing = closing.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._closing.close()

    def cut(self, after: int | None = None) -> None:
        """Cut the power: now, or instead of the change that follows `after` more changes.

        A change is a request that changes or syncs something; `changes` counts them. A large write
        is a change per MiB.
        """
        self._order("cut", after)

    def reboot(self, keep: Literal["nothing", "some"] = "nothing", seed: int = 0) -> None:
        """Come back with what was durable and, if `keep` is "some", by `seed` some of the rest.

        Some: each file as after its first changes, the last one in part; or each sector of it as
        it was at any time since its last sync, with a size of that time. Each change of a folder
        and of a mode independently. A reboot ends failures and `read_only`; a limit stays.
        """
        if keep not in ("nothing", "some"):
            raise ValueError(f'Expected keep="nothing" or "some", found {keep!r}.')
        self.cut()
        unmount_if_mounted(self.path)
        self._order("reboot", seed if keep == "some" else None)
        self._attach()

    def limit(self, bytes_free: int | None) -> None:
        """Leave so many free bytes; None is the first capacity again.

        A write that does not fit is short, and the next one fails with ENOSPC. With no byte left
        nothing can be created.
        """
        self._order("limit", bytes_free)

    def fail(self, operation: str, error: int, after: int = 0) -> None:
        """Let an operation fail with this errno after so many successes, until `heal`.

        For "write" `after` counts bytes, and the write that crosses it is short. For "read",
        "fsync" (of files and folders, and `syncfs`), "create" (also mkdir, link, symlink),
        "rename" and "unlink" (also rmdir) it counts calls.
        """
        if operation not in OPERATIONS:
            raise ValueError(f"Expected one of {OPERATIONS}, found {operation!r}.")
        self._order("fail", operation, error, after)

    def heal(self) -> None:
        """End all ordered failures. Space, `read_only` and a cut stay."""
        self._order("set", "faults", {})

    def read_only(self, on: bool) -> None:
        """Refuse changes with EROFS, as a file system does that found itself broken."""
        self._order("set", "read_only", on)

    @property
    def changes(self) -> int:
        """How many requests have changed or synced something since the disk was made."""
        return self._order("get", "changes")

    @property
    def is_dead(self) -> bool:
        """Whether the power is cut, also by `cut(after=...)`."""
        return self._order("get", "dead")

    def _start_server(self) -> None:
        self._pipe, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-m", "tests.support.lossy_server", str(theirs.fileno())]
            self._server = subprocess.Popen(
                [*command, "" if self._capacity is None else str(self._capacity)],
                cwd=_REPOSITORY,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )

    def _stop_server(self) -> None:
        self._pipe.close()
        try:
            self._server.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def _attach(self) -> None:
        descriptor = mount_fuse(self.path)
        try:
            self._pipe.send(("attach", ()))
            send_handle(self._pipe, descriptor, self._server.pid)
            self._answer()
        finally:
            os.close(descriptor)

    def _order(self, name: str, *args: Any) -> Any:
        self._pipe.send((name, args))
        return self._answer()

    def _answer(self) -> Any:
        if not self._pipe.poll(_PATIENCE):
            raise TimeoutError(f"the disk did not answer within {_PATIENCE} s")
        done, answer = self._pipe.recv()
        if not done:
            raise answer
        return answer


def mount_fuse(path: Path) -> int:
    """Mount there, and return the descriptor by which the kernel asks.

    The kernel passes `syncfs` to file systems on block devices alone. So this one has a device,
    which nobody reads; without loop devices it is mounted without.
    """
    descriptor = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={descriptor},{_OPTIONS}"
    try:
        try:
            nothing = os.memfd_create("lossy-disk")
            with os.fdopen(nothing, "wb") as backing:
                backing.truncate(1 << 20)
                device, keeper = attach_loop(nothing)
            try:
                mount(str(device), path, "fuseblk", options)
            finally:
                os.close(keeper)
        except OSError:
            mount("lossy-disk", path, "fuse", options)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@lru_cache(maxsize=1)
def why_no_fuse() -> str | None:
    """Why this machine cannot mount a lossy disk; None if it can. For `pytest.mark.skipif`."""
    try:
        with tempfile.TemporaryDirectory(prefix="lossy-disk-") as folder:
            os.close(mount_fuse(Path(folder)))
            unmount(Path(folder), lazy=True)
    except OSError as failure:
        return f"a FUSE file system cannot be mounted here: {failure}"
    return None

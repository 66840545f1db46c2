"""A file that one process holds at a time.

The lock belongs to the open file (`flock`), and ends with the process that opened it, however that
ends. A forked child shares open files, and would hold the lock on when its parent is dead: loader
workers outlive a killed trainer by seconds. So locked files are closed in every child that Python
forks. Whoever deletes a locked file and makes another of its name does not get the lock: the file
is looked up again by its name (`is_still_at`).
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from lightning_dpsparse.durable.files import FILE_MODE
from lightning_dpsparse.refused import Refused

_held: set[int] = set()
"""Descriptors of all locked files of this process."""


def _close_in_child() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


def open_locked(path: Path, *, is_new: bool = False) -> int | None:
    """Open a file for reading and appending, and lock it. None if another process holds it.

    `is_new` makes the file anew, or empties what is there.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if is_new else 0)
    while True:
        descriptor = os.open(path, flags, FILE_MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:
            os.close(descriptor)
            raise Refused(
                f"Expected a file system with locks at {str(path)!r}, found that it has none "
                f"({error.strerror}): two runs could spend one budget. Put the run's folder "
                "(default_root_dir) on another file system, or mount this one with locks."
            ) from None
        if is_still_at(descriptor, path):  # else it was replaced between the two calls
            _held.add(descriptor)
            return descriptor
        os.close(descriptor)


def is_still_at(descriptor: int, path: Path) -> bool:
    """Whether a path still names an open file. It may have been moved, deleted or replaced."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def close_locked(descriptor: int) -> None:
    """Close a file, and let others lock it."""
    if descriptor in _held:
        _held.remove(descriptor)
        os.close(descriptor)

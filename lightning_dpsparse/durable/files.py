"""Folders and files that have reached the disk, and that only their owner can read."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from lightning_dpsparse.refused import Refused

FOLDER_MODE, FILE_MODE = 0o700, 0o600
"""A run's files tell what was trained on whom, so that nobody else on the host may read them."""

_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EROFS)
"""What file systems answer that have no way, or no need, to sync a folder."""


def sync_file(path: Path) -> None:
    """Wait until the contents of a file have reached the disk. Its name is its folder's."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder have reached the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> Path:
    """Create a folder and its parents, such that no power cut takes them away again.

    Folders that are new are readable by their owner only. All folders above are synced, up to the
    mount point, because others (a logger, say) may have made them a moment ago without that.
    """
    folder = folder.absolute()
    try:
        for path in (*reversed(folder.parents), folder):
            if not path.is_dir():
                path.mkdir(mode=FOLDER_MODE, exist_ok=True)
    except (OSError, ValueError) as error:  # a ValueError of a name that no file can have
        raise Refused(
            f"Expected a folder at {str(folder)!r}, or a place where it can be made, found that it "
            f"cannot: {getattr(error, 'strerror', None) or error}. Name another one."
        ) from error
    device = folder.stat().st_dev
    for parent in folder.parents:
        if parent.stat().st_dev != device:
            break
        try:
            sync_folder(parent)
        except PermissionError:
            break  # somebody else's folder: it was there before
    return folder


def write_file(path: Path, data: bytes) -> None:
    """Write a file that is old or new after a power cut, and never in between."""
    write_files(path.parent, {path.name: data})


def write_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write some files of a folder, each of which is old or new after a power cut.

    Guarantees: if one of them cannot be written, none is replaced.
    """
    drafts = {name: folder / f".{name}.{secrets.token_hex(4)}.tmp" for name in contents}
    try:
        for name, draft in drafts.items():
            _write_new(draft, contents[name])
        for name, draft in drafts.items():
            os.replace(draft, folder / name)
    finally:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)
    sync_folder(folder)


def _write_new(path: Path, data: bytes) -> None:
    """Write a new file, and wait until its contents have reached the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())

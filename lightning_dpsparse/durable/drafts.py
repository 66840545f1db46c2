"""A directory that appears whole under its name, or not at all.

A directory is written as a *draft*: beside its final place, under a hidden name, locked by the
process that makes it. When it is whole and has reached the disk, it takes its name in one step, and
what had the name before goes. A draft that nobody holds any more was left by a process that died.
`clean` removes it, or gives it its name if it was whole and the name is free.

Names of drafts have nothing of the final name in them: Lightning looks for its files by parts of
names.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from lightning_dpsparse.durable.files import FOLDER_MODE, make_folder, sync_folder
from lightning_dpsparse.durable.locks import close_locked, open_locked
from lightning_dpsparse.durable.manifest import MANIFEST_NAME, Manifest, read_manifest
from lightning_dpsparse.refused import Refused

_PREFIX, LOCK_NAME = ".dpsparse-draft-", ".lock"
_EXCHANGE, _HERE = 2, -100  # RENAME_EXCHANGE and AT_FDCWD of Linux
NAME_KEY = "name"
"""Where a manifest says what name its directory should have."""


class Draft:
    """A directory that is being written. The process that made it ends it, one way or the other.

    Args:
        path: The final place.
    """

    def __init__(self, path: Path) -> None:
        make_folder(path.parent)
        self.path = path.absolute()
        self.folder = path.parent / f"{_PREFIX}{secrets.token_hex(8)}"
        self.folder.mkdir(mode=FOLDER_MODE)
        self._lock = open_locked(self.folder / LOCK_NAME)

    def commit(self) -> None:
        """Take the final name. All files in it have been synced, and then the manifest was written.

        Guarantees: at no moment is there neither the old directory nor the new one, and after a
        power cut one of them is there, whole.
        """
        _put_in_place(self.folder, self.path)  # its names are synced since the manifest was written
        (self.path / LOCK_NAME).unlink()
        self._release()
        remove_tree(self.folder)  # what had the name before

    def abandon(self) -> None:
        """Leave nothing behind."""
        self._release()
        remove_tree(self.folder)

    def _release(self) -> None:
        if self._lock is not None:
            close_locked(self._lock)
            self._lock = None


def _put_in_place(draft: Path, path: Path) -> None:
    """Give a draft its final name. What had that name has the draft's name afterwards."""
    if not os.path.lexists(path):
        os.rename(draft, path)
    elif not _exchange(draft, path):
        # A file system that cannot exchange names. `clean` mends it if it stops in between.
        aside = path.parent / f"{_PREFIX}{secrets.token_hex(8)}"
        os.rename(path, aside)
        os.rename(draft, path)
        os.rename(aside, draft)
    sync_folder(path.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False where that is not possible."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    return bool(rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0)


def remove(path: Path) -> None:
    """Remove a directory, or a file, such that no power cut leaves a part of it under its name."""
    if not os.path.lexists(path):
        return
    aside = path.parent / f"{_PREFIX}{secrets.token_hex(8)}"
    os.rename(path, aside)
    sync_folder(path.parent)
    remove_tree(aside)


def remove_tree(path: Path) -> None:
    """Remove what is there, the manifest first: what is left of it is not whole any more."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
        return
    with suppress(OSError):
        (path / MANIFEST_NAME).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def clean(folder: Path) -> None:
    """Remove or finish the drafts in a folder that nobody works at any more."""
    orphans = [draft for draft in folder.glob(f"{_PREFIX}*") if _is_orphan(draft)]
    for draft in sorted(orphans, key=lambda d: d.stat().st_mtime, reverse=True):
        manifest = _manifest_of(draft)
        name = None if manifest is None else manifest.about.get(NAME_KEY)
        # A name has no folders in it. One that has is somebody's joke.
        if isinstance(name, str) and name == Path(name).name and not (folder / name).exists():
            _put_in_place(draft, folder / name)
            (folder / name / LOCK_NAME).unlink(missing_ok=True)
        else:
            remove_tree(draft)


def _is_orphan(draft: Path) -> bool:
    lock = draft / LOCK_NAME
    if not lock.exists():
        return True
    descriptor = open_locked(lock)
    if descriptor is None:
        return False
    close_locked(descriptor)
    return True


def _manifest_of(draft: Path) -> Manifest | None:
    try:
        return read_manifest(draft)
    except Refused:
        return None

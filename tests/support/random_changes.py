"""Random changes of a folder, the same for the same seed on every file system."""

from __future__ import annotations

import ctypes
import os
import stat
from pathlib import Path
from random import Random

RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
_AT_FDCWD = -100
_libc = ctypes.CDLL(None, use_errno=True)


def rename_with(flags: int, old: Path, new: Path) -> None:
    """`renameat2`, which Python does not have."""
    paths = os.fsencode(old), os.fsencode(new)
    if _libc.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def sync_path(path: Path) -> None:
    """`fsync` of a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def change(root: Path, rng: Random) -> object:
    """Change something below the root; what came of it, or the number of the error."""
    old, new = _any_path(root, rng), _any_path(root, rng)
    kind = rng.randrange(14)
    data = rng.randbytes(rng.choice((0, 1, 100, 700, 5000)))
    offset, flags = rng.randrange(2000), rng.choice((RENAME_NOREPLACE, RENAME_EXCHANGE))
    try:
        if kind == 0:
            old.write_bytes(data)
        elif kind == 1:
            with open(old, "ab") as file:
                file.write(data)
        elif kind == 2:
            with open(old, "r+b") as file:
                file.seek(offset)
                file.write(data)
        elif kind == 3:
            os.truncate(old, offset)
        elif kind in (4, 5):
            old.mkdir(mode=rng.choice((0o755, 0o700)))
        elif kind == 6:
            old.unlink()
        elif kind == 7:
            old.rmdir()
        elif kind in (8, 9):
            os.replace(old, new)
        elif kind == 10:
            rename_with(flags, old, new)
        elif kind == 11:
            os.link(old, new)
        elif kind == 12:
            new.symlink_to(os.path.basename(old))
        else:
            old.chmod(rng.choice((0o600, 0o640, 0o755)))
    except OSError as failure:
        return kind, failure.errno
    return kind, None


def _any_path(root: Path, rng: Random) -> Path:
    """Few names, so that changes meet; folders in folders, so that they meet across folders."""
    return root.joinpath(*(rng.choice("abc") for _ in range(rng.randint(1, 3))))


def tree(root: Path) -> dict[str, object]:
    """All that a program can see below the root: names, modes, contents and links."""
    found: dict[str, object] = {}
    first_names: dict[int, str] = {}
    for folder, folders, files in os.walk(root):
        folders.sort()
        for name in sorted([*folders, *files]):
            path = Path(folder, name)
            where, status = str(path.relative_to(root)), path.lstat()
            content: object = None
            if stat.S_ISREG(status.st_mode):
                first = first_names.setdefault(status.st_ino, where)
                content = (path.read_bytes(), status.st_nlink, first)
            elif stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            found[where] = (stat.filemode(status.st_mode), content)
    return found

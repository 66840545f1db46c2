"""Files that people hand around: arrays and JSON.

A file may be cut off, be of another kind than its name says, or hold text where numbers should be.
numpy answers each of these in its own way, and would run code that a pickle holds; JSON may be
nested so deep that Python gives up. The functions here read what they should, and refuse everything
else. No value of a file is in a message.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_dpsparse.refused import Refused


def read_npy(path: Path, what: str, *, is_mapped: bool = False) -> NDArray[Any]:
    """The one array of an .npy file. A mapped one is read from disk where it is asked for."""
    try:
        with path.open("rb") as file:
            if file.read(6) != b"\x93NUMPY":  # what else np.load would take: archives, pickles
                raise ValueError("no .npy file")
        array = np.load(path, mmap_mode="r" if is_mapped else None, allow_pickle=False)
        is_whole = not is_mapped or path.stat().st_size == array.offset + array.nbytes
    except Exception as error:  # numpy raises nearly anything over a damaged file
        raise Refused(_damaged(path, what, "numpy.save")) from error
    if not is_whole:
        raise Refused(_damaged(path, what, "numpy.save"))
    return array


def read_npz(path: Path, names: Iterable[str], what: str) -> dict[str, NDArray[Any]]:
    """Those arrays of an .npz file that have one of these names."""
    try:
        # numpy leaves a file open that it opened and could not read.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: np.asarray(arrays[name]) for name in names if name in arrays}
    except Exception as error:  # numpy raises nearly anything over a damaged file
        raise Refused(_damaged(path, what, "numpy.savez")) from error


def read_json(path: Path) -> Any:
    """What a JSON file holds; a `ValueError` if it cannot be read, for whatever reason."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"no JSON: {type(error).__name__}") from error


def has_numbers(array: NDArray[Any]) -> bool:
    """Whether an array holds real numbers, all of them finite."""
    return array.dtype.kind in "biuf" and bool(np.isfinite(array).all())


def is_readable_file(path: Path) -> bool:
    """Whether there is an ordinary file at this path that can be opened."""
    try:
        if not path.is_file():
            return False
        with path.open("rb"):
            return True
    except (OSError, ValueError):  # a name that is too long, or that holds a zero byte
        return False


def _damaged(path: Path, what: str, writer: str) -> str:
    return (
        f"Expected {what} that can be read as numbers in {str(path)!r}, found something else, or "
        f"only a part. Write the file with {writer}."
    )

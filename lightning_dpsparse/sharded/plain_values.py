"""Files that hold plain values can be read without trusting whoever wrote them.

A pickle runs whatever code its writer put into it. torch has a way to read numbers, texts, tensors
and containers of these alone (`weights_only`), and refuses everything else. So the entries of a
checkpoint are parted before they are written: plain ones go to one file, which is always read that
way, and *objects* (a configuration of the user's own class among the hyper-parameters, say) go to
another, which is only read if the user says that the file can be trusted.

Classes that were named to `torch.serialization.add_safe_globals` count as plain.
"""

from __future__ import annotations

import datetime
import pathlib
import pickle
from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy._core.multiarray import _reconstruct, scalar  # what pickled arrays are made by
from torch.serialization import get_safe_globals, safe_globals

from lightning_dpsparse.refused import Refused

_SCALARS = (
    type(None), bool, int, float, complex, str, bytes, bytearray,
    torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device,
    datetime.timedelta, pathlib.PosixPath, Namespace, Counter,
)  # fmt: skip
_SAFE: tuple[Any, ...] = (
    _reconstruct, scalar, np.ndarray, np.dtype, datetime.timedelta, pathlib.PosixPath, Namespace,
    *{type(np.dtype(code)) for code in np.typecodes["All"] if code != "O"},
)  # fmt: skip

KeyPath = tuple[Any, ...]
"""Keys that lead from the top of nested dictionaries to a value."""


def part_objects(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[KeyPath, Any]]:
    """Part nested dictionaries into plain values, and objects by the keys that lead to them.

    A list, tuple or set that holds an object is an object itself.
    """
    plain: dict[str, Any] = {}
    objects: dict[KeyPath, Any] = {}
    for key, value in values.items():
        if type(value) is dict and not _is_plain(value):
            plain[key], inner = part_objects(value)
            objects |= {(key, *path): found for path, found in inner.items()}
        elif _is_plain(key) and _is_plain(value):
            plain[key] = value
        else:
            objects[(key,)] = value
    return plain, objects


def put_back(plain: dict[str, Any], objects: Mapping[KeyPath, Any]) -> None:
    """Put objects where `part_objects` took them from."""
    for path, value in objects.items():
        target = plain
        for key in path[:-1]:
            target = target.setdefault(key, {})
        target[path[-1]] = value


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind in (dict, OrderedDict):
        return all(_is_plain(key) and _is_plain(inner) for key, inner in value.items())
    if kind in (list, tuple, set):
        return all(_is_plain(inner) for inner in value)
    if kind is Namespace:
        return _is_plain(vars(value))
    if isinstance(value, (np.generic, np.ndarray)):
        return kind.__module__ == "numpy" and value.dtype != object
    return kind in _SCALARS or kind in get_safe_globals()


def type_names(objects: Mapping[KeyPath, Any]) -> dict[str, str]:
    """Where each object was, and of which class it is: for messages."""
    return {
        ".".join(str(key) for key in path): f"{type(value).__module__}.{type(value).__qualname__}"
        for path, value in objects.items()
    }


def load_plain(path: Path, **options: Any) -> Any:
    """Read a file of `torch.save` that holds plain values. Any other file is refused."""
    try:
        with safe_globals(list(_SAFE)):
            return torch.load(path, map_location="cpu", weights_only=True, **options)
    except pickle.UnpicklingError as error:
        raise Refused(
            f"Expected plain values in {str(path)!r} (numbers, texts, tensors), found something "
            f"else: {_blocked(error)}. Such a file can run code of its writer when it is read. If "
            "you trust it, say so: DPSparseStrategy(trust_checkpoints=True), `--trust`, or "
            "load_from_checkpoint(..., weights_only=False)."
        ) from None
    except FileNotFoundError:
        raise
    except Exception as error:  # torch raises nearly anything over a damaged file
        raise _unreadable(path, type(error).__name__) from None


def load_trusted(path: Path) -> Any:
    """Read any file of `torch.save`. It may run code of its writer."""
    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except FileNotFoundError:
        raise
    except Exception as error:  # also of the writer's own classes, or for want of them
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error


def _unreadable(path: Path, reason: str) -> Refused:
    return Refused(
        f"Expected a file of torch.save at {str(path)!r}, found one that cannot be read "
        f"({reason}). Copy it again, or name another."
    )


def _blocked(error: Exception) -> str:
    """What torch did not want to read: the name that its message has behind GLOBAL."""
    words: Iterator[str] = iter(str(error).split())
    for word in words:
        if word == "GLOBAL":
            return next(words, "an object").strip(",.`'")
    return "an object"

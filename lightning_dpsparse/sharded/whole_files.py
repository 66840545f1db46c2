"""Weights in one ordinary file, for models with unsharded tables.

Two kinds of files are written and read. `.safetensors` holds tensors and nothing else, for whoever
serves the model. Any other name is a file of `torch.save` in Lightning's layout, with all that a
checkpoint holds. Both bring the history of their weights: which data they were trained on.
"""

from __future__ import annotations

import io
import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from lightning_dpsparse.durable.files import write_file
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.plain_values import load_plain, load_trusted

HISTORY_KEY = "lightning_dpsparse_history"  # which data the weights were trained on
_SAFE = ".safetensors"


def write_whole(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write a consolidated checkpoint into one file, which is old or new, and never in between."""
    history = json.dumps(checkpoint.get(HISTORY_KEY, []))
    if path.suffix == _SAFE:
        tensors = {name: t.contiguous() for name, t in checkpoint["state_dict"].items()}
        data = safetensors.torch.save(tensors, {HISTORY_KEY: history})
    else:
        buffer = io.BytesIO()
        torch.save(dict(checkpoint), buffer)
        data = buffer.getvalue()
    write_file(path, data)


def read_whole(path: Path, *, trust: bool = False) -> dict[str, Any]:
    """What a file of weights holds: a checkpoint in Lightning's layout, or a plain state dict.

    Only plain values are read, unless the user trusts the file.
    """
    if path.suffix == _SAFE:
        return _read_safetensors(path)
    found = load_trusted(path) if trust else load_plain(path, mmap=True)
    if not isinstance(found, dict):
        raise Refused(
            f"Expected a state dict or a checkpoint in {str(path)!r}, found "
            f"{type(found).__name__}. Save a state dict there with torch.save."
        )
    return found


def _read_safetensors(path: Path) -> dict[str, Any]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            history = json.loads((file.metadata() or {}).get(HISTORY_KEY, "[]"))
        state: Any = OrderedDict(safetensors.torch.load_file(path))
    except (safetensors.SafetensorError, ValueError, RecursionError) as error:
        raise Refused(
            f"Expected a file of tensors at {str(path)!r}, found a damaged one ({error}). Copy it "
            "again, or name another."
        ) from None
    state._metadata = {HISTORY_KEY: history}
    return {"state_dict": state, HISTORY_KEY: history}

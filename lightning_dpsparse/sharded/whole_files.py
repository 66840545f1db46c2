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
from torch import Tensor

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


def weights_in(found: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """The weights by their names in what `read_whole` found."""
    state = found.get("state_dict", found)
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise Refused(
            f"Expected a state dict in {str(path)!r}, names with their weights, found "
            f"{type(state).__name__} without names. Save a state dict there with torch.save."
        )
    others = [
        f"{name} ({type(value).__name__})"
        for name, value in state.items()
        if not isinstance(value, Tensor) and not name.endswith("_extra_state")
    ]
    if others:
        raise Refused(
            f"Expected tensors in {str(path)!r}, found {others[0]}"
            f"{' and others' if others[1:] else ''}. Save a state dict there with torch.save, or a "
            'checkpoint that has one under "state_dict".'
        )
    return dict(state)


def _read_safetensors(path: Path) -> dict[str, Any]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            history = json.loads((file.metadata() or {}).get(HISTORY_KEY, "[]"))
        state: Any = OrderedDict(safetensors.torch.load_file(path))
    except FileNotFoundError:
        raise
    except Exception as error:
        raise Refused(
            f"Expected a file of tensors at {str(path)!r}, found a damaged one ({error}). Copy it "
            "again, or name another."
        ) from None
    state._metadata = {HISTORY_KEY: history}
    return {"state_dict": state, HISTORY_KEY: history}

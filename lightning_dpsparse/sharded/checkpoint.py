"""Sharded checkpoints: a directory of torch.distributed.checkpoint shards plus `meta.pt`.

Under "model" lies the module's state dict with whole tables as global tensors, so that a checkpoint
of N ranks loads on M ranks. Under "fused_optimizer" lies the tables' optimizer state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.collections import sharded_tables
from lightning_dpsparse.sharded.fused import (
    combined_fused_optimizer,
    kernel_steps,
    set_kernel_steps,
)
from lightning_dpsparse.sharded.shards import load_whole_tables

META_FILE = "meta.pt"  # Lightning's name for it: its consolidation tool looks for this file
HISTORY_KEY = "lightning_dpsparse_history"  # which data the weights were trained on
_KERNEL_STEPS = "dpsparse_kernel_steps"


def save(path: Path, module: nn.Module, model_state: dict[str, Any], meta: dict[str, Any]) -> None:
    """Write a checkpoint directory. Every rank calls this; rank 0 writes `meta.pt`."""
    path.mkdir(parents=True, exist_ok=True)
    if dist.get_rank() == 0:  # a half-written checkpoint must not pass for a whole one
        (path / META_FILE).unlink(missing_ok=True)
    dist.barrier()
    state = {"model": model_state}
    if "optimizer_states" in meta:  # absent when the user asked for weights only
        state["fused_optimizer"] = combined_fused_optimizer(module).state_dict()["state"]
    dcp.save(state, checkpoint_id=path)
    if dist.get_rank() == 0:
        torch.save({**meta, _KERNEL_STEPS: kernel_steps(module)}, path / META_FILE)
    dist.barrier()


def load(
    path: Path, module: nn.Module, *, strict: bool, with_optimizer: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Read a checkpoint directory into `module`'s shards; return what `meta.pt` holds.

    A consolidated file is read too, for evaluation: it carries the weights alone.
    """
    if path.is_file() and not with_optimizer:
        return _load_file(path, module, strict=strict)
    _check_directory(path)
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    model_state = module.state_dict()
    _check_model(stored, model_state, strict=strict)
    wanted = {key: value for key, value in model_state.items() if f"model.{key}" in stored}
    dcp.load({"model": wanted}, checkpoint_id=path)
    _load_into(module, wanted, strict=strict)
    meta: dict[str, Any] = torch.load(
        path / META_FILE, map_location="cpu", weights_only=bool(weights_only)
    )
    steps = meta.pop(_KERNEL_STEPS)
    if with_optimizer:
        _load_fused_optimizer(path, stored, module)
        set_kernel_steps(module, steps)
    return meta


def consolidate(path: Path) -> dict[str, Any]:
    """Read a whole checkpoint into this process's memory, in Lightning's single-file layout.

    `["state_dict"]` then loads into the module with plain collections.
    """
    _check_directory(path)
    state: dict[str, Any] = {}
    _load_state_dict(
        state,
        storage_reader=dcp.FileSystemReader(path),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    checkpoint: dict[str, Any] = torch.load(
        path / META_FILE, map_location="cpu", weights_only=False
    )
    weights: Any = OrderedDict(state["model"])
    # Code that takes the weights alone finds their history here.
    weights._metadata = {HISTORY_KEY: checkpoint.get(HISTORY_KEY, [])}
    checkpoint["state_dict"] = weights
    checkpoint["fused_optimizer"] = state.get("fused_optimizer", {})
    return checkpoint


def _check_directory(path: Path) -> None:
    if not (path / META_FILE).is_file():
        found = "a file" if path.is_file() else "no such directory" if not path.exists() else "none"
        raise Refused(
            f"Expected a checkpoint directory that holds {META_FILE}, found {found} at "
            f"{str(path)!r}. Pass the directory that this strategy saved."
        )
    # torch.save writes a zip file, and dcp.save writes its index last.
    if not is_zipfile(path / META_FILE) or not (path / ".metadata").is_file():
        raise Refused(
            f"Expected a whole checkpoint at {str(path)!r}, found a damaged one: {META_FILE} or "
            ".metadata is missing or cut off. Copy the directory again."
        )


def _load_file(path: Path, module: nn.Module, *, strict: bool) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
    absent = load_whole_state(module, checkpoint["state_dict"])
    if absent and strict:
        raise Refused(f"Expected {str(path)!r} to hold {absent}, found none of that.")
    return checkpoint


def load_whole_state(module: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """Load this rank's part of a plain state dict. Returns the keys of the module that it lacks."""
    load_whole_tables(module, state)
    tables = [path for path, _ in sharded_tables(module)]
    dense = {key: value for key, value in state.items() if key not in tables}
    absent = [key for key in tables if key not in state]
    return absent + _load_into(module, dense, strict=False)


def _load_into(module: nn.Module, state: dict[str, Any], *, strict: bool) -> list[str]:
    """Load the entries of `state`, and return the keys that are missing.

    A table that is missing is loaded from itself: a sharded EmbeddingCollection fails without it.
    """
    mine = module.state_dict()
    tables = {path: mine[path] for path, _ in sharded_tables(module)}
    missing: list[str] = module.load_state_dict(tables | state, strict=strict).missing_keys
    return missing


def _check_model(stored: dict[str, Any], model_state: dict[str, Any], *, strict: bool) -> None:
    """Refuse a checkpoint that does not fit the model, with an error that names what differs."""
    missing = [key for key in model_state if f"model.{key}" not in stored]
    if missing and strict:
        raise Refused(
            f"Expected the checkpoint to hold {missing}, found none of that. Load it into the "
            "model it was saved from, or set strict_loading=False on the module."
        )
    for key, value in model_state.items():
        entry = stored.get(f"model.{key}")
        if not isinstance(entry, TensorStorageMetadata):
            continue
        if tuple(entry.size) != tuple(value.size()):
            raise Refused(
                f"Expected {key} of shape {tuple(value.size())}, found {tuple(entry.size)} in the "
                "checkpoint. Give the model the sizes it was saved with."
            )


def _load_fused_optimizer(path: Path, stored: dict[str, Any], module: nn.Module) -> None:
    optimizer = combined_fused_optimizer(module)
    state = optimizer.state_dict()
    for parameter, entries in state["state"].items():
        for name, value in entries.items():
            _check_optimizer_entry(stored, f"fused_optimizer.{parameter}.{name}", value)
    if any(state["state"].values()):
        dcp.load({"fused_optimizer": state["state"]}, checkpoint_id=path)
    optimizer.load_state_dict(state)


def _check_optimizer_entry(stored: dict[str, Any], key: str, value: Tensor) -> None:
    entry = stored.get(key)
    if entry is None:
        raise Refused(
            f"Expected the checkpoint to hold {key}, found none: it was saved with another fused "
            "optimizer. Resume with that one, or load the weights alone."
        )
    if tuple(entry.size) != tuple(value.size()):
        raise Refused(
            f"Expected {key} of shape {tuple(value.size())}, found {tuple(entry.size)}: row-wise "
            "Adagrad keeps one state per column piece, and pieces cannot be merged or cut. Resume "
            "with the column placement it was saved with, or load the weights alone."
        )

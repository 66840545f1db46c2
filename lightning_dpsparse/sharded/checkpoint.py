"""Sharded checkpoints: a directory of shards, one file for all else, and a manifest.

| file | what |
|---|---|
| `__RANK_NUMBER.distcp` | shards, written by `torch.distributed.checkpoint` |
| `meta.pt` | all else that is plain values (`plain_values`), and the index of the shards |
| `objects.pt` | what is not, if there is any: it is read if the user trusts the checkpoint |
| `manifest.json` | size and digest of every file (`checkpoint_files`) |

Under "model" lies the module's state dict with whole tables as global tensors, so that a checkpoint
of N ranks loads on M ranks. Under "fused_optimizer" lies the tables' optimizer state. If weights
are averaged, "model" is the average, which everybody reads who evaluates or exports the model, and
under "current_model_state" (Lightning's name) lie the weights that training goes on from.
"""

from __future__ import annotations

import io
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from lightning_dpsparse.durable.manifest import MANIFEST_NAME
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.checkpoint_files import (
    check_alone,
    check_together,
    total_size,
    written_together,
)
from lightning_dpsparse.sharded.collections import sharded_tables
from lightning_dpsparse.sharded.fused import (
    combined_fused_optimizer,
    kernel_steps,
    set_kernel_steps,
)
from lightning_dpsparse.sharded.plain_values import (
    load_plain,
    load_trusted,
    part_objects,
    put_back,
    type_names,
)
from lightning_dpsparse.sharded.process_group import on_all_ranks
from lightning_dpsparse.sharded.shard_index import (
    PlainPlanner,
    PlainReader,
    PlainWholePlanner,
    index_as_data,
    index_from_data,
)
from lightning_dpsparse.sharded.shards import load_whole_tables
from lightning_dpsparse.sharded.whole_files import HISTORY_KEY, read_whole, weights_in

META_FILE = "meta.pt"  # Lightning's name for it: its consolidation tool looks for this file
OBJECTS_FILE = "objects.pt"
_WEIGHTS = "current_model_state"
_KERNEL_STEPS = "dpsparse_kernel_steps"
_INDEX = "dpsparse_shard_index"
_OBJECTS = "dpsparse_objects"
_UNNEEDED = ("hyper_parameters", "datamodule_hyper_parameters")
"""Entries that are not needed where there is a module: only `load_from_checkpoint` reads them."""


def save(
    path: Path,
    module: nn.Module,
    model_state: dict[str, Any],
    meta: dict[str, Any],
    finish: Callable[[Path], Mapping[str, Any]],
    weights: dict[str, Any] | None = None,
) -> dict[str, str]:
    """Write a checkpoint directory. Every rank calls this; rank 0 writes what is not sharded.

    `finish` is called by rank 0 with the folder before it gets its name: it may add files that are
    not checked when the checkpoint is loaded, and returns what the manifest should say. `weights`
    is what training goes on from, if `model_state` is an average.

    Guarantees: whatever happens on the way, `path` is what it was before, or the new checkpoint as
    a whole, and in that case it has reached the disk.

    Returns the class of every object that will be read from trusted checkpoints only, by its place.
    """
    state = {"model": model_state}
    if "optimizer_states" in meta:  # absent when the user asked for weights only
        state["fused_optimizer"] = combined_fused_optimizer(module).state_dict()["state"]
        if weights is not None:
            state[_WEIGHTS] = weights
    plain, objects = part_objects({**meta, _KERNEL_STEPS: kernel_steps(module)})
    plain[_OBJECTS] = type_names(objects)

    def write_rest(folder: Path, index: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            _write(folder / META_FILE, {**plain, _INDEX: index})
            if objects:
                _write(folder / OBJECTS_FILE, objects)

    try:
        with written_together(path, _local_bytes([state, plain]), finish) as folder:
            index = index_as_data(dcp.save(state, checkpoint_id=folder))
            on_all_ranks(lambda: write_rest(folder, index))
    except (OSError, dcp.CheckpointException) as error:
        raise Refused(
            f"Expected to write the checkpoint {str(path)!r}, found that it failed: "
            f"{_reason(error)}. What was there before is untouched. Make the disk writable, with "
            "room on it, and go on from the last checkpoint."
        ) from error
    found: dict[str, str] = plain[_OBJECTS]
    return found


def _write(path: Path, values: Mapping[Any, Any]) -> None:
    """Write values as torch does, with the errors of the operating system."""
    buffer = io.BytesIO()
    torch.save(values, buffer)
    path.write_bytes(buffer.getbuffer())


def _local_bytes(state: Any) -> int:
    """How much this rank will write. What all ranks hold is counted on rank 0."""
    if isinstance(state, ShardedTensor):
        return sum(shard.tensor.nbytes for shard in state.local_shards())
    if isinstance(state, Tensor):
        return state.nbytes if dist.get_rank() == 0 else 0
    if isinstance(state, Mapping):
        return sum(_local_bytes(value) for value in state.values())
    return sum(_local_bytes(value) for value in state) if isinstance(state, (list, tuple)) else 0


def _reason(error: BaseException) -> str:
    """Why a checkpoint could not be written, in a few words."""
    if isinstance(error, dcp.CheckpointException):
        rank, (error, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {_reason(error)}"
    return getattr(error, "strerror", None) or str(error).partition("\n")[0]


# ---- reading ------------------------------------------------------------------------------------


def _is_for_training(name: str) -> bool:
    return name.startswith(f"{_WEIGHTS}.")


@dataclass(frozen=True)
class _Source:
    """A checkpoint directory that is whole, opened for reading."""

    path: Path
    meta: dict[str, Any]
    stored: Mapping[str, Any]
    """What the checkpoint holds under each name: sizes, not values."""
    reader: dcp.FileSystemReader
    is_trusted: bool

    def load(self, state: dict[str, Any]) -> None:
        """Fill these tensors, each rank its own shards."""
        planner = dcp.DefaultLoadPlanner() if self.is_trusted else PlainPlanner()
        with self._reading():
            dcp.load(state, storage_reader=self.reader, planner=planner)

    def load_whole(self) -> dict[str, Any]:
        """All that the checkpoint holds for others than us, with whole tables, in memory."""
        state: dict[str, Any] = {}
        planner = PlainWholePlanner({name for name in self.stored if not _is_for_training(name)})
        with self._reading():
            _load_state_dict(state, storage_reader=self.reader, planner=planner, no_dist=True)
        return state

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Say in words what torch found wrong with a shard."""
        try:
            yield
        except dcp.CheckpointException as error:
            _, (cause, _) = next(iter(error.failures.items()))
            if isinstance(cause, Refused):
                raise Refused(str(cause)) from None
            raise Refused(
                f"Expected shards in {str(self.path)!r} that fit their index, found others: "
                f"{_reason(error)}. Copy the checkpoint again, or go on from an earlier one."
            ) from error


def _open(path: Path, *, trust: bool, together: bool) -> _Source:
    """Open a checkpoint, after its files have been checked against the manifest.

    With `trust` a checkpoint without a manifest is opened too, and objects are read.
    """
    _check_directory(path)
    if trust and not (path / MANIFEST_NAME).exists():
        reader = dcp.FileSystemReader(path)
        meta, stored = load_trusted(path / META_FILE), reader.read_metadata().state_dict_metadata
        return _Source(path, meta, stored, reader, is_trusted=True)
    manifest = check_together(path) if together else check_alone(path)
    meta = load_plain(path / META_FILE)
    if not _is_ours(meta) or META_FILE not in manifest.files:
        raise Refused(
            f"Expected a checkpoint of this package at {str(path)!r}, found another kind of file "
            "in it. Pass the directory that DPSparseStrategy saved."
        )
    index = index_from_data(meta.pop(_INDEX), manifest.files, total_size(manifest))
    objects = meta.pop(_OBJECTS)
    if trust and objects:
        put_back(meta, load_trusted(path / OBJECTS_FILE))
    else:
        _leave_out(path, objects, has_module=together)
    reader = PlainReader(path, index)
    return _Source(path, meta, index.state_dict_metadata, reader, is_trusted=trust)


def _is_ours(meta: Any) -> bool:
    """Whether this package has written `meta`, as far as its own parts of it can tell."""
    if not isinstance(meta, dict) or not {_INDEX, _KERNEL_STEPS} <= meta.keys():
        return False
    objects = meta.get(_OBJECTS)
    return isinstance(objects, dict) and all(isinstance(place, str) for place in objects)


def _leave_out(path: Path, objects: Mapping[str, str], *, has_module: bool) -> None:
    """Go without the objects of a checkpoint, where that can be; otherwise refuse it."""
    missed = [f"{place} ({kind})" for place, kind in objects.items()]
    if not missed:
        return
    words = (
        f"{', '.join(missed)}. They could run code of their writer when they are read. If you "
        "trust the checkpoint, say so: DPSparseStrategy(trust_checkpoints=True), `--trust`, or "
        "load_from_checkpoint(..., weights_only=False)."
    )
    if all(place.partition(".")[0] in _UNNEEDED for place in objects):
        if not has_module:
            warnings.warn(f"Left out of {str(path)!r}: {words}", stacklevel=2)
        return
    raise Refused(
        f"Expected plain values in {str(path)!r}, found objects: {words} Before saving, their "
        "classes can be named to torch.serialization.add_safe_globals."
    )


def load(
    path: Path,
    module: nn.Module,
    *,
    strict: bool,
    with_optimizer: bool,
    trust: bool,
    note_average: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Read a checkpoint directory into `module`'s shards; return all else that it holds.

    If the checkpoint holds an average, and training goes on (`with_optimizer`), `note_average` is
    called while the module has the average. Then the module gets the weights beside it.

    A consolidated file is read too, for evaluation: it carries the weights alone.
    """
    if path.is_file() and not with_optimizer:
        return _load_file(path, module, strict=strict, trust=trust)
    source = _open(path, trust=trust, together=True)
    _load_model(source, "model", module, strict=strict)
    if with_optimizer and any(_is_for_training(name) for name in source.stored):
        note_average()
        _load_model(source, _WEIGHTS, module, strict=strict)
    steps = source.meta.pop(_KERNEL_STEPS)
    if with_optimizer:
        _load_fused_optimizer(source, module)
        set_kernel_steps(module, steps)
    return source.meta


def _load_model(source: _Source, name: str, module: nn.Module, *, strict: bool) -> None:
    """Load the weights under this name."""
    state = module.state_dict()
    _check_model(source.stored, name, state, strict=strict)
    wanted = {key: value for key, value in state.items() if f"{name}.{key}" in source.stored}
    source.load({name: wanted})
    _load_into(module, wanted, strict=strict)


def consolidate(path: Path, *, trust: bool = False) -> dict[str, Any]:
    """Read a whole checkpoint into this process's memory, in Lightning's single-file layout.

    `["state_dict"]` then loads into the module with plain collections.
    """
    source = _open(path, trust=trust, together=False)
    checkpoint, state = source.meta, source.load_whole()
    if not isinstance(state.get("model"), dict):
        raise Refused(
            f"Expected the weights of a model in {str(path)!r}, found {sorted(state)}. Pass a "
            "directory that DPSparseStrategy saved."
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


def _load_file(path: Path, module: nn.Module, *, strict: bool, trust: bool) -> dict[str, Any]:
    checkpoint = read_whole(path, trust=trust)
    if "state_dict" not in checkpoint:
        raise Refused(
            f"Expected a consolidated checkpoint at {str(path)!r}, found a file without a "
            "state_dict. Make one with: lightning-dpsparse consolidate CHECKPOINT FILE"
        )
    absent = load_whole_state(module, weights_in(checkpoint, path))
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


def _check_model(
    stored: Mapping[str, Any], name: str, model_state: dict[str, Any], *, strict: bool
) -> None:
    """Refuse a checkpoint that does not fit the model, with an error that names what differs."""
    missing = [key for key in model_state if f"{name}.{key}" not in stored]
    if missing and strict:
        raise Refused(
            f"Expected the checkpoint to hold {missing}, found none of that. Load it into the "
            "model it was saved from, or set strict_loading=False on the module."
        )
    for key, value in model_state.items():
        entry = stored.get(f"{name}.{key}")
        if not isinstance(entry, TensorStorageMetadata):
            continue
        if tuple(entry.size) != tuple(value.size()):
            raise Refused(
                f"Expected {key} of shape {tuple(value.size())}, found {tuple(entry.size)} in the "
                "checkpoint. Give the model the sizes it was saved with."
            )


def _load_fused_optimizer(source: _Source, module: nn.Module) -> None:
    optimizer = combined_fused_optimizer(module)
    state = optimizer.state_dict()
    for parameter, entries in state["state"].items():
        for name, value in entries.items():
            _check_optimizer_entry(source.stored, f"fused_optimizer.{parameter}.{name}", value)
    if any(state["state"].values()):
        source.load({"fused_optimizer": state["state"]})
    optimizer.load_state_dict(state)


def _check_optimizer_entry(stored: Mapping[str, Any], key: str, value: Tensor) -> None:
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

"""What lies where in the shard files of a checkpoint, as plain values.

`torch.distributed.checkpoint` keeps an index of its shards in a pickle, `.metadata`, and unpickles
it, and whatever is not a tensor, without asking. Here the same index is kept as plain values, and
`PlainReader` and `PlainPlanner` read shards by it: no code of a file's writer runs. (`.metadata` is
written all the same: Lightning's own tool for consolidating checkpoints reads it.)
"""

from __future__ import annotations

import io
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from typing_extensions import override

from lightning_dpsparse.refused import Refused


def index_as_data(metadata: Metadata) -> dict[str, Any]:
    """The index of a checkpoint that was just written, as plain values."""
    return {
        "entries": {
            name: None if isinstance(entry, BytesStorageMetadata) else _tensor_as_data(entry)
            for name, entry in metadata.state_dict_metadata.items()
        },
        "paths": dict(metadata.planner_data),
        "pieces": [
            (
                index.fqn,
                None if index.offset is None else tuple(index.offset),
                index.index,
                info.relative_path,
                info.offset,
                info.length,
            )
            for index, info in metadata.storage_data.items()
        ],
    }


def _tensor_as_data(entry: TensorStorageMetadata) -> dict[str, Any]:
    return {
        "dtype": entry.properties.dtype,
        "size": tuple(entry.size),
        "chunks": [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks],
    }


def index_from_data(data: Any, files: Collection[str], size: int) -> Metadata:
    """The index that `index_as_data` made. One that leads out of the checkpoint is refused.

    `files` are the names of the checkpoint's files, and `size` is their size in all.
    """
    try:
        entries = {str(name): _entry(entry) for name, entry in data["entries"].items()}
        pieces = {
            MetadataIndex(str(name), offset, index): _StorageInfo(str(file), int(at), int(length))
            for name, offset, index, file, at, length in data["pieces"]
        }
        paths = {name: _path(name, keys) for name, keys in data["paths"].items()}
        metadata = Metadata(entries, paths, pieces, StorageMeta())
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise Refused(_damaged(type(error).__name__)) from None
    strangers = {info.relative_path for info in pieces.values()} - set(files)
    if strangers:
        raise Refused(_damaged(f"names of other files, {sorted(strangers)}"))
    tensors = [entry for entry in entries.values() if isinstance(entry, TensorStorageMetadata)]
    if sum(entry.size.numel() * entry.properties.dtype.itemsize for entry in tensors) > size:
        raise Refused(_damaged("more numbers than its files have room for"))
    return metadata


def _entry(data: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if data is None:
        return BytesStorageMetadata()
    if not isinstance(data["dtype"], torch.dtype):
        raise TypeError
    chunks = [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        for offsets, sizes in data["chunks"]
    ]
    properties = TensorProperties(dtype=data["dtype"])
    return TensorStorageMetadata(properties, torch.Size(data["size"]), chunks)


def _path(name: str, keys: Any) -> tuple[str, ...]:
    """Where a value belongs in nested dictionaries. (A number would be a place in a list, and torch
    would make a list of that length.)"""
    if not all(isinstance(key, str) for key in keys) or ".".join(keys) != name:
        raise ValueError
    return tuple(keys)


def _damaged(found: str) -> str:
    return (
        f"Expected an index of shards in the checkpoint, found a damaged one: {found}. Copy the "
        "checkpoint again, or go on from an earlier one."
    )


class PlainReader(FileSystemReader):
    """Reads shards by an index that is given, and unpickles none."""

    def __init__(self, path: Path, index: Metadata) -> None:
        super().__init__(path)
        self._index = index

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index


class PlainPlanner(DefaultLoadPlanner):
    """Loads entries that are no tensors, if they are plain values."""

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        super().load_bytes(read_item, _checked(read_item, value))


class PlainWholePlanner(_EmptyStateDictLoadPlanner):
    """The same for everything under some names, whatever the model is."""

    @override
    def _should_include_key(self, key: str, metadata: Metadata) -> bool:
        return self.keys is None or key in self.keys

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        super().load_bytes(read_item, _checked(read_item, value))


def _checked(read_item: ReadItem, value: io.BytesIO) -> io.BytesIO:
    """The same values, written anew by ourselves: torch reads what it is given here as a pickle."""
    try:
        plain = torch.load(value, weights_only=True)
    except Exception:
        raise Refused(
            f"Expected plain values under {read_item.dest_index.fqn!r} in the checkpoint, found an "
            "object, which could run code of its writer. If you trust the checkpoint, say so: "
            "DPSparseStrategy(trust_checkpoints=True), or `--trust`."
        ) from None
    ours = io.BytesIO()
    torch.save(plain, ours)
    ours.seek(0)
    return ours

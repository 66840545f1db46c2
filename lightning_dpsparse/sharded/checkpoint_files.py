"""A checkpoint's directory, written and checked by all ranks together.

All ranks write into one draft (`durable.drafts`), which rank 0 makes and puts in its place. Every
rank syncs and digests what it wrote itself. Rank 0 writes the manifest last. When such a directory
is loaded, the ranks share the work of checking its files.

Whatever fails on one rank fails on all, at the same point: disks that are full, folders that one
host does not see.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_dpsparse.durable import drafts
from lightning_dpsparse.durable.drafts import Draft
from lightning_dpsparse.durable.files import FILE_MODE, sync_file
from lightning_dpsparse.durable.manifest import (
    FileDigest,
    Manifest,
    check_no_faults,
    digest_file,
    faults_of,
    read_manifest,
    write_manifest,
)
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.process_group import from_rank_zero, on_all_ranks

_SLACK = 1 << 20
"""Bytes that a checkpoint takes beside its tensors, about."""


@contextmanager
def written_together(
    path: Path, num_bytes: int, finish: Callable[[Path], Mapping[str, Any]]
) -> Iterator[Path]:
    """A new folder for all ranks to write into, which becomes `path` when it is whole.

    If anything fails, nothing is left of it, and what was at `path` stays. `num_bytes` is what
    this rank is about to write. `finish` is called by rank 0 with the folder, when all files have
    reached the disk: it may add files that are not in the manifest, and returns what that says.
    """
    draft: Draft | None = None
    expected = sum(on_all_ranks(lambda: num_bytes)) + _SLACK

    def begin() -> Path:
        nonlocal draft
        drafts.clean(path.parent)
        _check_space(path, expected)
        draft = Draft(path)
        return draft.folder

    folder = from_rank_zero(begin)
    try:
        on_all_ranks(lambda: _check_seen(folder))
        yield folder
        found = on_all_ranks(lambda: _settled(folder))
        files = {name: digest for mine in found for name, digest in mine.items()}

        def end() -> None:
            nonlocal draft
            assert draft is not None
            words = {**finish(folder), drafts.NAME_KEY: path.name, "saved_at": time.time()}
            write_manifest(folder, Manifest(files, words))
            draft.commit()
            draft = None

        from_rank_zero(end)
    finally:
        if draft is not None:
            draft.abandon()


def _check_space(path: Path, expected: int) -> None:
    place = next(parent for parent in path.absolute().parents if parent.exists())
    free = shutil.disk_usage(place).free
    if free < expected:
        raise Refused(
            f"Expected {expected / 1e6:,.1f} MB of free space for the checkpoint {str(path)!r}, "
            f"found {free / 1e6:,.1f} MB. What was there before is untouched. Make room, or keep "
            "fewer checkpoints (save_top_k)."
        )


def _check_seen(folder: Path) -> None:
    """The folder that rank 0 made must be there for all."""
    if not folder.is_dir():
        raise Refused(
            f"Expected a folder for checkpoints that all hosts share, found that rank "
            f"{dist.get_rank()} does not see what rank 0 made in {str(folder.parent)!r}. Mount one "
            "shared folder on all hosts, and set dirpath or default_root_dir to it."
        )


def _settled(folder: Path) -> dict[str, FileDigest]:
    """Sync and digest what this rank wrote; rank 0 also what belongs to nobody."""
    rank = dist.get_rank()
    found = {}
    for path in sorted(folder.iterdir()):
        if _writer(path.name) == rank and path.name != drafts.LOCK_NAME:
            os.chmod(path, FILE_MODE)
            sync_file(path)
            found[path.name] = digest_file(path)
    return found


def _writer(name: str) -> int:
    """The rank that wrote a file: torch calls shards `__RANK_NUMBER.distcp`."""
    rank = name[2:].partition("_")[0] if name.startswith("__") else ""
    return int(rank) if rank.isdecimal() else 0


def check_together(path: Path) -> Manifest:
    """The manifest of a checkpoint, all of whose files are as they were saved. On all ranks."""
    manifest = from_rank_zero(lambda: read_manifest(path))
    names = sorted(manifest.files, key=lambda name: manifest.files[name].size, reverse=True)
    mine = names[dist.get_rank() :: dist.get_world_size()]
    faults = on_all_ranks(lambda: faults_of(path, manifest, mine))
    check_no_faults(path, (fault for found in faults for fault in found))
    return manifest


def check_alone(path: Path) -> Manifest:
    """The same by one process."""
    manifest = read_manifest(path)
    check_no_faults(path, faults_of(path, manifest))
    return manifest


def total_size(manifest: Manifest) -> int:
    """Number of bytes of all files."""
    return sum(digest.size for digest in manifest.files.values())

"""All hosts must see the folders that a run writes to.

Every rank writes its shards of a checkpoint, and rank 0 the journal. If hosts have folders of their
own under one name, each holds a part of every checkpoint, which nobody can put together, and a run
that is started again with rank 0 on another host finds no journal. So this is tried before the
first step: rank 0 writes a file, and all ranks look for it. That also finds folders that cannot be
written to, and not only when the first checkpoint is due.
"""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dpsparse.durable.files import make_folder
from lightning_dpsparse.plugin.folders import journal_folder, local_path
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.process_group import from_rank_zero, on_all_ranks

_PATIENCE = 5.0
"""Seconds until a file that one host has made must be seen by the others."""


def check_folders(trainer: Trainer, *, is_private: bool) -> None:
    """Refuse folders for journal and checkpoints that cannot be used. On all ranks."""
    folders = [
        local_path(callback.dirpath, "dirpath of ModelCheckpoint")
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None
    ]
    if is_private:
        folders.append(journal_folder(trainer))
    for folder in from_rank_zero(lambda: folders):
        check_is_shared(folder)


def check_is_shared(folder: Path) -> None:
    """Refuse a folder that some rank does not share with rank 0. On all ranks."""
    name = from_rank_zero(lambda: _leave_word(folder))
    try:
        seen = on_all_ranks(lambda: _sees(folder / name))
    finally:
        from_rank_zero(lambda: (folder / name).unlink(missing_ok=True))
    if not all(seen):
        blind = [str(rank) for rank, sees in enumerate(seen) if not sees]
        raise Refused(
            f"Expected a folder that all hosts share at {str(folder)!r}, found that ranks "
            f"{', '.join(blind)} do not see what rank 0 writes there: checkpoints could not be "
            "put together, and a restart would forget what was spent. Mount one shared folder on "
            "all hosts, and set default_root_dir (and dirpath of ModelCheckpoint) to it."
        )


def _leave_word(folder: Path) -> str:
    name = f".seen-by-all-{secrets.token_hex(8)}"
    path = make_folder(folder) / name
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        raise Refused(
            f"Expected a folder to write to at {str(folder)!r}, found that it cannot be written to "
            f"({error.strerror}). Make it writable, or set default_root_dir (and dirpath of "
            "ModelCheckpoint) to another one."
        ) from None
    return name


def _sees(path: Path) -> bool:
    """Whether a file is there, or comes within seconds, as on file systems of a network."""
    end = time.monotonic() + _PATIENCE
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True

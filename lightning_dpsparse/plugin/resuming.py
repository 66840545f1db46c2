"""What a run goes on from when nobody names a checkpoint.

A job that was started again after a failure must not begin anew: what it spent before would be
forgotten. The journals in the run's root folder (`folders`) tell which runs there were, which
launch wrote them, and which checkpoints they saved. A run goes on from the newest checkpoint that
is whole. If there is none, the weights begin anew, and the ledger goes on.

- `resume="auto"`: a root folder holds one run. Its newest line of runs goes on. If its journal is
  gone or elsewhere, its checkpoints tell what was spent; if these are damaged too, nobody knows,
  and the run is refused.
- Otherwise only a restart goes on by itself: torchrun and SLURM say that they have started the job
  before, and a journal of this very launch is there.

A module that was trained in this process goes on in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_dpsparse.accounting.journal import JournalState, read_journal
from lightning_dpsparse.durable import drafts
from lightning_dpsparse.durable.manifest import read_manifest
from lightning_dpsparse.plugin.folders import (
    CAN_GO_ON_KEY,
    LAUNCH_KEY,
    checkpoint_folders,
    journal_folder,
    local_path,
    near_checkpoint,
)
from lightning_dpsparse.plugin.launches import is_restart, launch_name
from lightning_dpsparse.plugin.private_run import PrivateRun
from lightning_dpsparse.plugin.run_ledger import behind_journal
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.checkpoint_files import check_together
from lightning_dpsparse.sharded.process_group import from_rank_zero


@dataclass(frozen=True)
class Line:
    """A line of runs that may go on."""

    folder: Path
    """Where its journal is."""
    journal: JournalState
    is_of_this_launch: bool

    @property
    def run(self) -> str:
        """Name of the line."""
        return self.journal.ledger.run

    def checkpoints(self, launch: str | None = None) -> list[Path]:
        """Its checkpoints that are still there, of one launch or of all, the newest first."""
        paths = [(self.folder / name).resolve() for name in reversed(self.journal.checkpoints)]
        of_launch = [p for p in paths if launch is None or _about(p).get(LAUNCH_KEY) == launch]
        return [path for path in of_launch if path.exists()]


def choose_checkpoint(
    trainer: Trainer, run: PrivateRun | None, given: str | Path | None, *, is_auto: bool
) -> str | Path | None:
    """The checkpoint that a `fit` begins from: the one that was given, or a newer one.

    If only the ledger of an earlier run is left, the private run is told to go on with that. On all
    ranks.
    """
    if run is None:
        paths = from_rank_zero(lambda: _saved(trainer, is_private=False)) if is_auto else []
        return _newest_whole(paths) or given
    line = from_rank_zero(lambda: find_line(trainer, given, is_auto=is_auto))
    if line is None:
        paths = from_rank_zero(lambda: _saved(trainer, is_private=True)) if is_auto else []
        return _without_journal(paths) or given
    # Others of its line may be newer than the given one: only what came after it may replace it.
    since = None if given is None or is_auto else launch_name()
    found = _newest_whole(from_rank_zero(lambda: line.checkpoints(since)))
    if (
        found is None
        and since
        and from_rank_zero(lambda: _about(str(given)).get("run")) == line.run
    ):
        return given
    why = "The job was started again" if line.is_of_this_launch else "The folder holds a run"
    if found is not None:
        rank_zero_info(f"{why}: run {line.run} goes on from {found}.")
        return found
    run.ledger.restore(behind_journal(line.folder, line.journal))
    rank_zero_warn(
        f"{why}, of which no whole checkpoint is left to go on from: run {line.run} begins anew, "
        f"and the {line.journal.ledger.steps:,} steps that it has been charged for stay charged."
    )
    return given


def _without_journal(paths: list[Path]) -> Path | None:
    """The newest whole checkpoint of private runs that have no journal in the root folder.

    None if there never was one. On all ranks.
    """
    found = _newest_whole(paths)
    if paths and found is None:
        raise Refused(
            f"Expected the journal of the run that saved {str(paths[0])!r}, or a whole checkpoint "
            "of it, found neither: nobody knows what it has spent. Restore one of them from a "
            "copy, or name another folder in default_root_dir to begin a new run."
        )
    if found is not None:
        rank_zero_info(f"The folder holds checkpoints of a run: it goes on from {found}.")
    return found


def find_line(trainer: Trainer, given: str | Path | None, *, is_auto: bool) -> Line | None:
    """The line of runs that should go on; None if there is none. On rank 0.

    It is in the root folder, or near the checkpoint that was given: a run that goes on from another
    folder's checkpoint goes on with the journal that is there.
    """
    launch = launch_name()
    if not is_auto and (launch is None or not is_restart()):
        return None
    root = list(_lines(journal_folder(trainer), launch))
    near = [] if given is None else near_checkpoint(local_path(given, "ckpt_path"))
    elsewhere = (line for folder in near for line in _lines(folder, launch))
    for line in chain(root, elsewhere):
        if line.is_of_this_launch:
            return line
    return root[0] if root and is_auto else None


def _lines(folder: Path, launch: str | None) -> Iterator[Line]:
    """The lines of runs in a folder, those that were written to last first."""
    paths = sorted(folder.glob("*.journal"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in paths:
        state = read_journal(path)
        if state is not None:
            yield Line(folder, state, launch is not None and state.launch == launch)


def _about(path: str | Path) -> Mapping[str, Any]:
    """What the manifest of a checkpoint says of it; nothing if there is none."""
    try:
        return read_manifest(local_path(path, "ckpt_path")).about
    except Refused:
        return {}


def _saved(trainer: Trainer, *, is_private: bool) -> list[Path]:
    """Checkpoints in the run's folders of training with a plan, or without, the newest first."""
    found = []
    for folder in checkpoint_folders(trainer):
        for path in folder.glob("*.ckpt"):
            about = _about(path)
            if (about.get("run") is not None) == is_private and about.get(CAN_GO_ON_KEY):
                found.append((float(about["saved_at"]), path))
    return [path for _, path in sorted(found, reverse=True)]


def _newest_whole(paths: list[Path]) -> Path | None:
    """The first of these checkpoints that is whole. On all ranks."""
    for path in paths:
        try:
            check_together(path)
            return path
        except Refused as fault:
            rank_zero_warn(f"{fault} Training goes back to the one before it.")
    return None


def clean_up(trainer: Trainer) -> None:
    """Remove what earlier processes left of checkpoints that never became whole. On rank 0."""
    for folder in checkpoint_folders(trainer):
        drafts.clean(folder)
    for line in _lines(journal_folder(trainer), None):
        for folder in {path.parent for path in line.checkpoints()}:
            drafts.clean(folder)

"""What a run goes on from when nobody names a checkpoint.

A job that was started again after a failure must not begin anew: what it spent before would be
forgotten. The journals in the run's root folder (`folders`) tell which runs there were, which
launch wrote them, and which checkpoints they saved. A run goes on from the newest checkpoint that
is whole. If there is none, the weights begin anew, and the ledger goes on.

- `resume="auto"`: a root folder holds one run. Its newest line of runs goes on.
- Otherwise only a restart goes on by itself: torchrun and SLURM say that they have started the job
  before, and a journal of this very launch is there.

A module that was trained in this process goes on in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_dpsparse.accounting.journal import JournalState, read_journal
from lightning_dpsparse.durable import drafts
from lightning_dpsparse.durable.manifest import read_manifest
from lightning_dpsparse.plugin.folders import (
    CAN_GO_ON_KEY,
    checkpoint_folders,
    journal_folder,
    local_path,
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

    def checkpoints(self) -> list[Path]:
        """Its checkpoints that are still there, the newest first."""
        paths = [(self.folder / name).resolve() for name in reversed(self.journal.checkpoints)]
        return [path for path in paths if path.exists()]


def choose_checkpoint(
    trainer: Trainer, run: PrivateRun | None, given: str | Path | None, *, is_auto: bool
) -> str | Path | None:
    """The checkpoint that a `fit` begins from: the one that was given, or a newer one.

    If only the ledger of an earlier run is left, the private run is told to go on with that. On all
    ranks.
    """
    if run is None:
        found = _newest_whole(from_rank_zero(lambda: _plain(trainer))) if is_auto else None
        return found or given
    line = from_rank_zero(lambda: find_line(trainer, is_auto=is_auto))
    if line is None:
        return given
    if given is not None and not is_auto and from_rank_zero(lambda: _line_of(given)) == line.run:
        return given
    paths = from_rank_zero(line.checkpoints)
    found = _newest_whole(paths)
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


def find_line(trainer: Trainer, *, is_auto: bool) -> Line | None:
    """The line of runs in the root folder that should go on; None if there is none. On rank 0."""
    launch = launch_name()
    if not is_auto and (launch is None or not is_restart()):
        return None
    newest: Line | None = None
    for line in _lines(journal_folder(trainer), launch):
        if line.is_of_this_launch:
            return line
        newest = newest or line
    return newest if is_auto else None


def _lines(folder: Path, launch: str | None) -> Iterator[Line]:
    """The lines of runs in a folder, those that were written to last first."""
    paths = sorted(folder.glob("*.journal"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in paths:
        state = read_journal(path)
        if state is not None:
            yield Line(folder, state, launch is not None and state.launch == launch)


def _line_of(path: str | Path) -> str | None:
    """The line of runs that a checkpoint belongs to; None if it does not say."""
    try:
        found = read_manifest(local_path(path, "ckpt_path")).about.get("run")
    except Refused:
        return None
    return None if found is None else str(found)


def _plain(trainer: Trainer) -> list[Path]:
    """Checkpoints of training without a plan in the run's folders, the newest first."""
    found = []
    for folder in checkpoint_folders(trainer):
        for path in folder.glob("*.ckpt"):
            try:
                about = read_manifest(path).about
            except Refused:
                continue
            if about.get("run") is None and about.get(CAN_GO_ON_KEY):
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

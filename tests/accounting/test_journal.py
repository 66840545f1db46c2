"""The journal of a line of runs, and what counts where it disagrees with a checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_dpsparse.accounting import events
from lightning_dpsparse.accounting.journal import (
    Journal,
    Position,
    find_journal,
    journal_path,
    read_journal,
    reconcile,
)
from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.refused import Refused

EVENT = events.poisson_gaussian(0.01, 1.0)


def ledger(steps: int, run: str = "run") -> Ledger:
    found = Ledger(run)
    found.charge(EVENT, steps=steps, times=steps)
    return found


def write(folder: Path, *steps: int, **settings: Any) -> dict[str, Any]:
    """One process writes these charges, one after the other; returns what a checkpoint keeps."""
    journal = Journal(folder, "run", **settings)
    for charged in steps:
        journal.write(ledger(charged))
    mark = journal.mark()
    journal.close()
    return mark


def charged(folder: Path) -> int:
    state = read_journal(journal_path(folder, "run"))
    assert state is not None
    return state.ledger.steps


def test_the_journal_keeps_what_was_written(tmp_path: Path) -> None:
    assert read_journal(journal_path(tmp_path, "run")) is None
    write(tmp_path, 3, launch="torchrun 7", notes=lambda: {"taints": ["logged"]})
    state = read_journal(journal_path(tmp_path, "run"))
    assert state is not None
    assert state.ledger == ledger(3)
    assert (state.launch, state.notes) == ("torchrun 7", {"taints": ["logged"]})


def test_the_newest_record_counts_whether_it_charges_more_or_less(tmp_path: Path) -> None:
    write(tmp_path, 16, 32, 20)  # announced, announced, then settled
    assert charged(tmp_path) == 20


def test_two_processes_cannot_spend_one_budget(tmp_path: Path) -> None:
    first = Journal(tmp_path, "run")
    with pytest.raises(Refused, match="Expected one training at a time to continue run run"):
        Journal(tmp_path, "run")
    first.close()
    Journal(tmp_path, "run").close()


def test_a_deleted_file_lets_nobody_else_go_on_unseen(tmp_path: Path) -> None:
    """Both cannot write: the first one notices before its next steps."""
    first = Journal(tmp_path, "run")
    first.write(ledger(16))
    first.path.unlink()
    second = Journal(tmp_path, "run")
    second.write(ledger(16))
    with pytest.raises(Refused, match="found that it is gone"):
        first.write(ledger(32))
    second.close()


def test_checkpoints_are_remembered_while_they_are_there(tmp_path: Path) -> None:
    folder = tmp_path / "privacy"
    journal = Journal(folder, "run")
    journal.write(ledger(3))
    paths = [tmp_path / "checkpoints" / f"{i}.ckpt" for i in range(40)]
    for path in paths:
        path.mkdir(parents=True)
        journal.note_checkpoint(path)
    shutil.rmtree(paths[38])
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    journal.note_checkpoint(elsewhere)
    journal.close()
    state = read_journal(journal.path)
    assert state is not None
    assert state.ledger.steps == 3
    assert len(state.checkpoints) == 16
    found = [(folder / name).resolve() for name in state.checkpoints]
    assert found[-3:] == [paths[37], paths[39], elsewhere]
    # Those below the run's root move with it.
    assert [Path(name).is_absolute() for name in state.checkpoints[-2:]] == [False, True]


def test_noting_a_checkpoint_later_takes_no_charge_back(tmp_path: Path) -> None:
    write(tmp_path, 16)
    write(tmp_path, 48)  # somebody else went on
    late = Journal(tmp_path, "run")
    late.note_checkpoint(tmp_path / "late.ckpt")
    late.close()
    assert charged(tmp_path) == 48


# ---- positions -----------------------------------------------------------------------------------


def test_positions() -> None:
    first, other = Position(5, (("a", 0),)), Position(9, (("a", 0),))
    later = Position(12, (("a", 0), ("b", 10)))
    branch = Position(12, (("a", 0), ("c", 6)))
    assert other.contains(first)
    assert not first.contains(other)
    assert first.contains(first)
    assert later.contains(other)
    assert not later.contains(Position(10, (("a", 0),)))
    assert branch.contains(first)
    assert not branch.contains(other)
    assert not branch.contains(later)
    assert not later.contains(branch)


# ---- where they disagree -------------------------------------------------------------------------


def reconciled(folder: Path, mark: dict[str, Any]) -> tuple[int, str]:
    found, words = reconcile(mark, read_journal(journal_path(folder, "run")))
    return found.steps, " ".join(words)


def test_steps_after_the_checkpoint_count(tmp_path: Path) -> None:
    mark = write(tmp_path, 16)
    write(tmp_path, 32, 48)
    assert reconciled(tmp_path, mark) == (48, "")


def test_an_older_copy_of_the_journal_does_not_lower_the_charge(tmp_path: Path) -> None:
    write(tmp_path, 30)
    copy = journal_path(tmp_path, "run").read_bytes()
    mark = write(tmp_path, 48)
    journal_path(tmp_path, "run").write_bytes(copy)
    steps, words = reconciled(tmp_path, mark)
    assert steps == 48
    assert (
        "is older than the checkpoint: it charges for 30 steps, and the checkpoint for 48" in words
    )


def test_a_cut_journal_does_not_lower_the_charge(tmp_path: Path) -> None:
    """The same process wrote both records."""
    mark = write(tmp_path, 16, 32)
    path = journal_path(tmp_path, "run")
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    steps, words = reconciled(tmp_path, mark)
    assert steps == 32
    assert "is older than the checkpoint" in words


def test_a_lost_journal_leaves_what_the_checkpoint_knows(tmp_path: Path) -> None:
    mark = write(tmp_path, 32)
    journal_path(tmp_path, "run").unlink()
    steps, words = reconciled(tmp_path, mark)
    assert steps == 32
    assert "was not found" in words


def test_two_branches_are_both_charged(tmp_path: Path) -> None:
    """A copy of the folder was trained on; this journal is the copy's."""
    write(tmp_path / "a", 20)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    mark = write(tmp_path / "a", 30)
    write(tmp_path / "b", 35)
    steps, words = reconciled(tmp_path / "b", mark)
    assert steps == 30 + 35
    assert "are both charged" in words


def test_once_the_larger_was_taken_over_the_journal_is_the_newest_again(tmp_path: Path) -> None:
    write(tmp_path, 30)
    copy = journal_path(tmp_path, "run").read_bytes()
    mark = write(tmp_path, 48)
    journal_path(tmp_path, "run").write_bytes(copy)
    write(tmp_path, 64, after=Position.of(mark))
    assert reconciled(tmp_path, mark) == (64, "")


def test_a_journal_is_found_where_it_was_moved_to(tmp_path: Path) -> None:
    mark = write(tmp_path / "old", 16)
    (tmp_path / "old").rename(tmp_path / "new")
    folder, state = find_journal(mark, "run", [tmp_path / "none", tmp_path / "new"])
    assert folder == tmp_path / "new"
    assert state is not None
    # Of a copy and the original, the one that went on counts; of two alike, the copy at hand.
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    assert find_journal(mark, "run", [tmp_path / "new"])[0] == tmp_path / "new"
    write(tmp_path / "old", 32)
    assert find_journal(mark, "run", [tmp_path / "new"])[0] == tmp_path / "old"
    assert find_journal({**mark, "folder": "gone"}, "run", []) == (Path("gone"), None)


def test_a_journal_of_zeros_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 16)
    path = journal_path(tmp_path, "run")
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(Refused, match="found zeros"):
        read_journal(path)

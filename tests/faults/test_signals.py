"""A signal on any rank stops all of them between two steps, within seconds."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.faults.jobs import Job, check_nothing_lost, journal_of
from tests.faults.signals import EXIT_CODES, stop
from tests.faults.training import Settings

TERM, INT = signal.SIGTERM, signal.SIGINT
AT_ONCE = 12.0  # seconds, on a machine that does other things too


@pytest.mark.parametrize(
    ("world_size", "signum", "ranks", "saves"),
    [
        (2, TERM, [1], True),
        pytest.param(1, INT, [0], True, marks=pytest.mark.slow),
        pytest.param(1, TERM, [0], False, marks=pytest.mark.slow),
        pytest.param(2, INT, [0], False, marks=pytest.mark.slow),
        pytest.param(2, TERM, [0], False, marks=pytest.mark.slow),
        pytest.param(2, TERM, None, True, marks=pytest.mark.slow),
        pytest.param(2, INT, None, True, marks=pytest.mark.slow),
        pytest.param(4, TERM, [3], True, marks=pytest.mark.slow),
        pytest.param(4, INT, [0, 2], True, marks=pytest.mark.slow),
    ],
)
def test_all_ranks_stop_with_a_checkpoint_if_asked(
    tmp_path: Path, world_size: int, signum: int, ranks: list[int] | None, saves: bool
) -> None:
    found = stop(tmp_path, signum, ranks, world_size, save_on_exception=saves, save_every=1_000_000)
    assert found.seconds < AT_ONCE, found.words
    assert found.codes == [EXIT_CODES[signum]] * world_size, found.words
    assert found.charged == found.taken
    assert found.saved_steps == ([found.taken] if saves else [])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_validation_stops_too(tmp_path: Path, world_size: int) -> None:
    found = stop(tmp_path, TERM, [world_size - 1], world_size, phase="validation")
    assert found.seconds < AT_ONCE, found.words
    assert found.codes == [EXIT_CODES[TERM]] * world_size, found.words


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_fails_takes_the_others_along_and_its_error_is_shown_first(
    tmp_path: Path, rank: int
) -> None:
    """A checkpoint on exceptions does not wait for it either."""
    run = Settings(
        root=str(tmp_path / "run"),
        notes=str(tmp_path / "notes"),
        raise_at=(5, rank),
        save_on_exception=True,
    )
    with Job(run, 2) as job:
        job.wait_for("steps", 5)
        codes = job.ended(patience=10.0)
        words = job.words()
    assert codes == [1, 1], words
    shown = [line for line in words.splitlines() if line.startswith("[rank ")]
    assert shown[0] == f"[rank {rank}] has failed:"
    other = f"[rank {1 - rank}] ends, because rank {rank} has failed: RuntimeError: an error in"
    assert other in words
    assert check_nothing_lost(run) <= 16


@pytest.mark.slow
def test_an_error_of_all_ranks_is_saved_if_asked(tmp_path: Path) -> None:
    """They have come to the same point: nobody waits for anybody."""
    run = Settings(
        root=str(tmp_path / "run"),
        notes=str(tmp_path / "notes"),
        raise_at=(5, -1),
        save_on_exception=True,
        save_every=1_000_000,
    )
    with Job(run, 2) as job:
        job.wait_for("steps", 5)
        assert job.ended(patience=15.0) == [1, 1], job.words()
        words = job.words()
    assert "No checkpoint was saved" not in words
    state = journal_of(run)
    assert state is not None
    assert [Path(name).name for name in state.checkpoints] == ["step=5.ckpt"]
    assert state.ledger.steps == 5

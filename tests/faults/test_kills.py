"""After a kill nothing is lost, nobody waits, and a restart goes on by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_dpsparse.budget import WRITE_AHEAD
from tests.faults.kills import kill_again_and_again


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "mechanism", "kills"), [(1, "adafest", 2), (2, "lazydp", 1)]
)
def test_a_killed_run_goes_on_with_its_ledger(
    tmp_path: Path, world_size: int, mechanism: str, kills: int
) -> None:
    tally = kill_again_and_again(
        tmp_path / "run", tmp_path / "notes", kills, 3, world_size, mechanism=mechanism, steps=40
    )
    assert tally.largest_overcharge <= WRITE_AHEAD


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_many_kills(tmp_path: Path, world_size: int) -> None:
    tally = kill_again_and_again(
        tmp_path / "run", tmp_path / "notes", 10, 1, world_size, steps=150, save_last=True
    )
    assert tally.largest_overcharge <= WRITE_AHEAD


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_first_checkpoint_goes_on_with_its_ledger(
    tmp_path: Path,
) -> None:
    """Its weights begin anew; what it has spent stays spent."""
    tally = kill_again_and_again(
        tmp_path / "run", tmp_path / "notes", 2, 5, steps=30, save_every=1_000
    )
    assert tally.steps > 30
    assert tally.largest_overcharge <= WRITE_AHEAD

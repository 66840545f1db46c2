"""Hosts that lose each other, that share no folder, and what can be read between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.hosts import HostJob, come_back_later, come_back_soon
from tests.faults.jobs import journal_of, noted
from tests.faults.training import Settings
from tests.support.net_hosts import Hosts, why_no_hosts

pytestmark = pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))


@pytest.mark.slow
def test_the_key_is_not_seen_between_hosts(tmp_path: Path) -> None:
    """Whoever listens reads much (losses, gradients, the name of the run), but not the key."""
    run = Settings(
        root=str(tmp_path / "run"),
        notes=str(tmp_path / "notes"),
        hosts=2,
        steps=3,
        tells_key=True,
    )
    with Hosts(2) as hosts:
        capture = hosts.capture()
        with HostJob(hosts, run, 7001) as job:
            assert job.ended() == [0, 0], job.words()
        seen = capture.stop()
    keys = [Path(run.notes, f"key-{rank}").read_bytes() for rank in range(2)]
    assert len(keys[0]) == 16
    assert keys[0] == keys[1]
    for form in (keys[0], keys[0][::-1], keys[0].hex().encode(), repr(keys[0]).encode()):
        assert form not in seen
    journal = journal_of(run)
    assert journal is not None
    assert journal.ledger.run.encode() in seen  # the capture does see what is sent


@pytest.mark.slow
def test_hosts_without_a_shared_folder_are_refused_before_any_step(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run = Settings(root=str(tmp_path / "run"), notes=str(tmp_path / "notes"), hosts=2, steps=5)
    with Hosts(2, own_folders=[tmp_path / "run"]) as hosts, HostJob(hosts, run, 7002) as job:
        assert job.ended() == [1, 1], job.words()
        words = job.words()
    assert words.count("Expected a folder that all hosts share") >= 2
    assert "ranks 1 do not see what rank 0 writes there" in words
    assert noted(run) == 0


@pytest.mark.slow
def test_a_host_that_comes_back_soon_goes_on(tmp_path: Path) -> None:
    come_back_soon(tmp_path, 1, 7003)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_that_stays_away_ends_the_run_on_both_and_it_goes_on_later(
    tmp_path: Path, lost: int
) -> None:
    """Within the strategy's timeout, and some seconds to end."""
    come_back_later(tmp_path, lost, 7004 + 2 * lost)

"""Hosts that lose each other, that share no folder, and what can be read between them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lightning_dpsparse.budget import WRITE_AHEAD
from tests.faults.hosts import HostJob
from tests.faults.jobs import check_nothing_lost, journal_of, noted
from tests.faults.training import Settings
from tests.support.net_hosts import Hosts, why_no_hosts

pytestmark = pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))


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
    run = Settings(
        root=str(tmp_path / "run"),
        notes=str(tmp_path / "notes"),
        hosts=2,
        steps=60,
        seconds_per_step=0.02,
        timeout=60.0,
    )
    with Hosts(2) as hosts, HostJob(hosts, run, 7003) as job:
        job.wait_for_steps(10)
        hosts.cut_off(1)
        time.sleep(4.0)
        stood_still_at = noted(run)
        time.sleep(1.0)
        assert noted(run) == stood_still_at
        hosts.reconnect(1)
        assert job.ended() == [0, 0], job.words()
    assert check_nothing_lost(run) == 0
    assert noted(run) == 60


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_that_stays_away_ends_the_run_on_both_and_it_goes_on_later(
    tmp_path: Path, lost: int
) -> None:
    """Within the strategy's timeout, and some seconds to end."""
    run = Settings(
        root=str(tmp_path / "run"),
        notes=str(tmp_path / "notes"),
        hosts=2,
        steps=60,
        seconds_per_step=0.02,
        timeout=8.0,
    )
    with Hosts(2) as hosts:
        with HostJob(hosts, run, 7004) as job:
            job.wait_for_steps(10)
            hosts.cut_off(lost)
            codes = job.ended(patience=8.0 + 20.0)
            words = job.words()
        assert 0 not in codes, words
        assert "has lost the connection to another rank" in words
        assert check_nothing_lost(run) <= WRITE_AHEAD
        hosts.reconnect(lost)
        with HostJob(hosts, run, 7005) as job:
            assert job.ended() == [0, 0], job.words()
    check_nothing_lost(run)
    journal = journal_of(run)
    assert journal is not None
    assert journal.ledger.position == 60

"""A run on several hosts, whose network may be cut."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_dpsparse.budget import WRITE_AHEAD
from tests.faults.jobs import PATIENCE, check_nothing_lost, journal_of, noted
from tests.faults.training import Settings
from tests.support.net_hosts import CARD, Hosts

_REPOSITORY = Path(__file__).parents[2]


class HostJob:
    """One rank on each host, started as programs, without a launcher that watches them."""

    def __init__(self, hosts: Hosts, settings: Settings, port: int) -> None:
        self.settings = settings
        Path(settings.notes).mkdir(parents=True, exist_ok=True)
        self._processes: list[subprocess.Popen[Any]] = []
        self._outputs: list[Path] = []
        for rank in range(settings.hosts):
            output = Path(settings.notes, f"output-{port}-{rank}")
            environment = {
                "MASTER_ADDR": hosts.address(0),
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "WORLD_SIZE": str(settings.hosts),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "GROUP_RANK": str(rank),
                "TORCHELASTIC_RUN_ID": "hosts",
                "GLOO_SOCKET_IFNAME": CARD,
                "PYTHONPATH": os.pathsep.join([str(_REPOSITORY), *sys.path]),
            }
            command = [sys.executable, "-m", "tests.faults.rank", json.dumps(asdict(settings))]
            with output.open("wb") as file:
                self._processes.append(
                    hosts.start(rank, command, env=environment, stdout=file, stderr=file)
                )
            self._outputs.append(output)

    def wait_for_steps(self, count: int) -> None:
        """Wait until so many steps have begun, over all jobs so far."""
        end = time.monotonic() + PATIENCE
        while noted(self.settings) < count:
            ended = any(process.poll() is not None for process in self._processes)
            if time.monotonic() > end or ended:
                raise TimeoutError(f"steps did not come to {count}:\n{self.words()}")
            time.sleep(0.01)

    def ended(self, patience: float = PATIENCE) -> list[int]:
        """Exit codes of all ranks, which must end in time."""
        end = time.monotonic() + patience
        try:
            return [p.wait(max(0.0, end - time.monotonic())) for p in self._processes]
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"not ended within {patience} s:\n{self.words()}") from None

    def words(self) -> str:
        """What the ranks have printed, one after the other."""
        return "\n".join(path.read_text(errors="replace") for path in self._outputs)

    def __enter__(self) -> HostJob:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def come_back_soon(folder: Path, lost: int, port: int) -> None:
    """Cut a host off for some seconds: all wait for it, and go on."""
    run = _two_hosts(folder, timeout=60.0)
    with Hosts(2) as hosts, HostJob(hosts, run, port) as job:
        job.wait_for_steps(10)
        hosts.cut_off(lost)
        time.sleep(4.0)
        stood_still_at = noted(run)
        time.sleep(1.0)
        assert noted(run) == stood_still_at
        hosts.reconnect(lost)
        assert job.ended() == [0, 0], job.words()
    assert check_nothing_lost(run) == 0
    assert noted(run) == run.steps


def come_back_later(folder: Path, lost: int, port: int) -> None:
    """Cut a host off for longer than the timeout: both end, and another job goes on later."""
    run = _two_hosts(folder, timeout=8.0)
    with Hosts(2) as hosts:
        with HostJob(hosts, run, port) as job:
            job.wait_for_steps(10)
            hosts.cut_off(lost)
            codes = job.ended(patience=8.0 + 20.0)
            words = job.words()
        assert 0 not in codes, words
        assert "has lost the connection to another rank" in words
        assert check_nothing_lost(run) <= WRITE_AHEAD
        hosts.reconnect(lost)
        with HostJob(hosts, run, port + 1) as job:
            assert job.ended() == [0, 0], job.words()
    check_nothing_lost(run)
    journal = journal_of(run)
    assert journal is not None
    assert journal.ledger.position == run.steps


def _two_hosts(folder: Path, timeout: float) -> Settings:
    return Settings(
        root=str(folder / "run"),
        notes=str(folder / "notes"),
        hosts=2,
        steps=60,
        seconds_per_step=0.02,
        timeout=timeout,
    )

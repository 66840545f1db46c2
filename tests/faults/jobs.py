"""Jobs of one or several ranks, which can be killed, signalled, and looked at from outside."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_dpsparse.accounting.journal import JournalState, read_journal
from lightning_dpsparse.sharded.checkpoint_files import check_alone
from tests.faults.training import Settings, train
from tests.support.ranks import FORKED

PATIENCE = 90.0  # seconds for anything that should come


class Job:
    """Ranks that train. They are forked from the server that holds the imports."""

    def __init__(self, settings: Settings, world_size: int = 1, attempt: int = 0) -> None:
        self.settings, self.world_size = settings, world_size
        self.output = Path(settings.notes, f"output-{time.monotonic_ns()}")
        Path(settings.notes).mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._processes: list[Any] = []
        for rank in range(world_size):
            process = FORKED.Process(
                target=_rank, args=(settings, rank, world_size, port, attempt, str(self.output))
            )
            process.start()
            self._processes.append(process)

    # ---- what it has done so far ----------------------------------------------------------------

    def wait_for(self, name: str, count: int) -> None:
        """Wait until so many steps (or batches of validation) have begun, over all jobs so far."""
        end = time.monotonic() + PATIENCE
        while noted(self.settings, name) < count:
            if time.monotonic() > end or not self.alive():
                raise TimeoutError(f"{name} did not come to {count}:\n{self.words()}")
            time.sleep(0.002)

    def alive(self) -> list[int]:
        """Ranks whose processes have not ended."""
        return [rank for rank, process in enumerate(self._processes) if process.is_alive()]

    def words(self) -> str:
        """What the ranks have printed."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    # ---- what is done to it ---------------------------------------------------------------------

    def kill(self, ranks: Sequence[int] | None = None) -> None:
        self.send(signal.SIGKILL, ranks)

    def send(self, signum: int, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to some ranks, or to all."""
        for rank in range(self.world_size) if ranks is None else ranks:
            process = self._processes[rank]
            if process.is_alive():
                os.kill(process.pid, signum)

    def ended(self, patience: float = PATIENCE) -> list[int]:
        """Exit codes of all ranks, which must end in time; whoever does not is killed."""
        end = time.monotonic() + patience
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
        late = self.alive()
        if late:
            self.kill()
            for process in self._processes:
                process.join()
            raise TimeoutError(f"ranks {late} did not end within {patience} s:\n{self.words()}")
        return [process.exitcode for process in self._processes]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *args: object) -> None:
        self.kill()
        for process in self._processes:
            process.join()


def noted(settings: Settings, name: str = "steps") -> int:
    """How many steps, or batches of validation, all jobs with these notes have begun."""
    path = Path(settings.notes, name)
    return path.stat().st_size if path.exists() else 0


def reported_whole(settings: Settings) -> list[Path]:
    """Checkpoints that were reported whole, and that nobody was about to remove since."""
    path = Path(settings.notes, "checkpoints")
    found: dict[str, None] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        found.pop(line[1:], None)
        if line[0] == "+":
            found[line[1:]] = None
    return [Path(name) for name in found]


def journal_of(settings: Settings) -> JournalState | None:
    """What the only journal of the run says; None if no run has come so far."""
    paths = list(Path(settings.root, "privacy").glob("*.journal"))
    assert len(paths) <= 1, f"{len(paths)} lines of runs where there should be one"
    return read_journal(paths[0]) if paths else None


def check_nothing_lost(settings: Settings) -> int:
    """Every step is charged, and every checkpoint that was reported is whole.

    Returns how many steps were charged that nobody took.
    """
    begun, journal = noted(settings), journal_of(settings)
    charged = 0 if journal is None else journal.ledger.steps
    assert charged >= begun, f"{begun} steps have begun, and {charged} are charged"
    for path in reported_whole(settings):
        check_alone(path)
    return charged - begun


def _rank(
    settings: Settings, rank: int, world_size: int, port: int, attempt: int, output: str
) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    per_host = world_size // settings.hosts
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank % per_host),
        LOCAL_WORLD_SIZE=str(per_host),
        GROUP_RANK=str(rank // per_host),
        TORCHELASTIC_RUN_ID="faults",
        TORCHELASTIC_RESTART_COUNT=str(attempt),
    )
    import torch
    from lightning.pytorch.utilities import rank_zero_only

    torch.set_num_threads(1)
    rank_zero_only.rank = rank
    signal.signal(signal.SIGINT, signal.default_int_handler)
    train(settings, world_size)

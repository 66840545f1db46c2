"""Signals to one rank or to all, while they train, validate, or save."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.jobs import Job, check_nothing_lost, journal_of, noted
from tests.faults.training import Settings

FOREVER = 3_000
"""Number of steps of a run that only a signal ends: it would take minutes."""


@dataclass(frozen=True)
class Stopped:
    """How a job ended that was told to stop."""

    seconds: float
    codes: list[int]
    saved_steps: list[int]
    """Steps of the checkpoints that are left, sorted."""
    charged: int
    taken: int
    words: str


def stop(
    folder: Path,
    signum: int,
    ranks: Sequence[int] | None,
    world_size: int,
    phase: str = "steps",
    **settings: Any,
) -> Stopped:
    """Train until something has begun, send a signal, and see all ranks end."""
    run = Settings(
        root=str(folder / "run"),
        notes=str(folder / "notes"),
        **{"steps": FOREVER, "seconds_per_step": 0.005, "validate": phase == "validation"}
        | settings,
    )
    with Job(run, world_size) as job:
        job.wait_for(phase, 12)
        begun = time.monotonic()
        job.send(signum, ranks)
        codes = job.ended(patience=30.0)
        seconds = time.monotonic() - begun
        words = job.words()
    assert check_nothing_lost(run) == 0  # the journal was settled
    journal = journal_of(run)
    assert journal is not None
    left = [Path(name) for name in journal.checkpoints]
    saved = sorted(int(path.stem.rpartition("=")[2]) for path in left)
    return Stopped(seconds, codes, saved, journal.ledger.steps, noted(run), words)


EXIT_CODES = {signal.SIGTERM: 128 + signal.SIGTERM, signal.SIGINT: 1}

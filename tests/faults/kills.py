"""Kills: processes that end at any moment, without a word."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from tests.faults.jobs import Job, check_nothing_lost, journal_of, noted
from tests.faults.power import Tally
from tests.faults.training import Settings


def kill_again_and_again(
    root: Path, notes: Path, kills: int, seed: int, world_size: int = 1, **settings: Any
) -> Tally:
    """Kill one line of runs so often, one rank or all, then let it come to its end.

    The ranks that are left must end by themselves. Every job after the first is a restart, as
    torchrun starts it: nobody says what it should go on from.
    """
    rng = random.Random(seed)
    run = Settings(root=str(root), notes=str(notes), **{"resume": None, **settings})
    tally, overcharge = Tally(), 0
    for attempt in range(kills):
        with Job(run, world_size, attempt) as job:
            job.wait_for("steps", noted(run) + rng.randrange(1, 25))
            time.sleep(rng.random() * 0.3)
            job.kill(None if rng.random() < 0.5 else [rng.randrange(world_size)])
            job.ended(patience=10.0)
        paid = check_nothing_lost(run)
        tally.cuts += 1
        tally.largest_overcharge = max(tally.largest_overcharge, paid - overcharge)
        overcharge = paid
    with Job(run, world_size, kills) as job:
        assert job.ended() == [0] * world_size, job.words()
    check_nothing_lost(run)
    journal = journal_of(run)
    assert journal is not None
    assert journal.ledger.position == run.steps
    tally.steps = noted(run)
    return tally

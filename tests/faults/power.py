"""Power cuts: a run on a disk that forgets what was not synced, again and again."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.jobs import PATIENCE, Job, check_nothing_lost, journal_of, noted
from tests.faults.training import Settings
from tests.support.cut_disk import CutDisk
from tests.support.lossy_disk import LossyDisk


@dataclass
class Tally:
    """What became of some power cuts."""

    cuts: int = 0
    steps: int = 0
    """Steps that were taken."""
    largest_overcharge: int = 0
    """Most steps that one cut made the run pay for without taking them."""


def cut_again_and_again(
    disk: LossyDisk | CutDisk,
    notes: Path,
    cuts: int,
    seed: int,
    world_size: int = 1,
    **settings: Any,
) -> Tally:
    """Cut the power of one line of runs so often, then let it come to its end.

    After every cut nothing may be lost (`check_nothing_lost`), and the run goes on by itself.
    """
    rng = random.Random(seed)
    run = Settings(root=str(disk.path / "run"), notes=str(notes), **settings)
    tally, overcharge = Tally(), 0
    for _ in range(cuts):
        with Job(run, world_size) as job:
            _cut(disk, rng, job)
            job.kill()
            job.ended()
        if isinstance(disk, LossyDisk):
            disk.reboot(keep=rng.choice(["nothing", "some"]), seed=rng.randrange(1 << 30))
        else:
            disk.reboot()
        paid = check_nothing_lost(run)
        tally.cuts += 1
        tally.largest_overcharge = max(tally.largest_overcharge, paid - overcharge)
        overcharge = paid
    with Job(run, world_size) as job:
        codes = job.ended()
        assert codes == [0] * world_size, job.words()
    check_nothing_lost(run)
    journal = journal_of(run)
    assert journal is not None
    assert journal.ledger.position == run.steps
    tally.steps = noted(run)
    return tally


def _cut(disk: LossyDisk | CutDisk, rng: random.Random, job: Job) -> None:
    """Cut the power in the middle of a job: between two changes of the disk, or between steps."""
    if isinstance(disk, LossyDisk) and rng.random() < 0.7:
        disk.cut(after=rng.randrange(200))
        end = time.monotonic() + PATIENCE
        while not disk.is_dead and job.alive() and time.monotonic() < end:
            time.sleep(0.01)
    else:
        job.wait_for("steps", noted(job.settings) + rng.randrange(1, 25))
        time.sleep(rng.random() * 0.3)
    disk.cut()

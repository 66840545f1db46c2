"""Disks that fill up, fail, or become read-only in the middle of a run; and files that rot."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.jobs import Job, check_nothing_lost, journal_of, noted, reported_whole
from tests.faults.training import Settings
from tests.support.lossy_disk import LossyDisk

FAULTS: dict[str, Callable[[LossyDisk, random.Random], None]] = {
    "full at once": lambda disk, rng: disk.limit(0),
    "nearly full": lambda disk, rng: disk.limit(rng.randrange(1_000, 60_000)),
    "full in the middle of a file": lambda disk, rng: disk.fail(
        "write", errno.ENOSPC, after=rng.randrange(80_000)
    ),
    "bad block": lambda disk, rng: disk.fail("write", errno.EIO, after=rng.randrange(80_000)),
    "sync fails": lambda disk, rng: disk.fail("fsync", errno.EIO, after=rng.randrange(20)),
    "rename fails": lambda disk, rng: disk.fail("rename", errno.EIO, after=rng.randrange(4)),
    "no new files": lambda disk, rng: disk.fail("create", errno.ENOSPC, after=rng.randrange(8)),
    "read-only": lambda disk, rng: disk.read_only(True),
}


def train_through(
    disk: LossyDisk, notes: Path, fault: str, seed: int, world_size: int = 1, **settings: Any
) -> str:
    """Train until there are checkpoints, let the disk fail, see the run end, heal it, go on.

    Returns what the ranks said when it failed.
    """
    run = Settings(
        root=str(disk.path / "run"),
        notes=str(notes),
        with_report=seed % 2 == 0,  # a report is the first file that cannot be written
        **{"steps": 60, "save_every": 3, "save_last": True, "seconds_per_step": 0.02} | settings,
    )
    with Job(run, world_size) as job:
        job.wait_for("steps", 8)
        before = reported_whole(run)
        assert before
        FAULTS[fault](disk, random.Random(seed))
        codes = job.ended(patience=60.0)
        words = job.words()
    assert codes == [1] * world_size, f"{codes}\n{words}"
    disk.heal()
    disk.read_only(False)
    disk.limit(None)
    check_nothing_lost(run)
    with Job(run, world_size) as job:
        assert job.ended() == [0] * world_size, job.words()
    check_nothing_lost(run)
    journal = journal_of(run)
    assert journal is not None
    assert journal.ledger.position == run.steps
    assert noted(run) >= run.steps
    left = [path.name for path in Path(run.root, "checkpoints").iterdir()]
    assert not [name for name in left if name.startswith(".")], left
    return words


# ---- files that rot ------------------------------------------------------------------------------


def flip_a_bit(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def zero_a_block(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = rng.randrange(len(data)) // 512 * 512
    if not any(data[start : start + 512]):
        data[start] = 1  # a block that was zero already
    else:
        data[start : start + 512] = bytes(len(data[start : start + 512]))
    path.write_bytes(data)


def cut_off(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def lengthen(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + bytes(rng.randrange(1, 600)))


def delete(path: Path, rng: random.Random) -> None:
    path.unlink()


DAMAGES = {
    "flipped bit": flip_a_bit,
    "zeroed block": zero_a_block,
    "cut off": cut_off,
    "longer": lengthen,
    "deleted": delete,
}
FILES = ("__0_0.distcp", "meta.pt", ".metadata", "manifest.json")

"""The table of faults: what was tried, and what survived. `python -m tests.faults --json F`.

The same trials as in the tests beside, in larger numbers. It takes about forty minutes, and needs
root for disks and networks of its own. One that fails is counted, and its words are printed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import print_table, write_json_lines
from tests.faults.disks import FAULTS, train_through
from tests.faults.hosts import come_back_later, come_back_soon
from tests.faults.jobs import Job, check_nothing_lost
from tests.faults.kills import kill_again_and_again
from tests.faults.power import cut_again_and_again
from tests.faults.signals import EXIT_CODES, stop
from tests.faults.training import Settings
from tests.support.cut_disk import CutDisk
from tests.support.lossy_disk import LossyDisk

Trial = Callable[[Path], tuple[int, float]]
"""Runs in a new folder. Returns how many faults it survived, and what is to be shown of it."""


@dataclass
class Row:
    """One line of the table."""

    fault: str
    tried: int = 0
    survived: int = 0
    shown: str = ""
    """What the largest number of all its trials is."""
    largest: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Trials:
    """Trials of one kind."""

    fault: str
    shown: str
    each: int
    """Faults in one trial."""
    trials: list[Trial]

    def run(self) -> Row:
        row, start = Row(self.fault, shown=self.shown), time.monotonic()
        for trial in self.trials:
            folder = Path(tempfile.mkdtemp())
            row.tried += self.each
            try:
                survived, number = trial(folder)
            except Exception:
                traceback.print_exc()
                continue
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            row.survived += survived
            row.largest = max(row.largest, round(number, 1))
        row.seconds = round(time.monotonic() - start)
        return row


OVERCHARGE, SECONDS = "steps charged that nobody took, at most", "seconds to the end, at most"


def _cuts(
    disk: Callable[[], AbstractContextManager[Any]], cuts: int, seed: int, ranks: int, **how: Any
) -> Trial:
    def trial(folder: Path) -> tuple[int, float]:
        with disk() as mounted:
            tally = cut_again_and_again(mounted, folder, cuts, seed, ranks, steps=150, **how)
        return tally.cuts, tally.largest_overcharge

    return trial


def _kills(kills: int, seed: int, ranks: int, **how: Any) -> Trial:
    def trial(folder: Path) -> tuple[int, float]:
        tally = kill_again_and_again(
            folder / "run", folder / "notes", kills, seed, ranks, steps=200, **how
        )
        return tally.cuts, tally.largest_overcharge

    return trial


def _signals() -> Iterator[Trial]:
    told: dict[int, list[list[int] | None]] = {1: [[0]], 2: [[0], [1], None], 4: [[3], None]}
    for ranks, signum, saves in product(told, (signal.SIGTERM, signal.SIGINT), (False, True)):
        for which in told[ranks]:
            yield _signal(signum, which, ranks, saves, "steps")
    for ranks, signum in product(told, (signal.SIGTERM, signal.SIGINT)):
        yield _signal(signum, told[ranks][0], ranks, False, "validation")


def _signal(signum: int, which: list[int] | None, ranks: int, saves: bool, phase: str) -> Trial:
    def trial(folder: Path) -> tuple[int, float]:
        found = stop(
            folder, signum, which, ranks, phase, save_on_exception=saves, save_every=1_000_000
        )
        assert found.codes == [EXIT_CODES[signum]] * ranks, found.words
        assert found.charged == found.taken
        assert found.saved_steps == ([found.taken] if saves else [])
        return 1, found.seconds

    return trial


def _fails(ranks: int, rank: int, *, dies: bool) -> Trial:
    """A rank that raises, or is killed, takes the others along."""

    def trial(folder: Path) -> tuple[int, float]:
        run = Settings(
            root=str(folder / "run"),
            notes=str(folder / "notes"),
            raise_at=None if dies else (5, rank),
            save_on_exception=True,
            seconds_per_step=0.01,
            steps=3_000,
        )
        with Job(run, ranks) as job:
            job.wait_for("steps", 5)
            start = time.monotonic()
            if dies:
                job.kill([rank])
            codes = job.ended(patience=30.0)
            seconds = time.monotonic() - start
            words = job.words()
        assert 0 not in codes, words
        check_nothing_lost(run)
        first = next((line for line in words.splitlines() if line.startswith("[rank ")), "")
        assert dies or first == f"[rank {rank}] has failed:", words
        return 1, seconds

    return trial


def _disk_fault(fault: str, seed: int, ranks: int) -> Trial:
    def trial(folder: Path) -> tuple[int, float]:
        with LossyDisk() as disk:
            train_through(disk, folder, fault, seed, ranks)
        return 1, 0.0

    return trial


def _hosts(what: Callable[..., None], lost: int, port: int) -> Trial:
    def trial(folder: Path) -> tuple[int, float]:
        what(folder, lost, port)
        return 1, 0.0

    return trial


class _Outcomes:
    """Counts tests of pytest."""

    def __init__(self) -> None:
        self.passed = self.all = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.all += 1
            self.passed += report.passed


def _tests(fault: str, arguments: Sequence[str]) -> Row:
    """Tests that are one trial each."""
    outcomes, start = _Outcomes(), time.monotonic()
    pytest.main(["-q", "-p", "no:cacheprovider", *arguments], plugins=[outcomes])
    seconds = round(time.monotonic() - start)
    return Row(fault, outcomes.all, outcomes.passed, seconds=seconds)


def table() -> dict[str, Callable[[], Row]]:
    """A function for every line, by its fault."""
    cut, kill = "power cut", "SIGKILL"
    lines = [
        Trials(
            f"{cut}, a disk that keeps what was synced and no more, 1 rank",
            OVERCHARGE,
            10,
            [_cuts(LossyDisk, 10, 11, 1), _cuts(LossyDisk, 10, 12, 1, save_last=True)],
        ),
        Trials(
            f"{cut}, the same disk, 2 ranks",
            OVERCHARGE,
            8,
            [
                _cuts(LossyDisk, 8, 13, 2, mechanism="adafest"),
                _cuts(LossyDisk, 8, 14, 2, mechanism="dpsgd", save_last=True),
            ],
        ),
        Trials(
            f"{cut}, ext4",
            OVERCHARGE,
            8,
            [_cuts(partial(CutDisk, "ext4"), 8, 15, 1, save_last=True)],
        ),
        Trials(f"{cut}, xfs", OVERCHARGE, 8, [_cuts(partial(CutDisk, "xfs"), 8, 16, 2)]),
        Trials(f"{kill}, 1 rank", OVERCHARGE, 20, [_kills(20, 21, 1, save_last=True)]),
        Trials(
            f"{kill} of one rank or both, 2 ranks",
            OVERCHARGE,
            12,
            [_kills(12, 22, 2, save_last=True), _kills(12, 23, 2, mechanism="adafest")],
        ),
        Trials(f"{kill}, 4 ranks", OVERCHARGE, 8, [_kills(8, 24, 4, mechanism="dpsgd")]),
        Trials("SIGTERM or SIGINT to some of 1, 2, 4 ranks", SECONDS, 1, list(_signals())),
        Trials(
            "a rank raises or dies, the others end",
            SECONDS,
            1,
            [
                _fails(ranks, rank, dies=dies)
                for ranks, rank, dies in product((2, 4), (0, 1), (False, True))
            ],
        ),
        Trials(
            "full, failing, read-only disk",
            "",
            1,
            [_disk_fault(*case) for case in product(FAULTS, (1, 2), (1, 2))],
        ),
        Trials(
            "a host cut off, back in time",
            "",
            1,
            [_hosts(come_back_soon, lost, 7100 + lost) for lost in (0, 1)],
        ),
        Trials(
            "a host cut off, away for longer than the timeout",
            "",
            1,
            [_hosts(come_back_later, n % 2, 7110 + 2 * n) for n in range(4)],
        ),
    ]
    tests = {
        "torchrun starts it again": ["tests/plugin/test_resuming.py", "-k", "torchrun"],
        "a damaged file, or of an older checkpoint": [
            "tests/faults/test_disks.py",
            "-k",
            "damaged or older",
        ],
        "files from somebody else": ["tests/plugin/test_foreign_files.py"],
        "bad inputs": ["tests/bad_input", "-m", "not slow"],
    }
    found: dict[str, Callable[[], Row]] = {trials.fault: trials.run for trials in lines}
    return found | {fault: partial(_tests, fault, words) for fault, words in tests.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="lines whose fault contains this")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    options = parser.parse_args()
    rows = []
    for fault, run in table().items():
        if options.only in fault:
            rows.append(asdict(run()))
            print(json.dumps(rows[-1]), flush=True)
    print_table(rows)
    if options.json is not None:
        write_json_lines(rows, options.json)


if __name__ == "__main__":
    main()

"""What does it cost that charges reach the disk before their steps begin, by the window's size?

A record of the journal charges for `write_ahead` steps at once, and is synced. A larger window
needs fewer syncs; a crash is charged for at most the window. The yardstick charges for all steps at
start, and so never syncs in between. Syncs are rare and slow, so means are compared, not medians:
`python -m benchmarks.write_ahead --json F`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any

from benchmarks.harness import Feed, Mode, interleave, print_table, write_json_lines
from benchmarks.step_time import LEARNING_RATE, Workload, get_ready, trainer_for
from lightning_dpsparse import DPSparseStrategy, FusedOptimizer, LazyDP, PrivacyPlan

WINDOWS = (1, 4, 16, 64, 256)
WITHOUT = 1 << 30
_SLOW_SYNC_MS = 10.0
"""Of a spinning disk, or of a file server."""


def with_window(workload: Workload, write_ahead: int, folder: Path | None) -> Mode:
    """LazyDP with a journal in this folder, and this window."""

    def run(feed: Feed) -> None:
        plan = PrivacyPlan(
            mechanism=LazyDP(),
            noise_multiplier=1.0,
            expected_batch_size=workload.batch,
            sampling="unamplified",  # the same batches for every mode
            delta=1e-6,
        )
        strategy = DPSparseStrategy(
            privacy=plan,
            fused_optimizer=FusedOptimizer(kind="sgd", learning_rate=LEARNING_RATE),
            write_ahead=write_ahead,
        )
        with TemporaryDirectory(dir=folder) as root:
            trainer_for(strategy, root).fit(workload.module(), feed)

    return run


def sync_ms(folder: Path | None, size: int = 600, times: int = 50) -> float:
    """Milliseconds to append a record to a file and sync it."""
    taken = []
    with NamedTemporaryFile(dir=folder) as file:
        for _ in range(times):
            start = time.perf_counter()
            file.write(b"." * size)
            file.flush()
            os.fsync(file.fileno())
            taken.append((time.perf_counter() - start) * 1e3)
    return statistics.mean(taken)


def measure(
    workload: Workload, windows: Sequence[int], steps: int, folder: Path | None
) -> list[dict[str, Any]]:
    sizes = [WITHOUT, *windows]
    modes = {str(size): with_window(workload, size, folder) for size in sizes}
    times = interleave(modes, workload.batches(), steps)
    means = [_mean(times[str(size)].wall_ms) for size in sizes]
    sync = sync_ms(folder)
    return [
        {
            "write_ahead": "all" if size == WITHOUT else size,
            "batch": workload.batch,
            "ms_per_step": round(mean, 3),
            "ratio": round(mean / means[0], 4),
            "sync_ms": round(sync, 3),
            "ratio_by_sync": round(1 + sync / size / means[0], 4),
            "ratio_if_a_sync_takes_10_ms": round(1 + _SLOW_SYNC_MS / size / means[0], 4),
        }
        for size, mean in zip(sizes, means)
    ]


def _mean(taken: Sequence[float]) -> float:
    """The mean without the slowest steps, one in a hundred: they are the machine's."""
    kept = sorted(taken)[: max(1, len(taken) - len(taken) // 100)]
    return statistics.mean(kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--folder", type=Path, help="where the journals go: a disk to try")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    workload = Workload(options.rows, options.batch, options.dim, options.tables)
    get_ready()
    rows = measure(workload, WINDOWS, options.steps, options.folder)
    print_table(rows)
    if options.json is not None:
        write_json_lines(rows, options.json)


if __name__ == "__main__":
    main()

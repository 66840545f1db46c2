"""Does the one-run audit catch what is broken, and leave alone what is right?

Every variant is trained and audited a number of times, with fresh coins and fresh noise: four steps
on everybody, epsilon 1.3 at delta 1e-6, white-box canaries. A run is caught if the epsilon that
was measured is above the one that was claimed.

Rows of the second kind are attacks on low bits: one step, a noise multiplier of 50, and a row for
each of 128 targets that others read too, or do not (`broken.audit_low_bits`).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.broken import audit, audit_low_bits
from benchmarks.harness import print_table, write_json_lines
from benchmarks.step_time import get_ready, one_thread
from lightning_dpsparse import DPSGD, EANA, AdaFEST, LazyDP
from lightning_dpsparse.audit.one_run import OneRunResult
from lightning_dpsparse.engine.mechanism import Mechanism
from lightning_dpsparse.recipe import hide_upstream_warnings

CASES: list[tuple[str, Mechanism, int]] = [
    ("as it is", DPSGD(), 1),
    ("as it is", LazyDP(), 1),
    ("as it is", AdaFEST(threshold=8.0), 1),
    ("as it is", DPSGD(), 2),
    ("noise / 2", DPSGD(), 1),
    ("noise / 2", LazyDP(), 1),
    ("no flush", LazyDP(), 1),
    ("called private", EANA(), 1),
    ("one seed for all shards", DPSGD(), 2),
    ("noise / sqrt(2)", DPSGD(), 1),
]
"""What is broken, the mechanism, and on how many ranks."""

LOW_BIT_CASES: list[tuple[str, Mechanism, int, str]] = [
    ("as it is", DPSGD(), 39, "fast"),
    ("as it is", DPSGD(), 39, "secure"),
    ("as it is", DPSGD(), 0, "secure"),
    ("as it is", LazyDP(), 39, "fast"),
    ("as it is", LazyDP(), 39, "secure"),
    ("as it is", LazyDP(), 0, "fast"),
    ("as it is", LazyDP(), 0, "secure"),
    ("noise of torch in float32", DPSGD(), 39, "fast"),
    ("noise of torch in float32", DPSGD(), 0, "fast"),
    ("noise of torch in float32", LazyDP(), 39, "fast"),
    ("noise of numpy in float32", DPSGD(), 39, "fast"),
    ("sums off the grid", DPSGD(), 39, "fast"),
]
"""What is broken, the mechanism, how many others read a target's row, and where noise is from."""


def measure(variant: str, mechanism: Mechanism, world_size: int, runs: int) -> dict[str, Any]:
    """One row: how many runs were caught."""
    if world_size == 1:
        found = [audit(variant, mechanism) for _ in range(runs)]
    else:
        found = _on_ranks(variant, mechanism, world_size, runs)
    return _row(variant, mechanism, world_size, found)


def measure_low_bits(
    variant: str, mechanism: Mechanism, readers: int, noise_source: str, runs: int
) -> dict[str, Any]:
    """One row: how many steps were caught."""
    found = [
        audit_low_bits(variant, mechanism, readers=readers, noise_source=noise_source)
        for _ in range(runs)
    ]
    name = f"{variant}, {noise_source}, {readers} other readers"
    return _row(name, mechanism, 1, found)


def _row(
    variant: str, mechanism: Mechanism, world_size: int, found: list[OneRunResult]
) -> dict[str, Any]:
    measured = [result.measured.epsilon for result in found]
    return {
        "variant": variant,
        "mechanism": type(mechanism).__name__,
        "ranks": world_size,
        "claimed": round(found[0].claimed_epsilon or 0.0, 3),
        "measured_least": round(min(measured), 3),
        "measured_median": round(median(measured), 3),
        "measured_most": round(max(measured), 3),
        "attack": found[0].measured.attack,
        "caught": sum(not result.passed for result in found),
        "runs": len(found),
    }


def _on_ranks(variant: str, mechanism: Mechanism, world_size: int, runs: int) -> list[Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(world_size, mp_context=spawn) as ranks:
        waiting = [
            ranks.submit(_rank, rank, world_size, port, variant, mechanism, runs)
            for rank in range(world_size)
        ]
        results: list[Any] = waiting[0].result()
        return results


def _rank(
    rank: int, world_size: int, port: int, variant: str, mechanism: Mechanism, runs: int
) -> list[Any]:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="audits",
        RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0",
        WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
    )  # fmt: skip
    hide_upstream_warnings()
    one_thread()
    # All ranks toss the same coins.
    return [audit(variant, mechanism, world_size, seed=run, canaries=20_000) for run in range(runs)]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.audits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=20, help="of every variant")
    parser.add_argument("--json", type=Path, help="write one JSON object per variant to this file")
    options = parser.parse_args()
    get_ready()
    rows = [measure(*case, options.runs) for case in CASES]
    rows += [measure_low_bits(*case, options.runs) for case in LOW_BIT_CASES]
    print_table(rows)
    if options.json:
        write_json_lines(rows, options.json)


if __name__ == "__main__":
    main()

"""The benchmarks of long runs run, and the bookkeeping of many steps stays exact and small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.many_steps import simulate

ROOT = Path(__file__).parents[2]


def test_bookkeeping_stays_exact_and_small(tmp_path: Path) -> None:
    rows = simulate(20_000, tmp_path)
    assert [row["steps"] for row in rows] == list(range(2_000, 20_001, 2_000))
    for row in rows:
        assert row["clock_error"] < 1e-14
        assert row["journal_bytes"] < 256 * 1_000  # lines, of a kilobyte at most
        assert row["ledger_bytes"] < 1_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "rows"),
    [
        (["benchmarks.soak", "--steps", "100"], 20),
        (["benchmarks.tall_table", "--rows", "20000"], 2),
        (["benchmarks.write_ahead", "--steps", "4", "--rows", "50", "--tables", "3"], 6),
    ],
)
def test_the_commands_write_what_they_measured(
    command: list[str], rows: int, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    words = [sys.executable, "-m", *command, "--json", str(out)]
    subprocess.run(words, check=True, capture_output=True, cwd=ROOT, timeout=200)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(found) == rows
    assert all(row.keys() == found[0].keys() for row in found)

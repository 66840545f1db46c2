"""The benchmark runs, takes turns, and writes what it promises. Never what it measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import Feed, interleave


def test_modes_take_turns_step_by_step() -> None:
    order: list[str] = []

    def mode(name: str):  # type: ignore[no-untyped-def]
        def run(feed: Feed) -> None:
            order.append(f"set up {name}")
            for batch in feed:
                order.append(f"{name}{batch}")
            order.append(f"end {name}")

        return run

    times = interleave({"a": mode("a"), "b": mode("b")}, [0, 1], steps=2, warm_up=1)
    assert order[:8] == ["set up a", "set up b", "a0", "b0", "a1", "b1", "a0", "b0"]
    assert sorted(order[8:]) == ["end a", "end b"]
    assert all(len(t.cpu_ms) == len(t.wall_ms) == 2 for t in times.values())


def test_a_failing_mode_ends_the_benchmark() -> None:
    def good(feed: Feed) -> None:
        for _ in feed:
            pass

    def bad(feed: Feed) -> None:
        for _ in feed:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interleave({"good": good, "bad": bad}, [0], steps=3)


@pytest.mark.slow  # it runs the whole command; its parts have tests above
def test_the_command_writes_one_object_per_mode(tmp_path: Path) -> None:
    out, plot = tmp_path / "out.jsonl", tmp_path / "out.png"
    small = [
        "--rows",
        "100",
        "--batch",
        "8",
        "--steps",
        "2",
        "--json",
        str(out),
        "--plot",
        str(plot),
    ]
    command = [sys.executable, "-m", "benchmarks.step_time", "--modes", "bare,torchrec", *small]
    root = Path(__file__).parents[2]
    subprocess.run(command, check=True, capture_output=True, cwd=root, timeout=200)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["mode"] for row in rows] == ["bare", "torchrec"]
    for row in rows:
        assert list(row) == [
            "mode",
            "rows",
            "batch",
            "dim",
            "cpu_ms",
            "wall_ms",
            "ratio",
            "peak_rss_mb",
        ]
        assert (row["rows"], row["batch"], row["dim"]) == (100, 8, 16)
        assert row["cpu_ms"] > 0
        assert row["peak_rss_mb"] > 100
    assert rows[0]["ratio"] == 1.0
    assert plot.stat().st_size > 0

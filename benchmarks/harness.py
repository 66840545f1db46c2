"""What every benchmark shares: interleaved timing, memory in processes of their own, tables, plots.

Modes take turns step by step in one process, each in a thread of its own of which only one ever
runs, so that a noisy machine hits all alike. A mode is a function that trains on the batches it is
handed; a step is the time from one batch to the request for the next.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Mode = Callable[["Feed"], None]
"""Trains on `feed` until it ends."""


@dataclass
class StepTimes:
    """Milliseconds of every measured step of one mode."""

    cpu_ms: list[float]
    wall_ms: list[float]

    def medians(self) -> dict[str, float]:
        return {
            "cpu_ms": round(statistics.median(self.cpu_ms), 3),
            "wall_ms": round(statistics.median(self.wall_ms), 3),
        }


class Feed:
    """A sized loader that hands one mode its batches, a turn at a time, and times the steps."""

    def __init__(
        self, batches: Sequence[Any], steps: int, warm_up: int, turns: Turns, me: int
    ) -> None:
        self._batches, self._steps, self._warm_up = batches, steps, warm_up
        self._turns, self._me = turns, me
        self.times = StepTimes([], [])

    def __len__(self) -> int:
        return self._warm_up + self._steps + 1  # one more is asked for: it ends the last step

    def __iter__(self) -> Iterator[Any]:
        for step in range(self._warm_up + self._steps):
            self._turns.take(self._me)
            wall, cpu = time.perf_counter(), time.process_time()
            yield self._batches[step % len(self._batches)]
            if step >= self._warm_up:
                self.times.cpu_ms.append((time.process_time() - cpu) * 1e3)
                self.times.wall_ms.append((time.perf_counter() - wall) * 1e3)
            self._turns.pass_on(self._me)
        self._turns.wait_for_all()  # clearing up must not run beside another mode's last step


class Turns:
    """Who may run. Modes are set up one after the other, then take turns."""

    def __init__(self, players: int) -> None:
        self._players, self._turn, self._finished = players, 0, 0
        self._change = threading.Condition()
        self.ready = [threading.Event() for _ in range(players)]
        self.failure: BaseException | None = None

    def take(self, me: int) -> None:
        self.ready[me].set()
        with self._change:
            started = all(event.is_set() for event in self.ready)
            while not (started and self._turn == me):
                self._stop_if_failed()
                self._change.wait(timeout=0.5)
                started = all(event.is_set() for event in self.ready)

    def pass_on(self, me: int) -> None:
        with self._change:
            self._turn = (me + 1) % self._players
            self._change.notify_all()

    def wait_for_all(self) -> None:
        with self._change:
            self._finished += 1
            self._change.notify_all()
            while self._finished < self._players:
                self._stop_if_failed()
                self._change.wait(timeout=0.5)

    def fail(self, error: BaseException) -> None:
        with self._change:
            self.failure = self.failure or error
            self._change.notify_all()
        for event in self.ready:
            event.set()

    def _stop_if_failed(self) -> None:
        if self.failure is not None:
            raise RuntimeError("another mode failed") from self.failure


def interleave(
    modes: dict[str, Mode], batches: Sequence[Any], steps: int, warm_up: int = 3
) -> dict[str, StepTimes]:
    """Step times of every mode, their steps taken in turn."""
    turns = Turns(len(modes))
    feeds = {name: Feed(batches, steps, warm_up, turns, me) for me, name in enumerate(modes)}

    def run(mode: Mode, feed: Feed) -> None:
        torch.set_num_threads(1)  # OpenMP keeps this number per thread
        try:
            mode(feed)
        except BaseException as error:
            turns.fail(error)

    threads = []
    for (name, mode), event in zip(modes.items(), turns.ready):
        thread = threading.Thread(target=run, args=(mode, feeds[name]), name=name)
        thread.start()
        threads.append(thread)
        event.wait()
    for thread in threads:
        thread.join()
    if turns.failure is not None:
        raise turns.failure
    return {name: feed.times for name, feed in feeds.items()}


def peak_rss_mb() -> float:
    """The most memory this process ever held.

    Not `ru_maxrss`: Linux lets a child inherit its parent's.
    """
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return round(int(line.split()[1]) / 1024, 1)


def resident_mb() -> float:
    """The memory that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def peak_rss_alone(module: str, arguments: Sequence[str]) -> float:
    """`peak_rss_mb` of `python -m module arguments`, which must print it as its last line."""
    output = subprocess.run(
        [sys.executable, "-m", module, *arguments], check=True, capture_output=True, text=True
    ).stdout
    return float(output.strip().splitlines()[-1])


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    names = list(rows[0])
    cells = [names, *([_cell(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths)))


def markdown(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of the same table as a document holds it."""
    names = list(rows[0])
    cells = [[_cell(row[name]) for name in names] for row in rows]
    return [f"| {' | '.join(line)} |" for line in (names, ["---"] * len(names), *cells)]


def _cell(value: Any) -> str:
    return (
        f"{value:,.3f}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )


def write_json_lines(rows: Sequence[dict[str, Any]], path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def append_json_line(row: dict[str, Any], path: Path) -> None:
    """Add a row to a file. It is on disk when this returns, whatever happens to what comes next."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def bar_plot(rows: Sequence[dict[str, Any]], value: str, title: str, path: Path) -> None:
    """One bar per mode."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(1.5 + 1.2 * len(rows), 3.5), layout="constrained")
    bars = axes.bar([row["mode"] for row in rows], [row[value] for row in rows], color="#4472a8")
    axes.bar_label(bars, fmt="%.2f")
    axes.axhline(1.0, color="0.6", linewidth=1)
    axes.set(title=title, ylabel=value)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)

"""What do LazyDP's clock, the ledger and the journal hold after ten million steps?

Only the bookkeeping of the steps is done, not the steps: every step is charged, with a journal on
disk, and ticks on the clock, with a learning rate that goes up and down. Ten times on the way, what
a row owes that was never read is compared with an exact sum: `python -m benchmarks.many_steps`.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import print_table, resident_mb, write_json_lines
from lightning_dpsparse import LazyDP, PrivacyPlan
from lightning_dpsparse.accounting.journal import Journal
from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.budget import Budget, forecast
from lightning_dpsparse.mechanisms.lazydp.clock import Clock
from lightning_dpsparse.mechanisms.lazydp.state import _LONGEST
from lightning_dpsparse.run_plan import resolve
from lightning_dpsparse.sampling.poisson import Phase

LOOKS = 10
RATE, STDDEV = 1e-4, 0.3


def learning_rate(step: int) -> float:
    return 0.01 * (1.0 + 0.9 * math.sin(step / 1e4))


def simulate(steps: int, folder: Path) -> list[dict[str, Any]]:
    plan = PrivacyPlan(mechanism=LazyDP(), noise_multiplier=1.0, delta=1e-8)
    run = resolve(plan, [Phase(0, 10_000_000, RATE)], 10_000_000, 1_000.0, steps)
    start = time.perf_counter()
    ledger = Ledger()
    ahead = forecast(run, ledger)
    forecast_s = time.perf_counter() - start
    budget = Budget(run, ledger, ahead, Journal(folder, ledger.run))
    clock = Clock(torch.device("cpu"))
    owed: list[float] = []
    never_paid = torch.zeros(1, dtype=torch.int64)
    found: list[dict[str, Any]] = []
    every, start = max(1, steps // LOOKS), time.perf_counter()
    for step in range(1, steps + 1):
        budget.charge()
        if clock.now >= _LONGEST:
            clock.start_anew()
            owed.clear()
        rate = learning_rate(step)
        clock.tick(step, STDDEV, rate)
        owed.append((rate * STDDEV) ** 2)
        if step % every == 0:
            took = time.perf_counter() - start
            exact = math.sqrt(math.fsum(owed))
            stddev = float(clock.stddev(never_paid))
            found.append(
                {
                    "steps": step,
                    "us_per_step": round(took / every * 1e6, 1),
                    "clock_mb": round(5 * 8 * clock._owed_T.numel() / 2**20, 1),
                    "clock_error": abs(stddev - exact) / exact,
                    "journal_bytes": sum(path.stat().st_size for path in folder.iterdir()),
                    "ledger_bytes": len(str(ledger.to_data())),
                    "resident_mb": resident_mb(),
                    "forecast_s": round(forecast_s, 2),
                    "exact_epsilon_s": _seconds(budget.exact_epsilon),
                    "epsilon": round(budget.exact_epsilon(), 4),
                }
            )
            start = time.perf_counter()
    budget.close()
    return found


def _seconds(work: Any) -> float:
    start = time.perf_counter()
    work()
    return round(time.perf_counter() - start, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000_000)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = simulate(options.steps, Path(folder))
    print_table(rows)
    if options.json is not None:
        write_json_lines(rows, options.json)


if __name__ == "__main__":
    main()

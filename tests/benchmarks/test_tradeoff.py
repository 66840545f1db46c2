"""What the trade-off's table and plot make of runs, and that Table 4 runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.tradeoff import plot, settings, summary

ROOT = Path(__file__).parents[2]


def run(method: str, seed: int, auc: float, reduction: float) -> dict[str, object]:
    return {
        "method": method,
        "setting": "s",
        "epsilon": 1.0,
        "seed": seed,
        "auc": auc,
        "reduction": reduction,
    }


def test_losses_are_taken_at_the_same_seed_and_errors_over_seeds(tmp_path: Path) -> None:
    rows = [run("dpsgd", s, auc, 1.0) for s, auc in enumerate((0.70, 0.72, 0.74))]
    rows += [run("adafest", s, auc, 10.0 + s) for s, auc in enumerate((0.69, 0.71, 0.73))]
    adafest, dpsgd = summary(rows)
    assert (dpsgd["auc_loss"], dpsgd["auc_loss_error"]) == (0.0, 0.0)
    assert adafest["auc"] == pytest.approx(0.71)
    assert adafest["auc_error"] == pytest.approx(0.02 / 3**0.5, abs=1e-4)
    assert adafest["auc_loss"] == pytest.approx(0.01)
    assert adafest["auc_loss_error"] == pytest.approx(0.0, abs=1e-9)  # seeds move both alike
    assert adafest["reduction"] == 11.0
    plot([adafest, dpsgd], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 0


def test_every_method_of_the_paper_is_tried() -> None:
    methods = {setting.method for setting in settings(quick=False)}
    assert methods == {"dpsgd", "fest", "adafest", "adafest_plus", "exponential"}


@pytest.mark.slow  # it runs the whole command
def test_table_4_runs(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "benchmarks.table4", "--quick", "--steps", "2"]
    command += ["--slow-steps", "1", "--json", str(out)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT, timeout=200)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["mode"] for row in rows] == ["sgd", "adafest", "dpsgd"] * 2
    assert all(row["step_ms"] > 0 for row in rows)

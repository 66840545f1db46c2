"""EANA's benchmark runs, and its verdicts say what the numbers say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import eana, eana_speed
from tests.support.ranks import Ranks


def run(name: str, bits: float, recall: float) -> dict[str, Any]:
    """Canaries with 100 repeats have this exposure, those with one have none."""
    exposures = [
        {
            "repeats": repeats,
            "canaries": 50,
            "interpolation": value,
            "extrapolation": value + 1,
            "low": value - 0.5,
            "high": value + 0.5,
        }
        for repeats, value in ((1, 1.4), (100, bits))
    ]
    precisions = {f"precision@{k}": recall / k for k in (1, 5, 10, 20)}
    recalls = {f"recall@{k}": recall for k in (1, 5, 10, 20)}
    return {"run": name, "tested": 10_000, "exposures": exposures, **precisions, **recalls}


def rows(bits: dict[str, float], recall: dict[str, float]) -> list[dict[str, Any]]:
    names = [each.name for each in eana.RUNS]
    return [run(name, bits.get(name, 5.0), recall.get(name, 0.1)) for name in names]


def holds(found: list[dict[str, Any]], claim: str) -> str:
    return next(row["holds"] for row in found if row["claim"] == claim)


def test_findings_that_appear_are_told_from_those_that_do_not(tmp_path: Path) -> None:
    made_up = rows(
        {"sgd": 12.0, "eana 0.01": 4.0, "dpsgd 0.01": 3.0, "eana 0.001": 6.0, "dpsgd 0.001": 8.0},
        {"sgd": 0.2, "eana 0.01": 0.15, "dpsgd 0.01": 0.151},
    )
    found = eana.verdicts(made_up)
    for kind in ("interpolation", "extrapolation"):
        assert holds(found, f"exposure by {kind}: sgd above eana 0.01") == "yes"
        assert holds(found, f"exposure by {kind}: eana 0.01 above dpsgd 0.01") == "yes"
        assert holds(found, f"exposure by {kind}: eana 0.001 above dpsgd 0.001") == "no"
    assert holds(found, "precision@10: sgd above eana 0.01") == "yes"
    # 0.15 and 0.151 of 10,000 examples: each has an error of 0.0036.
    assert holds(found, "precision@10: eana 0.01 above dpsgd 0.01") == "too close"
    eana.plot(made_up, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 0


def test_exposure_is_a_mean_over_all_canaries() -> None:
    # The middle half of a normal is 1.349 standard deviations wide; there are 2 x 50 canaries.
    expected = ((1.4 + 9.0) / 2, 1 / 1.349 / 100**0.5)
    assert eana.exposure(run("sgd", 9.0, 0.1), "interpolation") == pytest.approx(expected)


def test_speed_is_judged_at_the_largest_vocabulary() -> None:
    def pair(vocabulary: int, eana_over_sgd: float, dpsgd_over_eana: float) -> list[dict[str, Any]]:
        shared = {"vocabulary": vocabulary}
        return [
            shared | {"mode": "eana", "over_sgd": eana_over_sgd, "over_eana": 1.0},
            shared | {"mode": "dpsgd", "over_sgd": 9.0, "over_eana": dpsgd_over_eana},
        ]

    faster, slower = eana_speed.verdicts(pair(10, 9.0, 1.0) + pair(1000, 2.0, 55.0))
    assert (faster["holds"], slower["holds"]) == ("yes", "yes")
    faster, slower = eana_speed.verdicts(pair(10, 2.0, 55.0) + pair(1000, 9.0, 1.0))
    assert (faster["holds"], slower["holds"]) == ("no", "no")


@pytest.mark.slow
def test_speed_has_a_row_for_every_vocabulary_and_mode(one_rank: Ranks, tmp_path: Path) -> None:
    one_rank.run(eana.measure_speed, [100, 1000], 8, 4, 2, 1, tmp_path)
    found = read(tmp_path / "eana_speed.jsonl")
    modes = [(row["vocabulary"], row["mode"]) for row in found]
    assert modes == [(v, mode) for v in (100, 1000) for mode in ("sgd", "eana", "dpsgd")]
    assert all(row["cpu_ms"] > 0 for row in found)
    assert [row["over_sgd"] for row in found[::3]] == [1.0, 1.0]
    assert [row["over_eana"] for row in found[1::3]] == [1.0, 1.0]
    assert (tmp_path / "eana_speed.png").stat().st_size > 0


def test_every_run_is_measured_once(one_rank: Ranks, tmp_path: Path) -> None:
    tiny = eana.Leakage(
        folder=None, examples_per_user=4, users=100, dim=8, repeats=(1, 10), canaries=2,
        references=64,
    )  # fmt: skip
    path = tmp_path / "eana.jsonl"
    one_rank.run(eana.run_all, tiny, path)
    found = read(path)
    assert [row["run"] for row in found] == [each.name for each in eana.RUNS]
    for row in found:
        assert row["steps"] == (80 * 4 + 2 * 11) // 64  # 80 users or so, and the canaries
        assert [(e["repeats"], e["canaries"]) for e in row["exposures"]] == [(1, 2), (10, 2)]
        assert row["recall@10"] == pytest.approx(10 * row["precision@10"], abs=1e-4)
    assert eana.run_all(tiny, path) == found  # none again: that would need a process group
    assert len(eana.verdicts(found)) == 2 * 7 + 3


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]

"""The benchmark's slopes: on a power law, in its results, and in the README."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.estimators import DELTA, EPSILON, ESTIMATORS, expected_output, worst_error
from benchmarks.rates import Row, plot, slope, slopes
from lightning_dpsparse.accounting.calibration import epsilon_of
from lightning_dpsparse.estimators.bias_reduced import Levels, event_of_bias_reduced

ROOT = Path(__file__).parents[2]


def results(name: str) -> list[Row]:
    lines = (ROOT / "benchmarks" / "results" / name).read_text().splitlines()
    return [json.loads(line) for line in lines]


def power_law() -> list[Row]:
    rows: list[Row] = []
    for sweep, power in (("n", -0.5), ("d", 0.0), ("s", 0.25)):
        for size in (4, 16, 64):
            sizes = {"n": 4, "d": 4, "s": 4} | {sweep: size}
            rows.append(
                {"estimator": "law", "grid": "any", "sweep": sweep, **sizes, "bound_of": "nobody"}
                | {"error": 3.0 * size**power, "se": 0.03 * size**power, "bound": 1.0 / size}
            )
    return rows


def test_slopes_of_a_power_law(tmp_path: Path) -> None:
    rows = power_law()
    (found,) = slopes(rows)
    assert [found[f"slope_{sweep}"] for sweep in "nds"] == pytest.approx([-0.5, 0.0, 0.25])
    assert [found[f"bound_{sweep}"] for sweep in "nds"] == pytest.approx([-1.0] * 3)
    # (y_3 - y_1) / (x_3 - x_1) with errors of 0.01 on y: 0.01 sqrt(2) / ln(16)
    expected = 0.01 * 2**0.5 / math.log(16)
    assert slope(rows[:3], "n", "error")[1] == pytest.approx(expected)
    plot(rows, {"any sizes": ("any", ("law",))}, tmp_path / "rates.png")
    assert (tmp_path / "rates.png").stat().st_size > 0


def test_the_standard_error_is_that_of_the_error() -> None:
    """Plain noise: ||x||^2 / (sigma / n)^2 is chi-square with d degrees, of variance 2 d."""
    found = [worst_error("gaussian", (64, 256, s), 400) for s in (1, 2, 3)]
    scale = ESTIMATORS["gaussian"].noise(64) / 64
    for row in found:
        assert row["error"] == pytest.approx(scale * 256**0.5, rel=0.02)
        # sd of the mean square over twice the root; 400 draws know it to 4%, three times over
        expected = scale * (2 * 256) ** 0.5 / (2 * 256**0.5) / 400**0.5
        assert row["se"] == pytest.approx(expected, rel=0.15)


def test_projection_wins_where_columns_are_many() -> None:
    plain, projected = (
        worst_error(name, (512, 8_192, 4), 2)["error"] for name in ("gaussian", "projection")
    )
    assert plain == pytest.approx(4.22 * 8_192**0.5 / 512, rel=0.05)  # sigma sqrt(d) / n
    assert projected < plain / 3


def test_random_levels_stand_at_the_same_epsilon_as_the_others() -> None:
    levels = Levels(num_examples=1024, last=9)
    event = event_of_bias_reduced(ESTIMATORS["bias_reduced"].noise(1024), levels)
    assert 0.99 < epsilon_of([(event, 1)], DELTA) <= EPSILON
    for row in results("estimators.jsonl"):
        noise = {"laplace": 1.0, "bias_reduced": 7.064}.get(row["estimator"], 4.225)
        assert row["noise_multiplier"] == pytest.approx(noise, abs=1e-3)


def test_stored_slopes_are_those_of_the_stored_errors() -> None:
    assert results("estimators_slopes.jsonl") == slopes(results("estimators.jsonl"))


def test_the_readme_has_the_stored_slopes() -> None:
    section = (ROOT / "README.md").read_text().split("## Linear models without a GPU")[1]
    table = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.split("\n## ")[0].splitlines()
        if line.startswith("|") and " ± " in line
    ]
    expected = []
    for row in results("estimators_slopes.jsonl"):
        name = f"{row['estimator']}, {row['grid']}"
        cells = [
            f"{row[f'slope_{x}']:.3f} ± {row[f'se_{x}']:.3f} / {row[f'bound_{x}']:.3f}"
            for x in "nds"
        ]
        expected.append([name, *cells, row["bound_of"]])
    assert table == expected


def test_output_strays_from_the_bound_as_its_projection_makes_it() -> None:
    """Measured risks are what a short calculation gives, and it has the bound's slopes far out."""
    sigma = ESTIMATORS["output"].noise(1024)
    for row in results("estimators.jsonl"):
        if row["estimator"] == "output":
            expected = expected_output(row["n"], row["d"], row["s"], sigma)
            assert row["error"] == pytest.approx(expected, abs=4 * row["se"])

    def slopes_at(n: float, d: float) -> list[float]:
        pairs = [((2 * n, d, 4), (n / 2, d, 4)), ((n, 2 * d, 4), (n, d / 2, 4))]
        pairs.append(((n, d, 8), (n, d, 2)))
        risks = [[expected_output(*sizes, sigma) for sizes in pair] for pair in pairs]
        return [float(np.log(more / less) / np.log(4)) for more, less in risks]

    np.testing.assert_allclose(slopes_at(1024, 2**14), [-0.58, 0.13, 0.13], atol=0.01)
    np.testing.assert_allclose(slopes_at(1024, 2**32), [-0.52, 0.03, 0.22], atol=0.01)

"""The benchmark's slopes, on a power law and on the quickest of the estimators."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.estimators import Row, plot, slopes, worst_error


def test_slopes_of_a_power_law(tmp_path: Path) -> None:
    rows: list[Row] = []
    for sweep, power in (("n", -0.5), ("d", 0.0), ("s", 0.25)):
        for size in (4, 16, 64):
            sizes = {"n": 4, "d": 4, "s": 4} | {sweep: size}
            rows.append(
                {"estimator": "law", "sweep": sweep, **sizes}
                | {"error": 3.0 * size**power, "bound": 1.0 / size}
            )
    (found,) = slopes(rows)
    assert [found[f"slope_{sweep}"] for sweep in "nds"] == pytest.approx([-0.5, 0.0, 0.25])
    assert [found[f"poster_{sweep}"] for sweep in "nds"] == pytest.approx([-1.0] * 3)
    plot(rows, tmp_path / "rates.png")
    assert (tmp_path / "rates.png").stat().st_size > 0


def test_projection_wins_where_columns_are_many() -> None:
    sizes = (512, 8_192, 4)
    plain, projected = (worst_error(name, sizes, 4.22, 2, 0) for name in ("gaussian", "projection"))
    assert plain == pytest.approx(4.22 * 8_192**0.5 / 512, rel=0.05)  # sigma sqrt(d) / n
    assert projected < plain / 3

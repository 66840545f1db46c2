"""Rows selected by counts: the largest are taken, and noise is on every row of the public range."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from lightning_dpsparse.accounting import events
from lightning_dpsparse.engine.step_inputs import Table
from lightning_dpsparse.mechanisms.selection import (
    GumbelHistogram,
    Histogram,
    NoisyHistogram,
    PublicFrequencies,
    Selection,
)
from lightning_dpsparse.noise.grid import grid_of
from lightning_dpsparse.noise.keys import RunKey
from lightning_dpsparse.noise.keystream import hidden_share
from lightning_dpsparse.noise.sources import FastNoise, NoiseSource, RowNoise, SecureNoise
from lightning_dpsparse.refused import Refused

R = 40_000
SOURCES: list[Callable[[RunKey], NoiseSource]] = [FastNoise, SecureNoise, RowNoise]


def table(name: str, rows: int, *features: str) -> Table:
    return Table(f"ebc.embedding_bags.{name}.weight", rows, features)


# A table that two features share, and a feature that two tables share: four (table, feature) pairs.
TABLES = [table("a", R, "x", "y"), table("b", R, "z"), table("c", 500, "x")]
FEW_READ = {t.name: torch.zeros(t.num_rows, dtype=torch.int64) for t in TABLES}
for _count in FEW_READ.values():
    _count[:20] = torch.arange(20) * 1000


def chosen(selection: Selection, **scores: list[float]) -> dict[str, list[int]]:
    found = selection.largest({name: torch.tensor(s) for name, s in scores.items()})
    return {name: rows.tolist() for name, rows in found.items()}


def by_count(**settings: Any) -> Selection:
    return Selection(frequencies=NoisyHistogram(), **settings)


A, B = [5.0, -1.0, 7.0, 6.0], [0.0, 9.0]


def test_the_largest_of_every_table() -> None:
    assert chosen(by_count(rows_per_table=2), a=A, b=B) == {"a": [2, 3], "b": [0, 1]}
    assert chosen(by_count(rows_per_table=1), a=A, b=B) == {"a": [2], "b": [1]}
    assert chosen(by_count(rows_per_table=3), a=A, b=B) == {"a": [0, 2, 3], "b": [0, 1]}  # b whole


def test_the_largest_of_all_tables() -> None:
    assert chosen(by_count(rows_in_total=1), a=A, b=B) == {"a": [], "b": [1]}
    assert chosen(by_count(rows_in_total=3), a=A, b=B) == {"a": [2, 3], "b": [1]}
    assert chosen(by_count(rows_in_total=99), a=A, b=B) == {"a": [0, 1, 2, 3], "b": [0, 1]}


@pytest.mark.parametrize("settings", [{"rows_per_table": 2}, {"rows_in_total": 2}])
def test_ties_do_not_select_more(settings: dict[str, int]) -> None:
    found = chosen(by_count(**settings), a=[3.0, 3.0, 3.0, 3.0, 0.0])
    assert len(found["a"]) == 2
    assert 4 not in found["a"]


def test_the_out_of_vocabulary_row_is_always_in() -> None:
    oov = by_count(rows_per_table=1, unselected="out_of_vocabulary", out_of_vocabulary_row=1)
    assert chosen(oov, a=A, b=B) == {"a": [1, 2], "b": [1]}  # in b it is the largest anyway
    oov = by_count(rows_in_total=1, unselected="out_of_vocabulary")
    assert chosen(oov, a=A, b=B) == {"a": [0], "b": [0, 1]}
    assert oov.maps_to_one_row
    assert not by_count(rows_in_total=1).maps_to_one_row


def test_the_number_of_rows_is_known_before() -> None:
    assert by_count(rows_per_table=600).num_rows(TABLES) == 600 + 600 + 500
    assert by_count(rows_in_total=600).num_rows(TABLES) == 600
    assert by_count(rows_in_total=10**9).num_rows(TABLES) == 2 * R + 500


def added(
    histogram: Histogram, source: NoiseSource, units: int = 1, release: int = 0
) -> dict[str, Tensor]:
    """The noise on every row."""
    noisy = histogram.noisy(FEW_READ, TABLES, units, source, release)
    return {name: noisy[name] - FEW_READ[name] for name in noisy}


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.__name__)
@pytest.mark.parametrize(
    ("settings", "units", "norm"),
    [
        ({}, 1, 2.0),  # four pairs of table and feature, one id each: sqrt(4)
        ({"max_ids_per_bag": 3}, 1, math.sqrt(12.0)),
        ({"max_ids_of": {"x": 5, "z": 2}}, 1, math.sqrt(5 + 1 + 2 + 5)),  # x is read by two tables
        ({"max_ids_per_bag": 3}, 4, 4 * math.sqrt(12.0)),  # users of four examples, linearly
    ],
)
def test_every_row_has_noise_of_the_right_size(
    source: Any, settings: dict[str, Any], units: int, norm: float
) -> None:
    histogram = NoisyHistogram(noise_multiplier=3.0, **settings)
    assert histogram.event(TABLES) == events.gaussian(3.0)
    noise = added(histogram, source(RunKey.fixed(1)), units)
    for t in TABLES:
        for rows in (slice(0, 20), slice(20, None)):  # rows that were read, and rows that were not
            drawn = noise[t.name][rows] / (3.0 * norm)
            # Their squares add up to a chi-square: within the middle 1 - 1e-5 of it.
            low, high = stats.chi2.ppf([5e-6, 1 - 5e-6], df=len(drawn))
            assert low < float(drawn.square().sum()) < high
            assert abs(float(drawn.mean())) < 4.5 / math.sqrt(len(drawn))
    everything = torch.cat([noise[t.name] for t in TABLES]).numpy() / (3.0 * norm)
    # 80,500 draws: a deviation of 2.5 / sqrt(n) of the distribution function has a p-value of 1e-5.
    assert stats.kstest(everything, "norm").pvalue > 1e-5


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.__name__)
@pytest.mark.parametrize("epsilon", [0.01, 2.0])
def test_gumbel_noise_is_on_every_row_with_scale_one_over_epsilon(
    source: Any, epsilon: float
) -> None:
    noise = added(GumbelHistogram(epsilon=epsilon), source(RunKey.fixed(2)))
    for t in TABLES:
        for rows in (slice(0, 20), slice(20, None)):
            drawn = noise[t.name][rows].numpy() * epsilon
            assert stats.kstest(drawn, "gumbel_r").pvalue > 1e-5


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.__name__)
@pytest.mark.parametrize(
    "histogram", [NoisyHistogram(noise_multiplier=3.0), GumbelHistogram(epsilon=0.3)]
)
def test_digits_of_a_noisy_count_do_not_tell_its_noise(source: Any, histogram: Histogram) -> None:
    """Counts are multiples of the spacing, and so is every noisy count, whatever the count was."""
    noisy = histogram.noisy(FEW_READ, TABLES, 1, source(RunKey.fixed(2)), 0)
    grid = grid_of(histogram.scale(TABLES, 1))
    assert grid <= 1.0
    for count_R in noisy.values():
        assert torch.equal(count_R / grid, (count_R / grid).round())


def test_noise_too_coarse_for_counts_is_refused() -> None:
    histogram = NoisyHistogram(noise_multiplier=1e6)
    with pytest.raises(ValueError, match="Expected noise of less than 1,048,576 on counts"):
        histogram.noisy(FEW_READ, TABLES, 1, FastNoise(RunKey.fixed(3)), 0)


@pytest.mark.parametrize(
    "histogram", [NoisyHistogram(noise_multiplier=500.0), GumbelHistogram(epsilon=0.002)]
)
def test_rows_that_nobody_reads_can_be_selected(histogram: Histogram) -> None:
    """Noise that is larger than all counts: nearly all of 200 rows of 40,000 were never read."""
    selection = Selection(frequencies=histogram, rows_per_table=200)
    noisy = histogram.noisy(FEW_READ, TABLES, 1, FastNoise(RunKey.fixed(3)), 0)
    rows = selection.largest(noisy)[TABLES[1].name]
    unread = int((rows >= 20).sum())
    assert unread >= 180  # 20 were read
    # Among 39,980 rows alike 180 fall on both halves: 90 each, standard deviation below 7.
    assert abs(int(((rows >= 20) & (rows < R // 2)).sum()) - unread / 2) < 5 * 7


@pytest.mark.parametrize("histogram", [NoisyHistogram(), GumbelHistogram()])
@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.__name__)
def test_tables_releases_and_keys_draw_apart(source: Any, histogram: Histogram) -> None:
    first = added(histogram, source(RunKey.fixed(1)))
    again = added(histogram, source(RunKey.fixed(1)))
    others = [
        added(histogram, source(RunKey.fixed(1)), release=1)[TABLES[0].name],
        added(histogram, source(RunKey.fixed(2)))[TABLES[0].name],
        first[TABLES[1].name],
    ]
    mine = first[TABLES[0].name]
    assert torch.equal(mine, again[TABLES[0].name])
    for other in others:
        # Independent draws have a correlation of deviation 1 / sqrt(40,000).
        assert abs(float(torch.corrcoef(torch.stack([mine, other]))[0, 1])) < 5 / math.sqrt(R)


def test_counts_per_example_add_up_over_features_and_tables() -> None:
    histogram = NoisyHistogram(max_ids_per_bag=2, max_ids_of={"x": 7})
    assert histogram.counts_per_example(TABLES) == 7 + 2 + 2 + 7
    drawn = histogram.scale(TABLES, 3)
    # Of a draw only the Gaussian part counts (`noise/keystream.py`): it is what is charged.
    assert 1 - 1e-12 <= drawn * hidden_share(drawn) / (50.0 * 3 * math.sqrt(18)) <= 1 + 4e-4


# ---- public counts ------------------------------------------------------------------------------


def test_public_counts_are_read_by_the_tables_own_names(tmp_path: Path) -> None:
    path = tmp_path / "counts.npz"
    np.savez(path, a=np.arange(3), b=np.array([0.5, 0.25]), unused=np.zeros(9))
    public = PublicFrequencies(path=str(path))
    tables = [table("a", 3, "x"), table("b", 2, "y")]
    scores = public.scores(tables)
    assert {name: s.tolist() for name, s in scores.items()} == {
        tables[0].name: [0.0, 1.0, 2.0],
        tables[1].name: [0.5, 0.25],
    }
    assert public.event(tables) is None
    assert str(path) in public.trusted


def test_public_counts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "counts.npz"
    public, tables = PublicFrequencies(path=str(path)), [table("a", 3, "x"), table("b", 2, "y")]
    with pytest.raises(Refused, match=r"Expected public frequencies in .*numpy\.savez"):
        public.scores(tables)
    np.savez(path, a=np.arange(3))
    with pytest.raises(ValueError, match=r"Expected 2 counts for table 'b' in .*, found nothing"):
        public.scores(tables)
    np.savez(path, a=np.arange(4), b=np.arange(2))
    with pytest.raises(ValueError, match=r"Expected 3 counts for table 'a' in .*, found \(4,\)"):
        public.scores(tables)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: by_count(), "Expected one of rows_per_table and rows_in_total, found neither"),
        (lambda: by_count(rows_per_table=1, rows_in_total=1), "rows_in_total, found both"),
        (lambda: by_count(rows_per_table=0), "Expected at least one row to be selected"),
        (lambda: by_count(rows_in_total=-3), "Expected at least one row to be selected"),
        (lambda: NoisyHistogram(noise_multiplier=0.0), "Expected noise_multiplier > 0, found 0"),
        (lambda: NoisyHistogram(noise_multiplier=math.inf), "Expected noise_multiplier > 0"),
        (lambda: NoisyHistogram(noise_multiplier=math.nan), "Expected noise_multiplier > 0"),
        (lambda: GumbelHistogram(epsilon=-1.0), "Expected epsilon > 0, found -1"),
        (lambda: NoisyHistogram(max_ids_per_bag=0), "Expected at least one id of a bag"),
        (lambda: GumbelHistogram(max_ids_of={"x": 0}), "Expected at least one id of a bag"),
        (
            lambda: Selection(
                frequencies=PublicFrequencies(path="x"), rows_per_table=1, renew=True
            ),
            "Expected counts of the data with renew=True, found public ones",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()

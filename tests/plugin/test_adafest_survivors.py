"""Rows pass AdaFEST's threshold with their probability, read or not, and get all of their noise."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from lightning_dpsparse import FEST, AdaFEST, AdaFESTPlus, Placement, PrivacyPlan
from lightning_dpsparse.mechanisms.adafest import survival
from tests.support.adafest_runs import public
from tests.support.naive_step import EXPECTED, plan
from tests.support.plain_training import PLACEMENTS
from tests.support.ranks import Ranks
from tests.support.recorded_noise import assert_variance, record_noise
from tests.support.row_choice import naive_map, rows_of_unit
from tests.support.tiny_model import BAGS_OR_SEQUENCES, SEQUENCES, Bags, assemble, name_of, paths


def displacements(
    ranks: Ranks,
    placement: Placement,
    noisy: PrivacyPlan,
    steps: int,
    sequences: tuple[str, ...] = (),
    readers: list[int] | None = None,
) -> Any:
    """How every table moved in each of some steps at learning rate one, and dense layers.

    Nobody reads, or the first `readers` do and learn nothing.
    """
    results = ranks.run(record_noise, ranks.world_size, placement, noisy, steps, sequences, readers)
    whole = [assemble([rank[s] for rank in results]) for s in range(steps + 1)]
    moved = {key: torch.stack([s[key].double() for s in whole]).diff(dim=0) for key in whole[0]}
    return {name: moved.pop(path) for name, path in paths(sequences).items()}, moved


def check_whole_rows(is_moved_SRD: Tensor, name: str) -> None:
    """Noise on a grid is nothing once in a million draws; half a row would be many."""
    parts = is_moved_SRD.any(2) & ~is_moved_SRD.all(2)
    assert int(parts.sum()) <= 2, f"{name}: a part of a row moved"
    assert bool((is_moved_SRD.sum(2)[parts] >= is_moved_SRD.shape[2] - 1).all())


def check_survivors(moved_SRD: Tensor, p: float, stddev: float, name: str) -> None:
    """Rows survive whole or not at all, each with probability p, and then have all their noise."""
    is_moved = moved_SRD.ne(0)
    survives = is_moved.any(2)
    check_whole_rows(is_moved, name)
    n = survives.numel()  # coins; per row and per step too, with a tolerance for the worst of 170
    assert abs(survives.double().mean() - p) <= 4.5 * math.sqrt(p * (1 - p) / n), name
    for dim in (0, 1):
        worst = (survives.double().mean(dim) - p).abs().max()
        assert worst <= 5 * math.sqrt(p * (1 - p) / survives.shape[dim]), name
    # Mean square of the survivors' cells: 5 sqrt(2 / n), 2 to 5 percent of the variance.
    noise = moved_SRD[survives]
    assert_variance(noise, stddev, name)
    # No column knows of the mask: its mean is zero, and rows do not repeat.
    assert noise.mean(0).abs().max() <= 5 * stddev / math.sqrt(len(noise)), name
    assert len(noise.unique(dim=0)) == len(noise)


@pytest.mark.parametrize(
    ("source", "sequences"),
    [*product(["fast", "secure"], [(), SEQUENCES]), ("row_keyed", ())],
    ids=name_of,
)
def test_rows_that_nobody_read_survive_and_get_their_noise(
    one_rank: Ranks, source: Any, sequences: tuple[str, ...]
) -> None:
    """Empty steps: everything that passes is a false positive."""
    mechanism = AdaFEST(threshold=0.5, map_clip_norm=0.7, noise_ratio=2.0)
    noisy = plan(2.0, noise=1.5, mechanism=mechanism, noise_source=source)
    sigma2 = 1.5 * math.sqrt(1 + 1 / 4)
    p = survival(0.5, 2 * sigma2 * 0.7)
    assert 0.4 < p < 0.5
    tables, dense = displacements(one_rank, Placement(), noisy, 50, sequences)
    for name, moved in tables.items():
        check_survivors(moved, p, sigma2 * 2.0 / EXPECTED, name)
    for key, moved in dense.items():
        assert_variance(moved, sigma2 * 2.0 / EXPECTED, key)


@pytest.mark.parametrize(
    ("name", "sequences"),
    [("row_wise", ()), ("column_wise", ()), ("row_wise", SEQUENCES)],
    ids=name_of,
)
def test_survivors_on_two_ranks(two_ranks: Ranks, name: str, sequences: tuple[str, ...]) -> None:
    """Here with a threshold of its own for one table."""
    thresholds = {"t1": -2.0}
    mechanism = AdaFEST(threshold=0.0, table_thresholds=thresholds, noise_ratio=2.0)
    sigma2 = 1.5 * math.sqrt(1 + 1 / 4)
    noisy = plan(2.0, noise=1.5, mechanism=mechanism)
    tables, dense = displacements(two_ranks, PLACEMENTS[name], noisy, 50, sequences)
    for table, moved in tables.items():
        p = survival(thresholds.get(table, 0.0), 2 * sigma2)
        check_survivors(moved, p, sigma2 * 2.0 / EXPECTED, table)
    for key, moved in dense.items():
        assert_variance(moved, sigma2 * 2.0 / EXPECTED, key)
    # Shards toss coins of their own: halves of a table agree on no more rows than chance has it.
    halves = tables["t0"].ne(0).any(2).double().split(20, dim=1)
    agree = (halves[0] == halves[1]).double().mean()
    assert abs(agree - 0.5) <= 5 * 0.5 / math.sqrt(halves[0].numel())


@pytest.mark.parametrize(
    ("name", "source", "sequences"),
    [
        ("row_wise", "fast", ()),
        ("row_wise", "fast", SEQUENCES),
        ("column_wise", "secure", SEQUENCES),
        ("alone", "secure", SEQUENCES),
    ],
    ids=name_of,
)
def test_rows_survive_by_those_who_read_them(
    one_rank: Ranks, two_ranks: Ranks, name: str, source: Any, sequences: tuple[str, ...]
) -> None:
    """P(V + N(0, (sigma1 C1)^2) >= tau), whether a row was read or not; then noise, all of it."""
    ranks, placement = (one_rank, Placement()) if name == "alone" else (two_ranks, PLACEMENTS[name])
    mechanism = AdaFEST(threshold=0.7, map_clip_norm=2.0, noise_ratio=2.0)
    noisy = plan(2.0, noise=0.2, mechanism=mechanism, noise_source=source)
    sigma2 = 0.2 * math.sqrt(1 + 1 / 4)
    readers = [5] if name == "alone" else [4, 1]
    tables, _ = displacements(ranks, placement, noisy, 50, sequences, readers)
    read = naive_map([rows_of_unit([example]) for example in Bags(100).examples[:5]], 2.0)
    coins: dict[float, list[Tensor]] = {}  # of all rows with the same V
    noise: dict[bool, list[Tensor]] = {False: [], True: []}
    for table, moved_SRD in tables.items():
        is_moved = moved_SRD.ne(0)
        check_whole_rows(is_moved, table)
        for row, survives_S in enumerate(is_moved.any(2).unbind(1)):
            value = read.get((table, row), 0.0)
            coins.setdefault(round(value, 6), []).append(survives_S)
            noise[value > 0].append(moved_SRD[survives_S, row].flatten())
    assert len(coins) > 5
    # Exact binomials, by row and over all rows with its V: 150 comparisons in each of four cases.
    for value, tossed in coins.items():
        p = stats.norm.sf((0.7 - value) / (2 * sigma2 * 2.0))
        for coin_N in (*tossed, torch.cat(tossed)):
            heads, binomial = int(coin_N.sum()), stats.binom(len(coin_N), p)
            assert min(binomial.cdf(heads), binomial.sf(heads - 1)) > 1e-6, (value, heads)
    for is_read, draws in noise.items():
        assert_variance(torch.cat(draws), sigma2 * 2.0 / EXPECTED, f"read: {is_read}")


# ---- among rows that were selected before --------------------------------------------------------


@BAGS_OR_SEQUENCES
def test_every_selected_row_gets_noise_and_no_other_moves(
    two_ranks: Ranks, tmp_path: Path, sequences: tuple[str, ...]
) -> None:
    selection, selected = public(tmp_path)
    noisy = plan(2.0, noise=1.5, mechanism=FEST(selection=selection))
    tables, dense = displacements(two_ranks, PLACEMENTS["row_wise"], noisy, 50, sequences)
    for name, moved in tables.items():
        assert moved[:, ~selected[name]].eq(0).all()
        noise = moved[:, selected[name]]
        assert noise.shape[1] == 12
        assert_variance(noise, 1.5 * 2.0 / EXPECTED, name)
        assert len(noise.flatten(0, 1).unique(dim=0)) == 50 * 12
    for key, moved in dense.items():
        assert_variance(moved, 1.5 * 2.0 / EXPECTED, key)


@BAGS_OR_SEQUENCES
def test_survivors_among_selected_rows(
    one_rank: Ranks, tmp_path: Path, sequences: tuple[str, ...]
) -> None:
    selection, selected = public(tmp_path)
    mechanism = AdaFESTPlus(threshold=0.0, selection=selection)
    noisy = plan(2.0, noise=1.5, mechanism=mechanism)
    tables, _ = displacements(one_rank, Placement(), noisy, 50, sequences)
    for name, moved in tables.items():
        assert moved[:, ~selected[name]].eq(0).all()
        stddev = 1.5 * math.sqrt(1 + 1 / 25) * 2.0 / EXPECTED
        check_survivors(moved[:, selected[name]], 0.5, stddev, name)

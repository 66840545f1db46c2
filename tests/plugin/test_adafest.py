"""Steps of DP-AdaFEST, DP-FEST and DP-AdaFEST+ equal a naive loop; noise goes where it must."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_dpsparse import (
    FEST,
    AdaFEST,
    AdaFESTPlus,
    Placement,
    PrivacyPlan,
    PublicFrequencies,
    Selection,
)
from lightning_dpsparse.mechanisms.adafest import survival
from tests.plugin.test_private_noise import assert_variance, record_noise
from tests.plugin.test_training import PLACEMENTS, ROWWISE, SGD, assert_close
from tests.private import ADAGRAD, EXPECTED, SIZES, plan, run
from tests.ranks import Ranks
from tests.selecting import Expected, naive_selecting
from tests.sharded.test_units import UNITS, run_users
from tests.small import SEQUENCES, TABLES, assemble, paths

# Examples read 3 to 20 rows: those with fewer than four are not clipped. A row passes if about two
# examples read it, or one that reads few.
QUIET = plan(0.3, mechanism=AdaFEST(threshold=0.93, map_clip_norm=2.0))
# sigma1 C1 = 0.76: of the rows that nobody read, one in seven passes.
NOISY = plan(
    0.3,
    noise=0.12,
    mechanism=AdaFEST(threshold=0.8, map_clip_norm=2.0, noise_ratio=3.0),
    noise_source="row_keyed",
)


def singles(sizes: list[list[int]]) -> list[list[int]]:
    """Every example a unit of its own."""
    return [[1] * sum(step) for step in sizes]


def check(
    start: dict[str, Tensor], end: dict[str, Tensor], expected: Expected, tolerance: float
) -> None:
    """As it should be; and rows that never took part are as they were, to the last bit."""
    assert expected.read_and_left > 0, "nothing was left out: the test shows nothing"
    assert expected.read_and_kept > 0
    assert_close(end, expected.weights, tolerance)
    is_sequence = any(key.startswith("ec.") for key in end)
    for name, path in paths(SEQUENCES if is_sequence else ()).items():
        never = ~expected.ever_kept[name]
        for key in end:
            if key == path:
                assert torch.equal(end[key][never], start[key][never]), key
            elif key.startswith(f"{path}:"):  # the optimizer's state
                assert end[key][never].eq(0).all(), key


def tolerance_of(optimizer: Any) -> float:
    return 1e-6 if optimizer is SGD else 1e-5


# ---- without noise, every cell is the naive loop's -----------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "sizes", "mean"),
    [
        *((optimizer, "uneven", mean) for optimizer in (SGD, ADAGRAD, ROWWISE) for mean in (0, 1)),
        (SGD, "even", False),
        (ADAGRAD, "empty", True),
    ],
    ids=lambda value: getattr(value, "kind", str(value)),
)
def test_one_rank_is_the_naive_step(
    one_rank: Ranks, optimizer: Any, sizes: str, mean: bool
) -> None:
    start, end = run(one_rank, SIZES[sizes], Placement(), optimizer, QUIET, mean=bool(mean))
    expected = naive_selecting(start, singles(SIZES[sizes]), optimizer, QUIET, mean=bool(mean))
    check(start, end, expected, tolerance_of(optimizer))


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        *((name, optimizer) for name in PLACEMENTS for optimizer in (SGD, ADAGRAD)),
        ("table_wise", ROWWISE),
        ("row_wise", ROWWISE),
    ],
    ids=lambda value: getattr(value, "kind", str(value)),
)
def test_two_ranks_are_the_naive_step(two_ranks: Ranks, name: str, optimizer: Any) -> None:
    start, end = run(two_ranks, SIZES["uneven"], PLACEMENTS[name], optimizer, QUIET)
    expected = naive_selecting(start, singles(SIZES["uneven"]), optimizer, QUIET)
    check(start, end, expected, tolerance_of(optimizer))


@pytest.mark.parametrize("name", ["row_wise", "column_wise"])
def test_weighted_bags_are_the_naive_step(two_ranks: Ranks, name: str) -> None:
    """A weight changes the gradient on a row, and not whether the example counts for it."""
    start, end = run(two_ranks, SIZES["uneven"], PLACEMENTS[name], ADAGRAD, QUIET, weighted=True)
    units = singles(SIZES["uneven"])
    check(start, end, naive_selecting(start, units, ADAGRAD, QUIET, weighted=True), 1e-5)


@pytest.mark.parametrize(
    "kind", ["row_wise", "table_wise", "column_wise", "table_row_wise", "grid"]
)
def test_four_ranks_on_two_hosts_are_the_naive_step(four_ranks: Ranks, kind: Any) -> None:
    """Two-level kinds interleave the hosts' examples on a shard: ranks 0, 2, 1, 3."""
    sizes = [[3, 0, 2, 1], [0, 0, 0, 5], [2, 2, 2, 2]]
    start, end = run(four_ranks, sizes, Placement(default=kind), SGD, QUIET, hosts=2)
    check(start, end, naive_selecting(start, singles(sizes), SGD, QUIET), 1e-6)


@pytest.mark.parametrize("name", ["table_wise", "mixed"])
def test_users_count_once_for_every_row(two_ranks: Ranks, name: str) -> None:
    """However many of a user's examples read it; and their gradients are clipped as one."""
    units = UNITS["even"]
    start, end = run_users(two_ranks, units, PLACEMENTS[name], QUIET)
    sizes = [[size for rank in step for size in rank] for step in units]
    check(start, end, naive_selecting(start, sizes, SGD, QUIET), 1e-6)
    as_examples = naive_selecting(start, [[1] * sum(step) for step in sizes], SGD, QUIET)
    with pytest.raises(AssertionError):
        assert_close(end, as_examples.weights, 1e-4)


def test_a_batch_that_must_be_cut_is_refused(one_rank: Ranks) -> None:
    with pytest.raises(ValueError, match=r"AdaFEST chooses rows by all of it\. Leave max_physical"):
        run(one_rank, SIZES["even"], Placement(), SGD, QUIET, most=3)


# ---- with noise ----------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD], ids=lambda o: o.kind)
def test_one_rank_with_noise_is_the_naive_step(one_rank: Ranks, optimizer: Any) -> None:
    """Both queries' noise, drawn again by the naive loop; one gradient for the optimizer."""
    start, end = run(one_rank, SIZES["uneven"], Placement(), optimizer, NOISY)
    expected = naive_selecting(start, singles(SIZES["uneven"]), optimizer, NOISY)
    assert expected.only_kept > 20
    check(start, end, expected, tolerance_of(optimizer))


@pytest.mark.parametrize("name", PLACEMENTS)
def test_two_ranks_with_noise_are_the_naive_step(two_ranks: Ranks, name: str) -> None:
    """The mask and the noise are one rank's, whoever holds the rows."""
    start, end = run(two_ranks, SIZES["uneven"], PLACEMENTS[name], SGD, NOISY)
    expected = naive_selecting(start, singles(SIZES["uneven"]), SGD, NOISY)
    assert expected.only_kept > 20
    check(start, end, expected, 1e-6)


def displacements(ranks: Ranks, placement: Placement, noisy: PrivacyPlan, steps: int) -> Any:
    """How every table moved in each of some empty steps at learning rate one, and dense layers."""
    results = ranks.run(record_noise, ranks.world_size, placement, noisy, steps)
    whole = [assemble([rank[s] for rank in results]) for s in range(steps + 1)]
    moved = {key: torch.stack([s[key].double() for s in whole]).diff(dim=0) for key in whole[0]}
    return {name: moved.pop(path) for name, path in paths().items()}, moved


def check_survivors(moved_SRD: Tensor, p: float, stddev: float, name: str) -> None:
    """Rows survive whole or not at all, each with probability p, and then have all their noise."""
    is_moved = moved_SRD.ne(0)
    survives = is_moved.any(2)
    assert torch.equal(survives, is_moved.all(2)), f"{name}: a part of a row moved"
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


@pytest.mark.parametrize("source", ["fast", "secure", "row_keyed"])
def test_rows_that_nobody_read_survive_and_get_their_noise(one_rank: Ranks, source: Any) -> None:
    """Empty steps: everything that passes is a false positive."""
    mechanism = AdaFEST(threshold=0.5, map_clip_norm=0.7, noise_ratio=2.0)
    noisy = plan(2.0, noise=1.5, mechanism=mechanism, noise_source=source)
    sigma2 = 1.5 * math.sqrt(1 + 1 / 4)
    p = survival(0.5, 2 * sigma2 * 0.7)
    assert 0.4 < p < 0.5
    tables, dense = displacements(one_rank, Placement(), noisy, 50)
    for name, moved in tables.items():
        check_survivors(moved, p, sigma2 * 2.0 / EXPECTED, name)
    for key, moved in dense.items():
        assert_variance(moved, sigma2 * 2.0 / EXPECTED, key)


@pytest.mark.parametrize("name", ["row_wise", "column_wise"])
def test_survivors_on_two_ranks(two_ranks: Ranks, name: str) -> None:
    """Here with a threshold of its own for one table."""
    thresholds = {"t1": -2.0}
    mechanism = AdaFEST(threshold=0.0, table_thresholds=thresholds, noise_ratio=2.0)
    sigma2 = 1.5 * math.sqrt(1 + 1 / 4)
    noisy = plan(2.0, noise=1.5, mechanism=mechanism)
    tables, dense = displacements(two_ranks, PLACEMENTS[name], noisy, 50)
    for table, moved in tables.items():
        p = survival(thresholds.get(table, 0.0), 2 * sigma2)
        check_survivors(moved, p, sigma2 * 2.0 / EXPECTED, table)
    for key, moved in dense.items():
        assert_variance(moved, sigma2 * 2.0 / EXPECTED, key)
    # Shards toss coins of their own: halves of a table agree on no more rows than chance has it.
    halves = tables["t0"].ne(0).any(2).double().split(20, dim=1)
    agree = (halves[0] == halves[1]).double().mean()
    assert abs(agree - 0.5) <= 5 * 0.5 / math.sqrt(halves[0].numel())


# ---- rows that were selected before --------------------------------------------------------------


def public(folder: Path) -> tuple[Selection, dict[str, Tensor]]:
    """Twelve rows of each table, by counts from a file; and a mask of them."""
    generator = np.random.default_rng(0)
    counts = {name: generator.permutation(rows).astype(float) for name, rows, _, _ in TABLES}
    np.savez(folder / "counts.npz", **counts)
    selection = Selection(
        frequencies=PublicFrequencies(path=str(folder / "counts.npz")), rows_per_table=12
    )
    return selection, {n: torch.from_numpy(c >= len(c) - 12) for n, c in counts.items()}


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("row_wise", SGD), ("column_wise", ADAGRAD), ("mixed", SGD)],
    ids=lambda value: getattr(value, "kind", str(value)),
)
def test_fest_is_the_naive_step_on_selected_rows(
    two_ranks: Ranks, tmp_path: Path, name: str, optimizer: Any
) -> None:
    """Only they move, and only they count in an example's norm."""
    selection, selected = public(tmp_path)
    quiet = plan(0.3, mechanism=FEST(selection=selection))
    start, end = run(two_ranks, SIZES["uneven"], PLACEMENTS[name], optimizer, quiet)
    units = singles(SIZES["uneven"])
    expected = naive_selecting(start, units, optimizer, quiet, selected=selected)
    expected.read_and_left += 1  # rows that were not selected are not counted there
    check(start, end, expected, tolerance_of(optimizer))
    # A norm over all rows would give something else, in the dense layers too.
    everywhere = naive_selecting(start, units, optimizer, quiet)
    head = {key: value for key, value in everywhere.weights.items() if key.startswith("head.")}
    with pytest.raises(AssertionError):
        assert_close(end, head, 10 * tolerance_of(optimizer))


@pytest.mark.parametrize(
    ("name", "noise"), [("row_wise", 0.0), ("column_wise", 0.12), ("mixed", 0.12)]
)
def test_adafest_plus_is_the_naive_step_on_selected_rows(
    two_ranks: Ranks, tmp_path: Path, name: str, noise: float
) -> None:
    """An example counts for selected rows only: clipped by their number, and on no others."""
    selection, selected = public(tmp_path)
    mechanism = AdaFESTPlus(threshold=0.93, map_clip_norm=1.5, noise_ratio=3.0, selection=selection)
    both = plan(0.3, noise=noise, mechanism=mechanism, noise_source="row_keyed")
    start, end = run(two_ranks, SIZES["uneven"], PLACEMENTS[name], SGD, both)
    units = singles(SIZES["uneven"])
    expected = naive_selecting(start, units, SGD, both, selected=selected)
    assert bool(expected.only_kept) is bool(noise)
    check(start, end, expected, 1e-6)


def test_every_selected_row_gets_noise_and_no_other_moves(two_ranks: Ranks, tmp_path: Path) -> None:
    selection, selected = public(tmp_path)
    noisy = plan(2.0, noise=1.5, mechanism=FEST(selection=selection))
    tables, dense = displacements(two_ranks, PLACEMENTS["row_wise"], noisy, 50)
    for name, moved in tables.items():
        assert moved[:, ~selected[name]].eq(0).all()
        noise = moved[:, selected[name]]
        assert noise.shape[1] == 12
        assert_variance(noise, 1.5 * 2.0 / EXPECTED, name)
        assert len(noise.flatten(0, 1).unique(dim=0)) == 50 * 12
    for key, moved in dense.items():
        assert_variance(moved, 1.5 * 2.0 / EXPECTED, key)


def test_survivors_among_selected_rows(one_rank: Ranks, tmp_path: Path) -> None:
    selection, selected = public(tmp_path)
    mechanism = AdaFESTPlus(threshold=0.0, selection=selection)
    noisy = plan(2.0, noise=1.5, mechanism=mechanism)
    tables, _ = displacements(one_rank, Placement(), noisy, 50)
    for name, moved in tables.items():
        assert moved[:, ~selected[name]].eq(0).all()
        stddev = 1.5 * math.sqrt(1 + 1 / 25) * 2.0 / EXPECTED
        check_survivors(moved[:, selected[name]], 0.5, stddev, name)

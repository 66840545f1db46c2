"""Steps of DP-AdaFEST, DP-FEST and DP-AdaFEST+ equal a naive loop."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from lightning_dpsparse import (
    FEST,
    AdaFESTPlus,
    Placement,
)
from tests.support.adafest_runs import NOISY, QUIET, check, public, singles
from tests.support.naive_step import ADAGRAD, SIZES, plan, run, tolerance_of
from tests.support.plain_training import PLACEMENTS, ROWWISE, SGD, assert_close
from tests.support.ranks import Ranks
from tests.support.row_choice import naive_selecting
from tests.support.tiny_model import SEQUENCES, name_of
from tests.support.users import UNITS, run_users

# ---- without noise, every cell is the naive loop's -----------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "sizes", "tables"),
    [
        *product((SGD, ADAGRAD, ROWWISE), ["uneven"], ["sum", "mean", "sequences"]),
        (SGD, "even", "sum"),
        (ADAGRAD, "empty", "mean"),
        (ADAGRAD, "empty", "sequences"),
    ],
    ids=name_of,
)
def test_one_rank_is_the_naive_step(
    one_rank: Ranks, optimizer: Any, sizes: str, tables: str
) -> None:
    mean, sequences = tables == "mean", SEQUENCES if tables == "sequences" else ()
    settings: dict[str, Any] = {"mean": mean, "sequences": sequences}
    start, end = run(one_rank, SIZES[sizes], Placement(), optimizer, QUIET, **settings)
    expected = naive_selecting(start, singles(SIZES[sizes]), optimizer, QUIET, mean=mean)
    check(start, end, expected, tolerance_of(optimizer))


@pytest.mark.parametrize(
    ("name", "optimizer", "sequences"),
    [
        *product(PLACEMENTS, (SGD, ADAGRAD), [()]),
        *product(("table_wise", "row_wise"), [ROWWISE], [(), SEQUENCES]),
        *product(("table_wise", "row_wise", "column_wise"), (SGD, ADAGRAD), [SEQUENCES]),
    ],
    ids=name_of,
)
def test_two_ranks_are_the_naive_step(
    two_ranks: Ranks, name: str, optimizer: Any, sequences: tuple[str, ...]
) -> None:
    """Repeated ids of a sequence count once for their row, like those of a bag."""
    sizes, placement = SIZES["uneven"], PLACEMENTS[name]
    start, end = run(two_ranks, sizes, placement, optimizer, QUIET, sequences=sequences)
    expected = naive_selecting(start, singles(sizes), optimizer, QUIET)
    check(start, end, expected, tolerance_of(optimizer))


@pytest.mark.parametrize("name", ["row_wise", "column_wise"])
def test_weighted_bags_are_the_naive_step(two_ranks: Ranks, name: str) -> None:
    """A weight changes the gradient on a row, and not whether the example counts for it."""
    start, end = run(two_ranks, SIZES["uneven"], PLACEMENTS[name], ADAGRAD, QUIET, weighted=True)
    units = singles(SIZES["uneven"])
    check(start, end, naive_selecting(start, units, ADAGRAD, QUIET, weighted=True), 1e-5)


@pytest.mark.parametrize(
    ("kind", "sequences"),
    [
        *product(("row_wise", "table_wise", "column_wise"), [(), SEQUENCES]),
        ("table_row_wise", ()),
        ("grid", ()),
    ],
    ids=name_of,
)
def test_four_ranks_on_two_hosts_are_the_naive_step(
    four_ranks: Ranks, kind: Any, sequences: tuple[str, ...]
) -> None:
    """Two-level kinds interleave the hosts' examples on a shard: ranks 0, 2, 1, 3."""
    sizes = [[3, 0, 2, 1], [0, 0, 0, 5], [2, 2, 2, 2]]
    placement, settings = Placement(default=kind), {"hosts": 2, "sequences": sequences}
    start, end = run(four_ranks, sizes, placement, SGD, QUIET, **settings)
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


@pytest.mark.parametrize(
    ("name", "sequences"),
    [*product(PLACEMENTS, [()]), ("row_wise", SEQUENCES), ("column_wise", SEQUENCES)],
    ids=name_of,
)
def test_two_ranks_with_noise_are_the_naive_step(
    two_ranks: Ranks, name: str, sequences: tuple[str, ...]
) -> None:
    """The mask and the noise are one rank's, whoever holds the rows."""
    settings: dict[str, Any] = {"sequences": sequences}
    start, end = run(two_ranks, SIZES["uneven"], PLACEMENTS[name], SGD, NOISY, **settings)
    expected = naive_selecting(start, singles(SIZES["uneven"]), SGD, NOISY)
    assert expected.only_kept > 20
    check(start, end, expected, 1e-6)


# ---- rows that were selected before --------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "optimizer", "sequences"),
    [
        *(("row_wise", SGD, kind) for kind in ((), SEQUENCES)),
        *(("column_wise", ADAGRAD, kind) for kind in ((), SEQUENCES)),
        ("mixed", SGD, ()),
    ],
    ids=name_of,
)
def test_fest_is_the_naive_step_on_selected_rows(
    two_ranks: Ranks, tmp_path: Path, name: str, optimizer: Any, sequences: tuple[str, ...]
) -> None:
    """Only they move, and only they count in an example's norm."""
    selection, selected = public(tmp_path)
    quiet = plan(0.3, mechanism=FEST(selection=selection))
    placement, sizes = PLACEMENTS[name], SIZES["uneven"]
    start, end = run(two_ranks, sizes, placement, optimizer, quiet, sequences=sequences)
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
    ("name", "noise", "sequences"),
    [
        *(("row_wise", 0.0, kind) for kind in ((), SEQUENCES)),
        *(("column_wise", 0.12, kind) for kind in ((), SEQUENCES)),
        ("mixed", 0.12, ()),
        *(("alone", noise, SEQUENCES) for noise in (0.0, 0.12)),
    ],
    ids=name_of,
)
def test_adafest_plus_is_the_naive_step_on_selected_rows(
    one_rank: Ranks,
    two_ranks: Ranks,
    tmp_path: Path,
    name: str,
    noise: float,
    sequences: tuple[str, ...],
) -> None:
    """An example counts for selected rows only: clipped by their number, and on no others."""
    selection, selected = public(tmp_path)
    mechanism = AdaFESTPlus(threshold=0.93, map_clip_norm=1.5, noise_ratio=3.0, selection=selection)
    both = plan(0.3, noise=noise, mechanism=mechanism, noise_source="row_keyed")
    ranks, placement = (one_rank, Placement()) if name == "alone" else (two_ranks, PLACEMENTS[name])
    start, end = run(ranks, SIZES["uneven"], placement, SGD, both, sequences=sequences)
    units = singles(SIZES["uneven"])
    expected = naive_selecting(start, units, SGD, both, selected=selected)
    assert bool(expected.only_kept) is bool(noise)
    check(start, end, expected, 1e-6)

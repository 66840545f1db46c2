"""Steps of DP-AdaFEST, DP-FEST and DP-AdaFEST+ equal a naive loop."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dpsparse import (
    EANA,
    FEST,
    AdaFESTPlus,
    Placement,
)
from tests.support.adafest_runs import NOISY, QUIET, check, public, singles
from tests.support.naive_step import ADAGRAD, SIZES, Batches, plan, run, tolerance_of
from tests.support.plain_training import PLACEMENTS, ROWWISE, SGD, assert_close
from tests.support.ranks import Ranks
from tests.support.row_choice import naive_selecting
from tests.support.tiny_model import SEQUENCES, Recording, make_trainer, name_of
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


@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("noisy", [False, True], ids=["quiet", "noisy"])
def test_a_batch_in_parts_is_the_naive_step_of_the_whole(
    one_rank: Ranks, most: int, noisy: bool
) -> None:
    """Rows are chosen by all ids, before the first part: a part's readers alone are too few."""
    private = NOISY if noisy else QUIET
    start, end = run(one_rank, SIZES["uneven"], Placement(), SGD, private, most=most)
    expected = naive_selecting(start, singles(SIZES["uneven"]), SGD, private)
    check(start, end, expected, 1e-6)


@pytest.mark.parametrize(
    ("name", "sequences"),
    [("row_wise", ()), ("column_wise", ()), ("mixed", ()), ("row_wise", SEQUENCES)],
    ids=name_of,
)
def test_parts_on_two_ranks_are_the_naive_step_of_the_whole(
    two_ranks: Ranks, name: str, sequences: tuple[str, ...]
) -> None:
    """Ranks have batches of other sizes, and so parts of other sizes, some of them empty."""
    settings: dict[str, Any] = {"sequences": sequences, "most": 2}
    start, end = run(two_ranks, SIZES["uneven"], PLACEMENTS[name], SGD, NOISY, **settings)
    check(start, end, naive_selecting(start, singles(SIZES["uneven"]), SGD, NOISY), 1e-6)


def test_parts_among_selected_rows_are_the_naive_step(one_rank: Ranks, tmp_path: Path) -> None:
    selection, selected = public(tmp_path)
    mechanism = AdaFESTPlus(threshold=0.93, map_clip_norm=2.0, selection=selection)
    private = plan(0.3, mechanism=mechanism)
    start, end = run(one_rank, SIZES["uneven"], Placement(), SGD, private, most=2)
    units = singles(SIZES["uneven"])
    check(start, end, naive_selecting(start, units, SGD, private, selected=selected), 1e-6)


class Forgetful(Recording):
    """Drops some inputs at random, and counts its calls."""

    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        self.log("calls", float(self.calls), batch_size=1)
        self.drawn.append(float(torch.rand(())))
        return super().training_step(batch, batch_idx)

    def on_train_start(self) -> None:
        super().on_train_start()
        self.drawn: list[float] = []


def count_calls(private: Any) -> tuple[int, list[float], float]:
    """Runs inside a rank: two steps, of three parts each."""
    torch.manual_seed(3)
    module = Forgetful()
    trainer = make_trainer(1, Placement(), SGD, privacy=private, max_physical_batch=2)
    trainer.fit(module, Batches([[6], [6]], None))
    return module.calls, module.drawn, float(trainer.callback_metrics["calls"])


def test_listing_ids_leaves_no_trace(one_rank: Ranks) -> None:
    """Calls, draws and logs are those of a mechanism that needs no list."""
    with_list = one_rank.run(count_calls, QUIET)[0]
    without = one_rank.run(count_calls, plan(0.3, mechanism=EANA()))[0]
    assert with_list == without
    assert with_list[0] == 6


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

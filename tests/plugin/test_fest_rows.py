"""Which rows a run selects by its data, and that it moves no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lightning_dpsparse import AdaFESTPlus, Placement, Selection, Users
from tests.support.fest_runs import COUNTED, REPLAYED, Selecting, fest, plan, select, selected_by
from tests.support.private_runs import Marked
from tests.support.ranks import Ranks
from tests.support.tiny_model import BAGS_OR_SEQUENCES, assemble


@pytest.mark.parametrize(
    "unit",
    [Users(max_examples=2, drawn=drawn) for drawn in ("examples", "users")],
    ids=lambda u: u.drawn,
)
def test_examples_beyond_a_users_cap_are_not_counted(
    one_rank: Ranks, tmp_path: Path, unit: Users
) -> None:
    """And the noise is for two examples of a user: the same draws, twice as large."""
    replayed = plan(unit=unit, expected_batch_size=6, **REPLAYED)
    result = one_rank.run(select, 1, replayed, tmp_path, max_steps=1)[0]
    data = [e for i, e in enumerate(Marked().examples) if i % 3 < 2]
    assert result["rows"][0] == selected_by(replayed, [(0, data)], units=2)
    assert result["rows"][0] != selected_by(replayed, [(0, data)], units=1)
    assert result["rows"][0] != selected_by(replayed, [(0, Marked().examples)], units=2)


BOTH = AdaFESTPlus(threshold=0.0, selection=Selection(frequencies=COUNTED, rows_per_table=6))


@pytest.mark.parametrize("mechanism", [fest(), BOTH], ids=["fest", "adafest_plus"])
@BAGS_OR_SEQUENCES
def test_two_ranks_select_the_same_rows_as_one(
    one_rank: Ranks,
    two_ranks: Ranks,
    tmp_path: Path,
    mechanism: Any,
    sequences: tuple[str, ...],
) -> None:
    """FEST moves all of them; AdaFEST+ those that pass its threshold in a step, and no others."""
    replayed = plan(mechanism, **REPLAYED)
    settings: dict[str, Any] = {"max_steps": 2, "module": Selecting(sequences=sequences)}
    rows = Placement(default="row_wise")
    results = [
        *one_rank.run(select, 1, replayed, tmp_path, **settings),
        *two_ranks.run(select, 2, replayed, tmp_path, placement=rows, **settings),
    ]
    expected = selected_by(replayed, [(0, Marked().examples)], sequences=sequences)
    assert all(result["rows"] == [expected] * 2 for result in results)
    start, end = (assemble([r[key] for r in results[1:]]) for key in ("start", "state"))
    moved = moved_rows(start, end, expected)
    if mechanism is BOTH:
        assert all(set(moved[name]) <= set(expected[name]) for name in expected)
        assert 6 < sum(map(len, moved.values())) < 4 * 6
    else:
        assert moved == expected


def moved_rows(
    start: dict[str, Tensor], end: dict[str, Tensor], tables: dict[str, Any]
) -> dict[str, list[int]]:
    return {
        name: (start[name] != end[name]).any(1).nonzero().squeeze(1).tolist() for name in tables
    }


def test_rows_that_were_not_selected_stay_bit_for_bit(one_rank: Ranks, tmp_path: Path) -> None:
    """Selected ones all move, read or not: noise is on every one."""
    result = one_rank.run(select, 1, plan(fest()), tmp_path)[0]
    start, end = (assemble([result[key]]) for key in ("start", "state"))
    assert moved_rows(start, end, result["rows"][0]) == result["rows"][0]

"""Lookups by row: each row once, in order, with its lookups in the order of their examples."""

from __future__ import annotations

import pytest
import torch

from lightning_dpsparse.engine import lookups
from lightning_dpsparse.engine.lookups import Bags, Layout
from tests.support.row_choice import Example, bags_of

IN_ORDER = Layout((0, 1, 2), (2, 2, 2), (5, 4, 6))
OUT_OF_ORDER = Layout((2, 0, 1), (2, 2, 2), (5, 4, 6))
SHARED = Layout((0, 1, 0), (2, 2), (5, 4))

ONE_HOT: list[Example] = [[[4], [3], [1]], [[0], [3], [0]], [[1], [0], [3]], [[4], [3], [1]]]
BAGS: list[list[Example]] = [
    ONE_HOT,
    [[[4, 4, 2], [3], []], [[], [0, 3, 3], [2, 1]], [[0], [], [0, 0]]],
    [[[1], [], [2]], [[1, 0], [1], [3]]],
    [[[], [], []]],
    [],
]


def check(bags: Bags) -> None:
    size = max(1, bags.num_examples)
    rows, bag = bags.row_L.tolist(), bags.bag_L.tolist()
    lookups_in_order = sorted(range(len(rows)), key=lambda at: (rows[at], bag[at] % size, bag[at]))
    runs = bags.runs
    assert runs.order_L.tolist() == lookups_in_order
    assert runs.row_U.tolist() == sorted(set(rows))
    assert runs.count_U.tolist() == [rows.count(row) for row in sorted(set(rows))]
    assert runs.row_U[runs.sorted_position_L].tolist() == sorted(rows)
    assert runs.row_U[runs.position_L].tolist() == rows
    some = runs.row_U % 2 == 0
    kept = runs.only(some)
    assert kept.row_U.tolist() == [row for row in sorted(set(rows)) if row % 2 == 0]
    assert kept.order_L.tolist() == [at for at in lookups_in_order if rows[at] % 2 == 0]
    assert kept.row_U[kept.sorted_position_L].tolist() == [r for r in sorted(rows) if r % 2 == 0]
    none = runs.only(torch.zeros_like(some))
    assert none.row_U.numel() == none.order_L.numel() == none.start_U.numel() == 0


@pytest.mark.parametrize("most", [0, 1 << 16])
@pytest.mark.parametrize("examples", BAGS)
@pytest.mark.parametrize("layout", [IN_ORDER, OUT_OF_ORDER, SHARED])
def test_lookups_are_sorted_by_row(
    layout: Layout, examples: list[Example], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "_MANY", most)  # numpy's sort, or PyTorch's
    check(bags_of(layout, examples))


def test_many_rows_of_a_large_table_keep_their_places() -> None:
    """Rows of 2^43 and places share 63 bits."""
    layout = Layout((0,), (2,), (2**43,))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2**43 - 300, 2**43, (500,), generator=generator)
    check(Bags(layout, ids, torch.arange(501)))

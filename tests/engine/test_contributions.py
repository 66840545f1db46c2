"""Who read which row, against loops with sets; and the norm of what each left there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_dpsparse.engine.contributions import Contributions, contributions, pair_norms
from lightning_dpsparse.engine.lookups import Layout, Lookup
from tests.support.row_choice import Example, bags_of, rows_read

# Features 0 and 2 share a table of five rows, with another table's feature between them.
SHARED = Layout((0, 1, 0), (2, 3), (5, 4))
ALONE = Layout((0, 1, 2), (2, 3, 2), (5, 4, 6))
MEAN = Layout((0, 1, 0), (2, 3), (5, 4), is_mean=True)
SEQUENCES = Layout((0, 1, 0), (3, 3), (5, 4), is_pooled=False)
ALONE_SEQUENCES = Layout((0, 1, 2), (3, 3, 3), (5, 4, 6), is_pooled=False)

BAGS: dict[str, list[Example]] = {
    "one-hot": [[[1], [3], [1]], [[4], [3], [0]], [[1], [0], [4]], [[1], [3], [1]]],
    "multi-hot": [[[1, 1, 2], [3], []], [[], [0, 3, 3], [2, 1]], [[0], [], [0, 0]], [[], [], []]],
    "empty": [[[], [], []]] * 4,
}
LEADERS = [None, [0, 0, 2, 2], [0, 0, 0, 0], [0, 1, 1, 3]]


def by_unit(rows: list[set[int]], leaders: list[int] | None) -> list[set[int]]:
    """The rows of every unit at its leader; all other examples have none."""
    found: list[set[int]] = [set() for _ in rows]
    for b, mine in enumerate(rows):
        found[b if leaders is None else leaders[b]] |= mine
    return found


def vectors(found: Contributions, row_U: Tensor, size: int) -> list[dict[int, float]]:
    """v_b of every unit, where it is not zero."""
    return [
        {row: v for row, v in zip(row_U.tolist(), found.sums(one_B).tolist()) if v}
        for one_B in torch.eye(size, dtype=torch.float64)
    ]


def check(
    layout: Layout, examples: Sequence[Example], leaders: list[int] | None, among: set[int] | None
) -> None:
    bags = bags_of(layout, examples)
    row_U, size = bags.runs.row_U, len(examples)
    expected = by_unit(rows_read(layout, examples, among), leaders)
    first_of_unit_B = None if leaders is None else torch.tensor(leaders, dtype=torch.int64)
    among_U = None if among is None else torch.tensor([int(r) in among for r in row_U]).bool()
    found = contributions(bags, first_of_unit_B, among_U)
    assert vectors(found, row_U, size) == [dict.fromkeys(mine, 1.0) for mine in expected]
    assert found.square_norms().tolist() == [len(mine) for mine in expected]
    even_U = row_U % 2 == 0
    of_even = [sum(row % 2 == 0 for row in mine) for mine in expected]
    assert found.square_norms(even_U).tolist() == of_even
    for least in (0.3, 1.7):  # all weights alike is a case of its own
        weight_B = torch.linspace(least, 1.7, size, dtype=torch.float64)
        sums = [
            sum(float(weight_B[b]) for b, mine in enumerate(expected) if row in mine)
            for row in row_U.tolist()
        ]
        torch.testing.assert_close(found.sums(weight_B), torch.tensor(sums, dtype=torch.float64))


@pytest.mark.parametrize("among", [None, {0, 1, 6, 8}, set()], ids=["all", "some", "none"])
@pytest.mark.parametrize("leaders", LEADERS, ids=str)
@pytest.mark.parametrize("name", BAGS)
@pytest.mark.parametrize("layout", [SHARED, ALONE], ids=["shared", "alone"])
def test_every_unit_counts_once_for_every_row_it_reads(
    layout: Layout, name: str, leaders: list[int] | None, among: set[int] | None
) -> None:
    check(layout, BAGS[name], leaders, among)


def test_two_features_that_lead_to_one_row_count_once() -> None:
    """One id in every bag, which is the quick way for tables of their own, and wrong for these."""
    found = contributions(bags_of(SHARED, [[[1], [3], [1]]]))
    assert found.square_norms().tolist() == [2]
    assert found.sums(torch.ones(1)).tolist() == [1.0, 1.0]


bag = lambda rows: st.lists(st.integers(0, rows - 1), max_size=4)  # noqa: E731


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    examples=st.lists(st.tuples(bag(5), bag(4), bag(5)), min_size=1, max_size=5),
    starts=st.sets(st.integers(1, 4)),
    among=st.one_of(st.none(), st.sets(st.integers(0, 8))),
)
def test_any_bags_any_users_any_selection(
    examples: list[Any], starts: set[int], among: set[int] | None
) -> None:
    leaders = [max(s for s in {0, *starts} if s <= b) for b in range(len(examples))]
    check(SHARED, examples, None, among)
    check(SHARED, examples, leaders, among)


# ---- norms of pairs ------------------------------------------------------------------------------


def naive_norms(
    lookup: Lookup, examples: Sequence[Example], weights: Any, leaders: list[int] | None
) -> dict[tuple[int, int], float]:
    """|| sum over a unit's lookups of a row of weight * share * G || for every row and unit."""
    layout, sums, lookups = lookup.layout, dict[tuple[int, int], Tensor](), iter(lookup.gradient)
    for f, table in enumerate(layout.table_of_feature):
        for b, example in enumerate(examples):
            ids = example[f]
            for i in ids:
                value = lookup.gradient[b, layout.columns[f]] if layout.is_pooled else next(lookups)
                if weights is not None:
                    value = value * weights(torch.tensor(i))
                if layout.is_mean:
                    value = value / len(ids)
                key = (layout.first_row[table] + i, b if leaders is None else leaders[b])
                sums[key] = sums[key] + value if key in sums else value
    return {key: float(value.norm()) for key, value in sums.items()}


def weigh(ids: Tensor) -> Tensor:
    return 0.5 + ids.double()


@pytest.mark.parametrize("leaders", LEADERS, ids=str)
@pytest.mark.parametrize("name", BAGS)
@pytest.mark.parametrize(
    ("layout", "weights"),
    [
        *((layout, weights) for layout in (SHARED, ALONE, MEAN) for weights in (None, weigh)),
        (SEQUENCES, None),
        (ALONE_SEQUENCES, None),
    ],
)
def test_lookups_of_a_row_add_up_before_their_norm(
    layout: Layout, name: str, weights: Any, leaders: list[int] | None
) -> None:
    examples = BAGS[name]
    generator = torch.Generator().manual_seed(1)
    bags = bags_of(layout, examples, weights)
    shape = (len(examples), layout.columns[-1].stop)
    if not layout.is_pooled:
        shape = (bags.ids_L.numel(), layout.widths[0])
    gradient = torch.randn(shape, generator=generator, dtype=torch.float64)
    lookup = Lookup(bags, gradient)
    first_of_unit_B = None if leaders is None else torch.tensor(leaders, dtype=torch.int64)
    found = pair_norms(lookup, first_of_unit_B)
    rows = lookup.bags.runs.row_U[found.position_P].tolist()
    pairs = list(zip(rows, found.unit_P.tolist()))
    expected = naive_norms(lookup, examples, weights, leaders)
    assert sorted(pairs) == sorted(expected)
    assert dict(zip(pairs, found.norm_P.tolist())) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_three_hits_on_a_row_weigh_three() -> None:
    gradient = torch.tensor([[0.6, 0.8, 0.0, 0.0, 0.0, 0.6, 0.8]])
    found = pair_norms(Lookup(bags_of(SHARED, [[[2, 2], [], [2]]]), gradient))
    assert found.norm_P.tolist() == pytest.approx([3.0])

"""Norms and clipped sums of tables against autograd, one example at a time, in float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dpsparse.engine.lookups import Bags, Layout, Lookup
from lightning_dpsparse.engine.norms import square_norms
from lightning_dpsparse.engine.rows import RowGradient, add_to_bags, clipped_row_gradients
from tests.support.table_cases import CASES, LAYOUTS, B, example_gradients, make, mask_of


@pytest.mark.parametrize(("name", "most", "weighted", "mean", "masked"), CASES)
def test_norms_and_sums_match_autograd(
    name: str, most: int, weighted: bool, mean: bool, masked: bool
) -> None:
    lookup = make(LAYOUTS[name], most, weighted=weighted, mean=mean)
    mask = mask_of(lookup.layout) if masked else None
    gradients = example_gradients(lookup, mask)
    runs = lookup.bags.runs
    kept = None if mask is None else runs.only(mask[runs.row_U])
    expected = torch.stack([sum(g.square().sum() for g in tables) for tables in gradients])  # type: ignore[misc]
    torch.testing.assert_close(square_norms(lookup, kept), expected, rtol=1e-12, atol=1e-12)
    for table in range(len(lookup.layout.widths)):
        of_table = torch.stack([tables[table].square().sum() for tables in gradients])
        found = square_norms(lookup, kept, tables=[table])
        torch.testing.assert_close(found, of_table, rtol=1e-12, atol=1e-12)

    factors_KB = torch.linspace(0.0, 1.0, 2 * B, dtype=torch.float64).view(2, B)
    groups = [table % 2 for table in range(len(lookup.layout.widths))]
    for used, group_of_table in ((factors_KB[:1], [0] * len(groups)), (factors_KB, groups)):
        found = by_table(lookup.layout, clipped_row_gradients(lookup, used, group_of_table, kept))
        for table, (rows, values) in enumerate(found):
            factors = used[group_of_table[table]]
            total = sum(f * tables[table] for f, tables in zip(factors, gradients))
            dense = torch.zeros_like(total)  # type: ignore[arg-type]
            dense[rows] = values
            torch.testing.assert_close(dense, total, rtol=1e-12, atol=1e-12)
            assert (rows[1:] > rows[:-1]).all()


def by_table(layout: Layout, found: list[RowGradient]) -> list[tuple[Tensor, Tensor]]:
    """Rows within each table, and their values."""
    result = []
    for stack, gradient in zip(layout.stacks, found, strict=True):
        cuts = pairwise(stack.bounds(gradient.rows_U))
        for start, (first, last) in zip(stack.starts, cuts):
            result.append((gradient.rows_U[first:last] - start, gradient.values_UD[first:last]))
    assert len(result) == len(layout.widths)
    return result


def test_stacks_are_neighbours_of_one_width() -> None:
    assert [list(s.tables) for s in LAYOUTS["two stacks"].stacks] == [[0, 1], [2, 3]]
    assert [s.starts for s in LAYOUTS["two stacks"].stacks] == [(0, 7, 10), (0, 5, 7)]
    assert [s.first_row for s in LAYOUTS["two stacks"].stacks] == [0, 10]
    assert [list(s.tables) for s in LAYOUTS["one table per feature"].stacks] == [[0], [1], [2]]


def test_repeated_ids_add_before_they_are_squared() -> None:
    layout = Layout((0,), (4,), (5,))
    gradient = torch.tensor([[0.6, 0.8, 0.0, 0.0]])
    lookup = Lookup(Bags(layout, torch.tensor([2, 2, 2]), torch.tensor([0, 3])), gradient)
    assert square_norms(lookup).item() == pytest.approx(9.0)


def test_features_that_share_a_row_add_before_they_are_squared() -> None:
    layout = Layout((0, 0), (1,), (5,))
    offsets, gradient = torch.tensor([0, 1, 2]), torch.tensor([[3.0, 4.0]])
    lookup = Lookup(Bags(layout, torch.tensor([2, 2]), offsets), gradient)
    assert square_norms(lookup).item() == pytest.approx(49.0)
    apart = Lookup(Bags(layout, torch.tensor([2, 1]), offsets), gradient)
    assert square_norms(apart).item() == pytest.approx(25.0)


def sequence(ids: list[int], gradient: list[list[float]]) -> Lookup:
    """One example that reads one sequence."""
    layout = Layout((0,), (len(gradient[0]),), (5,), is_pooled=False)
    offsets = torch.tensor([0, len(ids)])
    return Lookup(Bags(layout, torch.tensor(ids), offsets), torch.tensor(gradient))


def test_positions_that_read_one_row_add_before_they_are_squared() -> None:
    assert square_norms(sequence([2, 2, 2], [[0.6, 0.8]] * 3)).item() == pytest.approx(9.0)
    assert square_norms(sequence([2, 2], [[3.0, 0.0], [0.0, 4.0]])).item() == pytest.approx(25.0)
    assert square_norms(sequence([2, 1], [[3.0, 0.0], [4.0, 0.0]])).item() == pytest.approx(25.0)
    assert square_norms(sequence([2, 2], [[3.0, 0.0], [4.0, 0.0]])).item() == pytest.approx(49.0)


def test_positions_that_cancel_leave_what_rounding_hides() -> None:
    """1e8 + 1 - 1e8 is zero in float32, and would not be clipped at all."""
    squares = square_norms(sequence([2, 2, 2], [[1e8], [1.0], [-1e8]]))
    assert squares.item() >= 1e16 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("name", ["sequences", "sequences, shared table"])
def test_examples_that_are_dropped_leave_zeros_at_their_own_lookups(name: str) -> None:
    lookup = make(LAYOUTS[name], 4, weighted=False, mean=False)
    bad_B = torch.arange(B) % 3 == 1
    left = lookup.without(bad_B)
    squares_B = square_norms(lookup)
    assert (squares_B[bad_B] > 0).any()
    assert square_norms(left)[bad_B].eq(0).all()
    torch.testing.assert_close(square_norms(left)[~bad_B], squares_B[~bad_B])


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_that_were_read_are_listed_though_their_sum_is_zero(name: str) -> None:
    lookup = make(LAYOUTS[name], 4, weighted=False, mean=False)
    zeros_KB = torch.zeros(1, B, dtype=torch.float64)
    found = clipped_row_gradients(lookup, zeros_KB, [0] * len(lookup.layout.widths))
    listed = torch.cat([g.rows_U + s.first_row for g, s in zip(found, lookup.layout.stacks)])
    assert torch.equal(listed, lookup.bags.row_L.unique())


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("examples", [0, 3])
def test_empty_batches_and_empty_bags_give_nothing(name: str, examples: int) -> None:
    layout = LAYOUTS[name]
    width = sum(layout.widths[t] for t in layout.table_of_feature)
    offsets = torch.zeros(len(layout.table_of_feature) * examples + 1, dtype=torch.int64)
    shape = (examples, width) if layout.is_pooled else (0, layout.widths[0])
    lookup = Lookup(Bags(layout, torch.zeros(0, dtype=torch.int64), offsets), torch.ones(shape))
    assert square_norms(lookup).tolist() == [0.0] * examples
    found = clipped_row_gradients(lookup, torch.ones(1, examples), [0] * len(layout.widths))
    assert all(g.rows_U.numel() == 0 for g in found)


def fast_path(**kwargs: Any) -> Lookup:
    return make(LAYOUTS["one table per feature"], 1, weighted=False, mean=False, **kwargs)


def test_the_fast_path_is_the_general_one() -> None:
    lookup = fast_path()
    everything = lookup.bags.runs  # another path
    torch.testing.assert_close(square_norms(lookup), square_norms(lookup, everything))


@pytest.mark.parametrize(
    ("name", "most", "weighted", "mean"),
    sorted({case[:4] for case in CASES if not (case[2] and case[3])}),
)
def test_rows_added_to_bags_are_as_if_they_had_been_read(
    name: str, most: int, weighted: bool, mean: bool
) -> None:
    lookup = make(LAYOUTS[name], most, weighted=weighted, mean=mean)
    bags, layout, offsets = lookup.bags, lookup.layout, lookup.bags.offsets.tolist()
    rows = bags.rows_of_stacks()
    widths = [layout.widths[stack.tables.start] for stack in layout.stacks]
    added = [torch.randn(len(r), width, dtype=torch.float64) for r, width in zip(rows, widths)]
    found = torch.zeros_like(lookup.gradient)
    add_to_bags(found, bags, added)
    tables = []
    for stack, width, here, values in zip(layout.stacks, widths, rows, added):
        whole = torch.zeros(stack.num_rows, width, dtype=torch.float64)
        whole[here] = values
        tables += [whole[start:stop] for start, stop in pairwise(stack.starts)]
    expected = torch.zeros_like(found)
    for b in range(B):
        for f, t in enumerate(layout.table_of_feature):
            bag = slice(offsets[f * B + b], offsets[f * B + b + 1])
            read = tables[t][bags.ids_L[bag]]
            if not layout.is_pooled:
                expected[bag] = read
                continue
            if bags.weights_L is not None:
                read = read * bags.weights_L[bag, None]
            share = max(1, len(read)) if mean else 1
            expected[b, layout.columns[f]] = read.sum(0) / share
    torch.testing.assert_close(found, expected)

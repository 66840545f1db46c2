"""The clipped gradient of the tables, row by row: what an update is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lightning_dpsparse.engine.lookups import Layout, Lookup

# B examples, K groups, L lookups, U distinct rows, D width of a table


@dataclass(frozen=True)
class RowGradient:
    """A gradient on some rows of one stack: each row once, in increasing order."""

    rows_U: Tensor
    values_UD: Tensor
    first_row: int | None = None
    """Set where the rows are consecutive from here on."""

    def __add__(self, other: RowGradient) -> RowGradient:
        rows_U, position = torch.unique(torch.cat([self.rows_U, other.rows_U]), return_inverse=True)
        values_UD = self.values_UD.new_zeros(rows_U.numel(), self.values_UD.shape[1])
        values_UD.index_add_(0, position, torch.cat([self.values_UD, other.values_UD]))
        return RowGradient(rows_U, values_UD)

    def empty(self) -> RowGradient:
        """Nothing, in the same shape and place."""
        return RowGradient(self.rows_U[:0], self.values_UD[:0])


def clipped_row_gradients(
    lookup: Lookup,
    factors_KB: Tensor,
    group_of_table: Sequence[int],
    row_mask: Tensor | None = None,
) -> list[RowGradient]:
    """sum_b f_b g_b on every row that some bag read, stack by stack of the layout.

    f_b is taken from the group that the row's table belongs to. With `row_mask` only rows that it
    keeps. A row that was read is listed even where its sum is zero: noise belongs on it whatever
    the gradient was.

    Guarantees: adding or removing example b changes the values of group k, over all its tables, by
    at most f_kb * n_kb in norm, with n_kb from `square_norms` of the same mask and tables. The same
    goes for a unit whose examples have one factor, with n_kb from `square_norms` of its leader.
    """
    layout, num_examples = lookup.layout, max(1, lookup.num_examples)
    row_L, bag_L, coefficient_L = lookup.row_L, lookup.bag_L, lookup.coefficient_L
    if row_mask is not None:
        kept = row_mask[row_L].nonzero().squeeze(1)
        row_L, bag_L = row_L[kept], bag_L[kept]
        coefficient_L = None if coefficient_L is None else coefficient_L[kept]
    row_L, order_L = torch.sort(row_L)
    row_U, count_U = torch.unique_consecutive(row_L, return_counts=True)
    start_U = count_U.cumsum(0) - count_U
    bag_L = bag_L[order_L]
    feature_L = bag_L // num_examples
    example_L = bag_L - feature_L * num_examples
    if len(factors_KB) == 1:
        weight_L = factors_KB[0][example_L]
    else:
        groups = [group_of_table[t] for t in layout.table_of_feature]
        weight_L = factors_KB[torch.tensor(groups, device=row_U.device)[feature_L], example_L]
    if coefficient_L is not None:
        weight_L = weight_L * coefficient_L[order_L]
    if len(layout.stacks) == 1:
        values, index_L = _by_bag(lookup.gradient_BE, layout, feature_L, example_L)
        return [RowGradient(row_U, _weighted_runs(values, index_L, start_U, weight_L))]
    starts = [stack.first_row for stack in layout.stacks]
    cuts = torch.searchsorted(row_U, torch.tensor(starts, device=row_U.device)).tolist()
    ends = [*start_U.tolist(), row_L.numel()]
    result = []
    for stack, (start, stop) in zip(layout.stacks, pairwise([*cuts, row_U.numel()])):
        here = slice(ends[start], ends[stop])
        values, index_L = _by_bag(
            lookup.gradient_BE, layout, feature_L[here], example_L[here], stack.tables
        )
        sums_UD = _weighted_runs(values, index_L, start_U[start:stop] - here.start, weight_L[here])
        result.append(RowGradient(row_U[start:stop] - stack.first_row, sums_UD))
    return result


def _by_bag(
    gradient_BE: Tensor,
    layout: Layout,
    feature_L: Tensor,
    example_L: Tensor,
    tables: range | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradients of these tables' bags, one to a row, and the row of each lookup's bag."""
    if tables is None:  # all, of one width: as they lie
        num_features, width = len(layout.table_of_feature), layout.widths[0]
        values = gradient_BE.view(len(gradient_BE) * num_features, width)
        return values, example_L * num_features + feature_L
    members = [f for f, table in enumerate(layout.table_of_feature) if table in tables]
    place = feature_L.new_zeros(len(layout.table_of_feature))
    place[members] = torch.arange(len(members), device=place.device)
    values = torch.cat([gradient_BE[:, layout.columns[f]] for f in members])
    return values, place[feature_L] * len(gradient_BE) + example_L


def _weighted_runs(values: Tensor, index_L: Tensor, start_U: Tensor, weight_L: Tensor) -> Tensor:
    """sum of weight_l * values[index_l] over each run of lookups, in one pass without copies.

    That is a bag of rows: PyTorch has a kernel for it.
    """
    if start_U.numel() == 0:
        return values.new_zeros(0, values.shape[1])
    return torch.nn.functional.embedding_bag(
        index_L, values, start_U, mode="sum", per_sample_weights=weight_L
    )

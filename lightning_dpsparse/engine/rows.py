"""The clipped gradient of the tables, row by row: what an update is made of."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lightning_dpsparse.engine.lookups import Lookup

# B examples, L lookups, U distinct rows, D width of a table


@dataclass(frozen=True)
class RowGradient:
    """A gradient on some rows of one table: each row once, in increasing order."""

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
    lookup: Lookup, factors_B: Tensor, row_mask: Tensor | None = None
) -> list[RowGradient]:
    """sum_b f_b g_b on every row that some bag read, table by table.

    With `row_mask` only rows that it keeps. A row that was read is listed even where its sum is
    zero: noise belongs on it whatever the gradient was.

    Guarantees: adding or removing example b changes the values, over all tables, by at most
    f_b * n_b in norm, with n_b from `square_norms` of the same mask.
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
    bounds = torch.searchsorted(row_U, torch.tensor(layout.first_row, device=row_U.device)).tolist()
    bag_L = bag_L[order_L]
    feature_L, example_L = bag_L // num_examples, bag_L % num_examples
    weight_L = factors_B[example_L]
    if coefficient_L is not None:
        weight_L = weight_L * coefficient_L[order_L]
    gradient_BE = lookup.gradient_BE
    if layout.is_uniform:
        features, width = len(layout.table_of_feature), layout.widths[0]
        by_bag = gradient_BE.view(len(gradient_BE) * features, width)
        values_UD = _weighted_runs(by_bag, example_L * features + feature_L, start_U, weight_L)
        return [
            RowGradient(row_U[start:stop] - layout.first_row[table], values_UD[start:stop])
            for table, (start, stop) in enumerate(pairwise(bounds))
        ]
    ends = [*start_U.tolist(), row_L.numel()]
    result = []
    for table, (start, stop) in enumerate(pairwise(bounds)):
        here = slice(ends[start], ends[stop])
        members = layout.features_of_table[table]
        by_bag = torch.cat([gradient_BE[:, layout.columns[f]] for f in members])
        place = torch.zeros(len(layout.table_of_feature), dtype=torch.int64, device=row_U.device)
        place[list(members)] = torch.arange(len(members), device=row_U.device)
        index_L = place[feature_L[here]] * len(gradient_BE) + example_L[here]
        values_UD = _weighted_runs(
            by_bag, index_L, start_U[start:stop] - here.start, weight_L[here]
        )
        result.append(RowGradient(row_U[start:stop] - layout.first_row[table], values_UD))
    return result


def _weighted_runs(values: Tensor, index_L: Tensor, start_U: Tensor, weight_L: Tensor) -> Tensor:
    """sum of weight_l * values[index_l] over each run of lookups, in one pass without copies.

    That is a bag of rows: PyTorch has a kernel for it.
    """
    if start_U.numel() == 0:
        return values.new_zeros(0, values.shape[1])
    return torch.nn.functional.embedding_bag(
        index_L, values, start_U, mode="sum", per_sample_weights=weight_L
    )

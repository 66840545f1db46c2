"""The clipped gradient of the tables, row by row: what an update is made of.

A batch reads few of a table's rows, so the clipped sum is computed on these rows only and kept as
rows with values: `RowGradient`. It comes from the gradients of the bags, without a gradient for
each lookup: lookups are sorted by row (`lookups.py`), and each row adds up its own in one pass.

Read next: `norms.py`, the norms that bound these sums; `state.py`, where the rows get their noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lightning_dpsparse.engine.lookups import Bags, Lookup, LookupsByRow

# B examples, K groups, L lookups, U distinct rows, D width of a table


@dataclass(frozen=True)
class RowGradient:
    """A gradient on some rows of one stack: each row once, in increasing order."""

    rows_U: Tensor
    values_UD: Tensor
    first_row: int | None = None
    """The first row, if the rows are known to be consecutive; None if they are not."""

    @property
    def rows(self) -> Tensor | slice:
        """The rows, as a slice if they are known to be consecutive."""
        if self.first_row is None:
            return self.rows_U
        return slice(self.first_row, self.first_row + self.rows_U.numel())

    def __add__(self, other: RowGradient) -> RowGradient:
        rows_U, position = torch.unique(torch.cat([self.rows_U, other.rows_U]), return_inverse=True)
        values_UD = self.values_UD.new_zeros(rows_U.numel(), self.values_UD.shape[1])
        values_UD.index_add_(0, position, torch.cat([self.values_UD, other.values_UD]))
        return RowGradient(rows_U, values_UD)

    def with_rows(self, unread_rows_V: Tensor) -> RowGradient:
        """Return the same with more rows (sorted, none of them here yet), which have zeros."""
        if unread_rows_V.numel() == 0:
            return self
        count = self.rows_U.numel() + unread_rows_V.numel()
        if count == unread_rows_V.numel():
            return RowGradient(
                unread_rows_V, self.values_UD.new_zeros(count, self.values_UD.shape[1])
            )
        at_U = torch.searchsorted(unread_rows_V, self.rows_U)
        at_U += torch.arange(at_U.numel(), device=at_U.device)
        at_V = torch.searchsorted(self.rows_U, unread_rows_V)
        at_V += torch.arange(at_V.numel(), device=at_V.device)
        rows = self.rows_U.new_empty(count)
        rows[at_U], rows[at_V] = self.rows_U, unread_rows_V
        values = self.values_UD.new_zeros(count, self.values_UD.shape[1])
        return RowGradient(rows, values.index_copy_(0, at_U, self.values_UD))

    def empty(self) -> RowGradient:
        """Return a gradient on no rows, with the same width and on the same device."""
        return RowGradient(self.rows_U[:0], self.values_UD[:0])


def clipped_row_gradients(
    lookup: Lookup,
    factors_KB: Tensor,
    group_of_table: Sequence[int],
    kept: LookupsByRow | None = None,
) -> list[RowGradient]:
    """Compute sum_b f_b g_b on every row that some bag read, for each stack of the layout.

    f_b is taken from the group that the row's table belongs to. With `kept`, only these rows are
    listed. A row that was read is listed even if its sum is zero: it gets noise whatever the
    gradient was.

    Guarantees: adding or removing example b changes the values of group k, over all its tables, by
    at most f_kb * n_kb in norm, with n_kb from `square_norms` of the same rows and tables. The same
    goes for a unit whose examples have one factor, with n_kb from `square_norms` at the first
    example of the unit.
    """
    bags, layout, num_examples = lookup.bags, lookup.layout, max(1, lookup.num_examples)
    runs = bags.runs if kept is None else kept
    if runs.row_U.numel() == 0:
        widths = [layout.widths[stack.tables.start] for stack in layout.stacks]
        return [RowGradient(runs.row_U, lookup.gradient.new_zeros(0, w)) for w in widths]
    row_U, start_U, order_L = runs.row_U, runs.start_U, runs.order_L
    bag_L = bags.bag_L[order_L]
    feature_L = bag_L // num_examples
    example_L = bag_L - feature_L * num_examples
    if len(factors_KB) == 1:
        weight_L = factors_KB[0][example_L]
    else:
        groups = [group_of_table[t] for t in layout.table_of_feature]
        weight_L = factors_KB[torch.tensor(groups, device=row_U.device)[feature_L], example_L]
    if lookup.coefficient_L is not None:
        weight_L = weight_L * lookup.coefficient_L[order_L]
    if len(layout.stacks) == 1:
        values, index_L = _by_bag(lookup, order_L, feature_L, example_L)
        return [RowGradient(row_U, weighted_runs(values, index_L, start_U, weight_L))]
    cuts = layout.cuts_of(row_U)
    ends = [*start_U.tolist(), order_L.numel()]
    result = []
    for stack, (start, stop) in zip(layout.stacks, pairwise(cuts)):
        here = slice(ends[start], ends[stop])
        values, index_L = _by_bag(
            lookup, order_L[here], feature_L[here], example_L[here], stack.tables
        )
        sums_UD = weighted_runs(values, index_L, start_U[start:stop] - here.start, weight_L[here])
        result.append(RowGradient(row_U[start:stop] - stack.first_row, sums_UD))
    return result


def _by_bag(
    lookup: Lookup,
    order_L: Tensor,
    feature_L: Tensor,
    example_L: Tensor,
    tables: range | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of these tables' bags, one per row, and the row of each lookup's bag."""
    gradient_BE, layout = lookup.gradient, lookup.layout
    if not layout.is_pooled:  # every lookup has a row of its own
        return lookup.gradient, order_L
    if tables is None:  # all tables have one width, so nothing is copied
        num_features, width = len(layout.table_of_feature), layout.widths[0]
        values = gradient_BE.view(len(gradient_BE) * num_features, width)
        return values, example_L * num_features + feature_L
    members = [f for f, table in enumerate(layout.table_of_feature) if table in tables]
    place = feature_L.new_zeros(len(layout.table_of_feature))
    place[members] = torch.arange(len(members), device=place.device)
    values = torch.cat([gradient_BE[:, layout.columns[f]] for f in members])
    return values, place[feature_L] * len(gradient_BE) + example_L


def add_to_bags(output_BE: Tensor, bags: Bags, rows_of_stacks: list[Tensor]) -> None:
    """Change an output as if values had been added to the distinct rows of every stack before.

    `rows_of_stacks` holds these values. The output is changed in place; of sequences it is (L, D).
    """
    layout, size = bags.layout, bags.num_examples
    position_L, num_features = bags.runs.position_L, len(layout.table_of_feature)
    if not layout.is_pooled:
        output_BE += torch.cat(rows_of_stacks)[position_L]
    elif len(layout.stacks) == 1 and bags.is_one_hot and bags.weights_L is None:
        position_BF = position_L.view(num_features, size).T
        output_BE += torch.nn.functional.embedding(position_BF, rows_of_stacks[0]).flatten(1)
    elif len(layout.stacks) == 1:
        pooled = _pooled(bags, slice(None), position_L, bags.offsets, rows_of_stacks[0])
        output_BE += pooled.view(num_features, size, -1).transpose(0, 1).flatten(1)
    else:
        ends_F = bags.offsets[::size].tolist()
        stack_of = [s for s, stack in enumerate(layout.stacks) for _ in stack.tables]
        for feature, table in enumerate(layout.table_of_feature):
            stack, here = stack_of[table], slice(ends_F[feature], ends_F[feature + 1])
            offsets = bags.offsets[feature * size : (feature + 1) * size + 1] - here.start
            position = position_L[here] - bags.cuts[stack]
            output_BE[:, layout.columns[feature]] += _pooled(
                bags, here, position, offsets, rows_of_stacks[stack]
            )


def _pooled(bags: Bags, here: slice, index: Tensor, offsets: Tensor, rows_UD: Tensor) -> Tensor:
    """Pool some of the bags, with `rows_UD` in place of the tables' rows."""
    return torch.nn.functional.embedding_bag(
        index,
        rows_UD,
        offsets[:-1],
        mode="mean" if bags.layout.is_mean else "sum",
        per_sample_weights=None if bags.weights_L is None else bags.weights_L[here],
    )


def add_to_rows(weight_RD: Tensor, rows_U: Tensor, values_UD: Tensor) -> None:
    """Compute weight[rows] += values in place. Every row occurs at most once."""
    # The index repeats along every row: this is PyTorch's fastest way to add to rows.
    weight_RD.scatter_add_(0, rows_U[:, None].expand_as(values_UD), values_UD)


def found_in(sorted_R: Tensor, values_V: Tensor) -> Tensor:
    """Return which of the values are among the sorted rows."""
    if sorted_R.numel() == 0:
        return torch.zeros_like(values_V, dtype=torch.bool)
    at_V = torch.searchsorted(sorted_R, values_V).clamp_max_(sorted_R.numel() - 1)
    return sorted_R[at_V] == values_V


def weighted_runs(values: Tensor, index_L: Tensor, start_U: Tensor, weight_L: Tensor) -> Tensor:
    """Compute the sum of weight_l * values[index_l] over each run of lookups.

    Each run is a bag of rows, so PyTorch's kernel for bags does it in one pass without copies.
    """
    if start_U.numel() == 0:
        return values.new_zeros(0, values.shape[1])
    return torch.nn.functional.embedding_bag(
        index_L, values, start_U, mode="sum", per_sample_weights=weight_L
    )

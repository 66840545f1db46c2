"""The clipped gradient of the tables, row by row: what an update is made of."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lightning_dpsparse.engine.lookups import Layout, Lookup

# B examples, L lookups, U distinct rows, D width of a table


@dataclass(frozen=True)
class RowGradient:
    """A gradient on some rows of one table: each row once, in increasing order."""

    rows_U: Tensor
    values_UD: Tensor


def clipped_row_gradients(
    lookup: Lookup, factors_B: Tensor, row_mask: Tensor | None = None
) -> list[RowGradient]:
    """sum_b f_b g_b on every row that some bag read, table by table.

    With `row_mask` only rows that it keeps. A row that was read is listed even where its sum is
    zero: noise belongs on it whatever the gradient was.

    Guarantees: adding or removing example b changes the values, over all tables, by at most
    f_b * n_b in norm, with n_b from `square_norms` of the same mask.
    """
    layout = lookup.layout
    coefficient_L = lookup.coefficient_L
    row_L, bag_L = lookup.row_L, lookup.bag_L
    if row_mask is not None:
        kept = row_mask[row_L].nonzero().squeeze(1)
        row_L, bag_L = row_L[kept], bag_L[kept]
        coefficient_L = None if coefficient_L is None else coefficient_L[kept]
    row_U, position_L = torch.unique(row_L, return_inverse=True)
    bounds = torch.searchsorted(row_U, torch.tensor(layout.first_row, device=row_U.device)).tolist()
    if layout.is_uniform:
        values_LD = _scaled_by_bag(lookup.gradient_BE, factors_B, layout)
        if not lookup.is_one_hot or row_mask is not None:
            values_LD = values_LD[bag_L]
        if coefficient_L is not None:
            values_LD = values_LD * coefficient_L[:, None]
        values_UD = values_LD.new_zeros(row_U.numel(), values_LD.shape[1])
        values_UD.index_add_(0, position_L, values_LD)
        return [
            RowGradient(row_U[start:stop] - layout.first_row[table], values_UD[start:stop])
            for table, (start, stop) in enumerate(pairwise(bounds))
        ]
    scaled_BE = lookup.gradient_BE * factors_B[:, None]
    return [
        _of_table(
            scaled_BE, lookup, table, row_U[start:stop], position_L - start, bag_L, coefficient_L
        )
        for table, (start, stop) in enumerate(pairwise(bounds))
    ]


def _scaled_by_bag(gradient_BE: Tensor, factors_B: Tensor, layout: Layout) -> Tensor:
    """f_b G of each bag, (F * B, D), where all tables have width D. One pass over the gradient."""
    examples, features, width = len(gradient_BE), len(layout.table_of_feature), layout.widths[0]
    scaled_FBD = gradient_BE.new_empty(features, examples, width)
    by_feature = gradient_BE.view(examples, features, width).transpose(0, 1)
    torch.mul(by_feature, factors_B[:, None], out=scaled_FBD)
    return scaled_FBD.view(features * examples, width)


def _of_table(
    scaled_BE: Tensor,
    lookup: Lookup,
    table: int,
    row_U: Tensor,
    position_L: Tensor,
    bag_L: Tensor,
    coefficient_L: Tensor | None,
) -> RowGradient:
    layout, num_examples = lookup.layout, max(1, lookup.num_examples)
    values_UD = scaled_BE.new_zeros(row_U.numel(), layout.widths[table])
    feature_L = bag_L // num_examples
    for feature in layout.features_of_table[table]:
        here = (feature_L == feature).nonzero().squeeze(1)
        value = scaled_BE[:, layout.columns[feature]][bag_L[here] % num_examples]
        if coefficient_L is not None:
            value = value * coefficient_L[here, None]
        values_UD.index_add_(0, position_L[here], value)
    return RowGradient(row_U - layout.first_row[table], values_UD)

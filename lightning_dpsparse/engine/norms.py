"""Exact norms of every example's or user's embedding gradient, without building it.

The gradient of example b on row r is the sum over b's lookups of r of coefficient * G, where G is
the gradient of the bag that the lookup fed, or of its own row in a sequence. Lookups of one row add
up *before* they are squared: three hits on a row weigh 9, not 3, and features that share a table
meet on its rows. Where users are protected, the examples of one user add up in the same way.

Read next: `rows.py`, the clipped sums that these norms bound; `clipping.py`, the factors.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

from lightning_dpsparse.engine.lookups import Lookup, LookupsByRow

# B examples, F features, L lookups, E width of all features, D width of a table, U (unit, row)s

ROUNDING = torch.finfo(torch.float32).eps


_UNSEEN = 2.0**-63
"""The square of a number below this is below the smallest normal number of float32."""


def norms_of(values: Tensor) -> Tensor:
    """Compute norms over the last dimension, raised to what squares of small numbers may hide.

    A gradient of 1e-23 squares to zero in float32, but multiplied by an input of 1e18 it counts.
    """
    least = _UNSEEN * math.sqrt(values.shape[-1])
    return torch.linalg.vector_norm(values, dim=-1).clamp_min_(least)


def square_norms(
    lookup: Lookup,
    kept: LookupsByRow | None = None,
    tables: Collection[int] | None = None,
    first_of_unit_B: Tensor | None = None,
) -> Tensor:
    """Compute the squared norm of every example's gradient on the kernel's rows, (B,).

    n_b^2 = sum over rows r of || sum over lookups l of r by b of c_l G_l ||^2

    With `kept`, only these rows count; with `tables`, only these tables. With `first_of_unit_B`,
    the first example of every example's unit, b is a unit: its square stands at the first example
    of its unit, and all other examples have zero.
    """
    layout = lookup.layout
    chosen = range(len(layout.widths)) if tables is None else tables
    if first_of_unit_B is None and kept is not None and _is_simple(lookup, chosen):
        return _of_single_ids(lookup, kept)
    coefficient_L = lookup.kept_coefficient(kept)
    if first_of_unit_B is not None or not layout.is_pooled:  # a unit has several G per feature
        squares_B = lookup.gradient.new_zeros(lookup.num_examples)
        for table in chosen:
            squares_B += _by_row(lookup, coefficient_L, table, first_of_unit_B)
        return squares_B
    alone = [
        layout.features_of_table[t][0] for t in chosen if len(layout.features_of_table[t]) == 1
    ]
    shared = [t for t in chosen if len(layout.features_of_table[t]) > 1]
    all_alone = len(alone) == len(layout.table_of_feature)
    if all_alone and lookup.bags.is_one_hot and coefficient_L is None:
        return torch.linalg.vector_norm(lookup.gradient, dim=1).square_()
    squares_B = _of_unshared(lookup, coefficient_L, alone)
    for table in shared:
        squares_B += _by_row(lookup, coefficient_L, table)
    return squares_B


def _is_simple(lookup: Lookup, tables: Collection[int]) -> bool:
    """Whether examples read one id per table, and all tables count, pooled and of one width."""
    widths = lookup.layout.widths
    return (
        lookup.layout.is_pooled
        and lookup.bags.reads_every_table_once
        and len(tables) == len(widths)
        and len(set(widths)) == 1
    )


def _of_single_ids(lookup: Lookup, kept: LookupsByRow) -> Tensor:
    """Add up the squares of lookups of kept rows, where an example reads no row twice."""
    squares_B = lookup.gradient.new_zeros(lookup.num_examples)
    if kept.order_L.numel() == 0:
        return squares_B
    num_features = len(lookup.layout.table_of_feature)
    feature_L = kept.order_L // lookup.num_examples  # a bag holds one id: a lookup is its bag
    example_L = kept.order_L - feature_L * lookup.num_examples
    by_bag = lookup.gradient.view(lookup.num_examples * num_features, -1)
    value_LD = by_bag.index_select(0, example_L * num_features + feature_L)
    if lookup.coefficient_L is None:
        squares_L = torch.linalg.vector_norm(value_LD, dim=1).square_()
    else:
        squares_L = norms_of(value_LD).mul_(lookup.coefficient_L[kept.order_L]).square_()
    return squares_B.index_add_(0, example_L, squares_L)


def _of_unshared(lookup: Lookup, coefficient_L: Tensor | None, features: list[int]) -> Tensor:
    """Compute the squares of features with a table of their own.

    A bag has one G, so n^2 = ||G||^2 sum_r (sum_l c_l)^2.
    """
    gradient_BE = lookup.gradient
    squares_B = gradient_BE.new_zeros(lookup.num_examples)
    if not features:
        return squares_B
    weight_FB = _row_weights(lookup, coefficient_L).view(
        len(lookup.layout.table_of_feature), lookup.num_examples
    )
    for feature in features:
        part_BD = gradient_BE[:, lookup.layout.columns[feature]]
        squares_B += norms_of(part_BD).mul_(weight_FB[feature].sqrt()).square_()
    return squares_B


def _row_weights(lookup: Lookup, coefficient_L: Tensor | None) -> Tensor:
    """Compute the sum over rows of (sum of the row's coefficients)^2 for every bag, (F * B,).

    The weights of a bag may have any sign and may cancel: see `not_below_rounding`.
    """
    num_bags, dtype = lookup.bags.lengths.numel(), lookup.gradient.dtype
    if coefficient_L is None:
        coefficient_L = lookup.gradient.new_ones(lookup.bags.ids_L.numel())
    if lookup.bags.is_one_hot:
        return coefficient_L.to(dtype).square()
    if lookup.bags.weights_L is not None:
        coefficient_L = coefficient_L.double()
    # Sorted by row, a bag's lookups of one row are neighbours. U counts the pairs of row and bag.
    runs, order_L = lookup.bags.runs, lookup.bags.runs.order_L
    bag_L = lookup.bags.bag_L[order_L]
    is_first_L = torch.ones_like(bag_L)
    is_first_L[1:] = bag_L[1:] != bag_L[:-1]
    is_first_L[runs.start_U] = 1
    sum_U = coefficient_L.new_zeros(bag_L.numel())  # U is at most L
    sum_U.index_add_(0, is_first_L.cumsum(0).sub_(1), coefficient_L[order_L])
    bag_U = bag_L[is_first_L.bool()]
    weights = sum_U.new_zeros(num_bags).index_add_(0, bag_U, sum_U[: bag_U.numel()].square_())
    if lookup.bags.weights_L is None:
        return weights
    terms_L1 = coefficient_L.square()[:, None]
    return not_below_rounding(weights, terms_L1, lookup.bags.bag_L).to(dtype)


def _by_row(
    lookup: Lookup, coefficient_L: Tensor | None, table: int, first_of_unit_B: Tensor | None = None
) -> Tensor:
    """Compute the squares on a table where features or examples meet: they are added by row."""
    features = lookup.layout.features_of_table[table]
    num_examples, num_rows = lookup.num_examples, lookup.layout.num_rows[table]
    keys, values = [], []
    for feature in features:
        first, last = feature * num_examples, (feature + 1) * num_examples
        here = slice(int(lookup.bags.offsets[first]), int(lookup.bags.offsets[last]))
        example = lookup.bags.bag_L[here] - first
        value = lookup.values_of(feature, example, here)
        if coefficient_L is not None:
            value = value * coefficient_L[here, None]
        unit = example if first_of_unit_B is None else first_of_unit_B[example]
        keys.append(unit * num_rows + lookup.bags.ids_L[here])
        values.append(value)
    return row_square_norms(torch.cat(keys), torch.cat(values), num_rows, num_examples)


def row_square_norms(key_L: Tensor, value_LD: Tensor, num_rows: int, num_examples: int) -> Tensor:
    """Compute the sum over rows of || sum of a unit's values on the row ||^2, (B,).

    A key is unit * num_rows + row. Values of a unit's examples, features or positions may cancel,
    so they are added in float64.
    """
    value_LD, dtype = value_LD.double(), value_LD.dtype
    key_U, position_L = torch.unique(key_L, return_inverse=True)
    sum_UD = value_LD.new_zeros(key_U.numel(), value_LD.shape[1]).index_add_(
        0, position_L, value_LD
    )
    squares_U = torch.linalg.vector_norm(sum_UD, dim=1).square_()
    squares_B = value_LD.new_zeros(num_examples).index_add_(0, key_U // num_rows, squares_U)
    terms_L1 = value_LD.square().sum(1, keepdim=True)
    return not_below_rounding(squares_B, terms_L1, key_L // num_rows).to(dtype)


def not_below_rounding(squares_B: Tensor, terms_LT: Tensor, unit_L: Tensor | None = None) -> Tensor:
    """Raise squared norms of sums to what rounding may hide: eps (sum of the terms' norms)^2.

    `terms_LT` holds the squared norms of the terms. Row l has those of example l, or of the unit
    unit_L[l].

    Examples of a user can cancel, and so can positions of a sequence, or features that share a
    table. In a clipped sum their terms are still added one by one, and leave errors of their own
    size. A norm of at least sqrt(eps) sum_l ||v_l|| keeps every clipped term below C / sqrt(eps),
    and so its rounding error below sqrt(eps) C. The same holds for numbers that are added before
    the term is cancelled. These are few, because the terms of a unit are added side by side. Norms
    that do not cancel to that degree stay as they are.

    In place of the sum of norms, the root of (number of terms) * (sum of squares) is used, which is
    at least as large. Zeros are not counted: sequences are padded to the longest of the batch, and
    an example's norm must not depend on another's length. eps is that of float32. Sums that may
    cancel are made in float64, so that the error of their squares is 1e-9 of this bound, and not as
    large as the bound itself.
    """
    total_L, count_L = terms_LT.sum(1), terms_LT.count_nonzero(1).to(terms_LT.dtype)
    if unit_L is not None:
        total_L, count_L = (
            torch.zeros_like(squares_B).index_add_(0, unit_L, value) for value in (total_L, count_L)
        )
    return squares_B.maximum(total_L * count_L * ROUNDING)

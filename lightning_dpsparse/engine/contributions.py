"""Who read which row: every pair of a unit and a row counts once, however often it was read.

A mechanism that chooses rows by how many units read them must bound what one unit can add to these
counts. Unit b has the indicator vector v_b, which is one on every row that the unit read. Its norm
has to be clipped, and noise is added to the weighted sum of these vectors. Neither needs a vector
as long as a table. `pair_norms` computes the norm of the unit's gradient on the row of each pair.

Read next: `mechanisms/adafest.py`, which uses the counts; `mechanisms/exponential.py`, the norms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_dpsparse.engine.lookups import Bags, Lookup

# B examples, L lookups, U distinct rows, P pairs of a unit and a row, D width of a table


class Contributions(Protocol):
    """The indicator vectors v_b of all units, over the rows of one kernel that anybody read."""

    def square_norms(self, counts_U: Tensor | None = None) -> Tensor:
        """Compute ||v_b||^2, the number of rows that each unit read, (B,).

        With `counts_U`, a mask over the rows, only rows where it is true are counted.
        """
        ...

    def sums(self, weight_B: Tensor) -> Tensor:
        """Compute sum_b w_b v_b, (U,)."""
        ...


@dataclass(frozen=True)
class Pairs:
    """Contributions as a list of pairs: one entry for every unit and row that the unit read."""

    position_P: Tensor
    """Position of the row of each pair in `bags.runs.row_U`."""
    unit_P: Tensor
    """The unit of each pair: the index of the first example of that unit."""
    num_rows: int
    num_examples: int

    def square_norms(self, counts_U: Tensor | None = None) -> Tensor:
        unit_P = self.unit_P if counts_U is None else self.unit_P[counts_U[self.position_P]]
        return torch.bincount(unit_P, minlength=self.num_examples)

    def sums(self, weight_B: Tensor) -> Tensor:
        sums_U = weight_B.new_zeros(self.num_rows)
        return sums_U.index_add_(0, self.position_P, weight_B[self.unit_P])


@dataclass(frozen=True)
class OneEach:
    """Contributions where every example read one row of every table, so that counts are known."""

    bags: Bags

    def square_norms(self, counts_U: Tensor | None = None) -> Tensor:
        if counts_U is not None:
            return self._pairs().square_norms(counts_U)
        count = len(self.bags.layout.widths)
        return self.bags.offsets.new_full((self.bags.num_examples,), count)

    def sums(self, weight_B: Tensor) -> Tensor:
        least, most = weight_B.aminmax()
        if bool(least != most):
            return self._pairs().sums(weight_B)
        return self.bags.runs.count_U * least

    def _pairs(self) -> Pairs:
        return _pairs(self.bags, None)


def contributions(
    bags: Bags, first_of_unit_B: Tensor | None = None, among_U: Tensor | None = None
) -> Contributions:
    """Return the contributions to all rows that were read, or to those where `among_U` is true."""
    if bags.reads_every_table_once and first_of_unit_B is None and among_U is None:
        return OneEach(bags)
    pairs = _pairs(bags, first_of_unit_B)
    if among_U is None:
        return pairs
    among_P = among_U[pairs.position_P]
    return replace(pairs, position_P=pairs.position_P[among_P], unit_P=pairs.unit_P[among_P])


def _pairs(bags: Bags, first_of_unit_B: Tensor | None) -> Pairs:
    position_L, unit_L = _in_order(bags, first_of_unit_B)
    if not bags.reads_every_table_once or first_of_unit_B is not None:
        size = max(1, bags.num_examples)
        key_P = torch.unique(position_L * size + unit_L)
        position_L = key_P // size
        unit_L = key_P - position_L * size
    return Pairs(position_L, unit_L, bags.runs.row_U.numel(), bags.num_examples)


def _in_order(bags: Bags, first_of_unit_B: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the row (its position in `row_U`) and the unit of every lookup, sorted by row."""
    example_L = bags.bag_L[bags.runs.order_L] % max(1, bags.num_examples)
    unit_L = example_L if first_of_unit_B is None else first_of_unit_B[example_L]
    return bags.runs.sorted_position_L, unit_L


class PairNorms(NamedTuple):
    """The norm || g_b on row r || for every pair of a unit b and a row r that the unit read."""

    position_P: Tensor
    unit_P: Tensor
    norm_P: Tensor


def pair_norms(lookup: Lookup, first_of_unit_B: Tensor | None = None) -> PairNorms:
    """Compute the norm of every unit's gradient on every row that the unit read.

    Lookups of one row by one unit add up before their norm is taken.
    """
    bags, layout = lookup.bags, lookup.layout
    position_L, unit_L = _in_order(bags, first_of_unit_B)
    if layout.is_pooled and bags.reads_every_table_once and first_of_unit_B is None:
        norms = [
            torch.linalg.vector_norm(lookup.gradient[:, columns], dim=1)
            for columns in layout.columns
        ]
        norm_L = torch.cat(norms)
        if lookup.coefficient_L is not None:
            norm_L *= lookup.coefficient_L.abs()
        return PairNorms(position_L, unit_L, norm_L[bags.runs.order_L])
    # The lookups are sorted by row, so those of one table lie side by side.
    rows_before = torch.searchsorted(
        bags.runs.row_U, bags.runs.row_U.new_tensor(layout.first_row)
    ).tolist()
    begins = [*bags.runs.start_U.tolist(), bags.runs.order_L.numel()]
    found = [
        _of_table(lookup, table, slice(begins[start], begins[stop]), position_L, unit_L)
        for table, (start, stop) in enumerate(pairwise(rows_before))
    ]
    return PairNorms(*(torch.cat(parts) for parts in zip(*found)))


def _of_table(
    lookup: Lookup, table: int, here: slice, position_L: Tensor, unit_L: Tensor
) -> PairNorms:
    bags, size = lookup.bags, max(1, lookup.num_examples)
    key_P, pair_L = torch.unique(position_L[here] * size + unit_L[here], return_inverse=True)
    order_L = bags.runs.order_L[here]
    feature_L = bags.bag_L[order_L] // size
    example_L = bags.bag_L[order_L] - feature_L * size
    value_LD = lookup.gradient.new_empty(order_L.numel(), lookup.layout.widths[table])
    for feature in lookup.layout.features_of_table[table]:
        of_feature = (feature_L == feature).nonzero().squeeze(1)
        value_LD[of_feature] = lookup.values_of(feature, example_L[of_feature], order_L[of_feature])
    if lookup.coefficient_L is not None:
        value_LD *= lookup.coefficient_L[order_L, None]
    sum_PD = value_LD.new_zeros(key_P.numel(), value_LD.shape[1]).index_add_(0, pair_L, value_LD)
    position_P = key_P // size
    return PairNorms(position_P, key_P - position_P * size, torch.linalg.vector_norm(sum_PD, dim=1))

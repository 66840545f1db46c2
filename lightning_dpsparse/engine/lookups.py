"""What one embedding kernel reads in a step, and the gradient that comes back to it.

A kernel holds this rank's part of several tables and reads rows of them for the examples of all
ranks. `Layout` says how its tables and features lie, `Bags` which ids are read, and `Lookup` adds
the gradients. An id names a row within its table's piece. Most work uses one numbering for all
tables of the kernel: the rows of the first table come first, then those of the second, and so on.

Read next: `norms.py` and `rows.py`, which compute norms and clipped sums from a `Lookup`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

# B examples of all ranks, F features, T tables, L lookups, E width of all features side by side,
# D width of one table, U distinct rows, l some of the lookups


@dataclass(frozen=True)
class Stack:
    """Neighbouring tables of one width as one matrix, with one numbering for all their rows."""

    tables: range
    first_row: int
    """Number of the stack's first row, with one numbering for all tables of the kernel."""
    starts: tuple[int, ...]
    """First row of each table within the stack, and after the last one the end of the stack."""

    @property
    def num_rows(self) -> int:
        return self.starts[-1]

    def bounds(self, rows_U: Tensor) -> list[int]:
        """Find where each table begins among these sorted rows of the stack, and where all end."""
        if len(self.tables) == 1:
            return [0, rows_U.numel()]
        return _bounds(rows_U, self.starts)


@dataclass(frozen=True)
class Layout:
    """How a kernel lays out its features and tables. It does not change during a run."""

    table_of_feature: tuple[int, ...]
    widths: tuple[int, ...]
    """Number of columns of each table on this rank."""
    num_rows: tuple[int, ...]
    """Number of rows of each table on this rank."""
    is_mean: bool = False
    """Whether the kernel itself divides a bag by its length."""
    is_stacked: bool = False
    """Whether neighbouring tables of one width are updated as one matrix, in fewer calls."""
    is_pooled: bool = True
    """Whether a bag's rows are added up. If not, the output has one row for every lookup, in the
    order of the lookups, and all tables have one width. Such output is called sequences."""

    @cached_property
    def columns(self) -> tuple[slice, ...]:
        """The columns of each feature in the kernel's output."""
        slices, start = [], 0
        for table in self.table_of_feature:
            slices.append(slice(start, start + self.widths[table]))
            start += self.widths[table]
        return tuple(slices)

    @cached_property
    def features_of_table(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(f for f, t in enumerate(self.table_of_feature) if t == table)
            for table in range(len(self.widths))
        )

    @property
    def shares_tables(self) -> bool:
        """Whether two or more features read the same table."""
        return len(self.table_of_feature) > len(set(self.table_of_feature))

    @cached_property
    def has_feature_by_table(self) -> bool:
        """Whether every table has one feature, and features are in the order of their tables."""
        return self.table_of_feature == tuple(range(len(self.widths)))

    @cached_property
    def first_row(self) -> tuple[int, ...]:
        """First row of each table, and the end, with one numbering for all tables of the kernel."""
        starts = [0]
        for rows in self.num_rows:
            starts.append(starts[-1] + rows)
        return tuple(starts)

    @cached_property
    def first_row_of_feature(self) -> Tensor:
        """First row of each feature's table, with one numbering for all tables of the kernel."""
        return torch.tensor([self.first_row[t] for t in self.table_of_feature])

    @cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """The stacks that are updated one by one. A stack may be a single table."""
        ends = [
            t + 1
            for t, width in enumerate(self.widths)
            if not self.is_stacked or self.widths[t + 1 : t + 2] != (width,)
        ]
        stacks = []
        for start, stop in pairwise([0, *ends]):
            first = self.first_row[start]
            starts = tuple(row - first for row in self.first_row[start : stop + 1])
            stacks.append(Stack(range(start, stop), first, starts))
        return tuple(stacks)

    def stream_table(self, tables: range) -> int:
        """Find the first of these tables that has rows on this rank.

        No other rank holds these rows, so a stream that is named after them is this rank's alone.
        A piece without rows cannot name one: it may begin at the same place on several ranks.
        """
        return next((t for t in tables if self.num_rows[t]), tables.start)

    def cuts_of(self, row_U: Tensor) -> list[int]:
        """Find where each stack's rows begin among these sorted rows, and where all end."""
        if len(self.stacks) == 1:
            return [0, row_U.numel()]
        return [*_bounds(row_U, [stack.first_row for stack in self.stacks]), row_U.numel()]

    def by_stack(self, row_U: Tensor, cuts: list[int] | None = None) -> list[Tensor]:
        """Turn sorted rows of the kernel into sorted rows of each of its stacks."""
        cuts = self.cuts_of(row_U) if cuts is None else cuts
        return [
            row_U[start:stop] - stack.first_row if stack.first_row else row_U[start:stop]
            for stack, (start, stop) in zip(self.stacks, pairwise(cuts))
        ]


@dataclass(frozen=True)
class LookupsByRow:
    """The lookups of some bags by row: a row is listed once, and its lookups lie side by side."""

    row_U: Tensor
    """Rows that were read, increasing, with one numbering for all tables of the kernel."""
    count_U: Tensor
    """Number of lookups of each row."""
    order_L: Tensor
    """The lookups, sorted by row; lookups of one row are sorted by their example."""
    sorted_position_L: Tensor
    """Position in `row_U` of the row of each of the sorted lookups."""

    @cached_property
    def start_U(self) -> Tensor:
        """Position in `order_L` where each row's lookups begin."""
        return self.count_U.cumsum(0).sub_(self.count_U)

    @cached_property
    def position_L(self) -> Tensor:
        """Position in `row_U` of the row of each lookup, in the order of the bags."""
        return torch.empty_like(self.order_L).scatter_(0, self.order_L, self.sorted_position_L)

    def only(self, keep_U: Tensor) -> LookupsByRow:
        """Return these rows alone, with their lookups.

        It looks at all rows once; all other work is on the rows that are kept.
        """
        kept_K = keep_U.nonzero().squeeze(1)
        if kept_K.numel() == 0:  # often none passes a threshold
            return LookupsByRow(kept_K, kept_K, kept_K, kept_K)
        count_K = self.count_U[kept_K]
        position_L = torch.repeat_interleave(count_K)
        shift_K = self.start_U[kept_K] - (count_K.cumsum(0) - count_K)
        at_L = shift_K[position_L]
        at_L += torch.arange(at_L.numel(), device=at_L.device)
        return LookupsByRow(self.row_U[kept_K], count_K, self.order_L[at_L], position_L)


def by_row(row_L: Tensor, pieces: int = 1) -> LookupsByRow:
    """Sort lookups by row.

    `pieces` may exceed one if the lookups are that many pieces of equal length, and all rows of a
    piece come before those of the next. The pieces are then sorted one by one.
    """
    sorted_L, order_L = _stable_sort(row_L, pieces)
    row_U, position_L, count_U = torch.unique_consecutive(
        sorted_L, return_inverse=True, return_counts=True
    )
    return LookupsByRow(row_U, count_U, order_L, position_L)


_MANY = 1 << 16
"""Up to this many numbers, numpy was measured to sort faster on CPUs than PyTorch's radix sort."""


def _stable_sort(row_L: Tensor, pieces: int) -> tuple[Tensor, Tensor]:
    """Sort rows in the fastest way. Return them, and the position that each came from."""
    bits = row_L.numel().bit_length()
    if row_L.device.type != "cpu" or row_L.numel() > _MANY:
        sorted_L, order_L = torch.sort(row_L, stable=True)
        return sorted_L, order_L
    # A row and its position are packed into one number. No two such numbers are equal, and numpy's
    # vectorised sort of them takes a third to half of the time of PyTorch's sort with positions.
    packed_L = (row_L << bits).bitwise_or_(torch.arange(row_L.numel()))
    packed_L = torch.from_numpy(np.sort(packed_L.view(pieces, -1).numpy(), axis=1)).view(-1)
    return packed_L >> bits, packed_L & ((1 << bits) - 1)


@dataclass(frozen=True)
class Bags:
    """The ids that one kernel reads. Bag f * B + b holds feature f of example b."""

    layout: Layout
    ids_L: Tensor
    """The row that each lookup reads, within its table's piece on this rank."""
    offsets: Tensor
    """Position in ids_L where each bag begins, and the end of the last: F * B + 1 numbers."""
    weights_L: Tensor | None = None

    @property
    def num_examples(self) -> int:
        return (self.offsets.numel() - 1) // len(self.layout.table_of_feature)

    @cached_property
    def lengths(self) -> Tensor:
        return self.offsets[1:] - self.offsets[:-1]

    @cached_property
    def is_one_hot(self) -> bool:
        """Whether every bag holds exactly one id."""
        if self.ids_L.numel() != self.offsets.numel() - 1:
            return False
        return torch.equal(
            self.offsets, torch.arange(self.offsets.numel(), device=self.offsets.device)
        )

    @property
    def reads_every_table_once(self) -> bool:
        """Whether every example reads exactly one row of every table."""
        return self.is_one_hot and len(self.layout.table_of_feature) == len(self.layout.widths)

    @cached_property
    def numbers_B(self) -> Tensor:
        """How many numbers each example read from this rank's tables, as float32."""
        widths_F = [self.layout.widths[table] for table in self.layout.table_of_feature]
        if self.is_one_hot:
            return self.offsets.new_full((self.num_examples,), sum(widths_F), dtype=torch.float32)
        lengths_FB = self.lengths.view(len(widths_F), -1)
        return (lengths_FB * lengths_FB.new_tensor(widths_F)[:, None]).sum(0).float()

    @cached_property
    def bag_L(self) -> Tensor:
        bags = torch.arange(self.lengths.numel(), device=self.ids_L.device)
        if self.is_one_hot:
            return bags
        return torch.repeat_interleave(bags, self.lengths, output_size=self.ids_L.numel())

    @cached_property
    def row_L(self) -> Tensor:
        """The row of each lookup, with one numbering for all tables of the kernel."""
        starts_F = self.layout.first_row_of_feature.to(self.ids_L.device)
        if self.is_one_hot:
            return (self.ids_L.view(len(starts_F), -1) + starts_F[:, None]).view(-1)
        return self.ids_L + starts_F[self.bag_L // max(1, self.num_examples)]

    @cached_property
    def runs(self) -> LookupsByRow:
        """The lookups by row. Those of one row are in the order of their examples."""
        if not self.layout.shares_tables:
            is_in_pieces = self.is_one_hot and self.layout.has_feature_by_table
            return by_row(self.row_L, len(self.layout.widths) if is_in_pieces else 1)
        # An example's lookups of a row by several features may cancel. Sorting by example keeps
        # them side by side, so that nothing else is added in between.
        by_example_L = torch.argsort(self.bag_L % max(1, self.num_examples), stable=True)
        runs = by_row(self.row_L[by_example_L])
        return replace(runs, order_L=by_example_L[runs.order_L])

    @cached_property
    def cuts(self) -> list[int]:
        """Position in `runs.row_U` where each stack's rows begin, and the end."""
        return self.layout.cuts_of(self.runs.row_U)

    def rows_of_stacks(self) -> list[Tensor]:
        """Return the distinct rows that are read, increasing, for each stack."""
        return self.layout.by_stack(self.runs.row_U, self.cuts)


def joined(parts: Sequence[Bags]) -> Bags:
    """Join the bags of one kernel for several parts of a batch, with the examples part by part."""
    if len(parts) == 1:
        return parts[0]
    num_features = len(parts[0].layout.table_of_feature)
    lengths = torch.cat([part.lengths.view(num_features, -1) for part in parts], dim=1)
    offsets = torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0))
    ends = [part.offsets[:: max(1, part.num_examples)].tolist() for part in parts]

    def in_order(values: Sequence[Tensor]) -> Tensor:
        pieces = [
            value_L[end[feature] : end[feature + 1]]
            for feature in range(num_features)
            for value_L, end in zip(values, ends)
        ]
        return torch.cat(pieces)

    weights = [part.weights_L for part in parts if part.weights_L is not None]
    return Bags(
        parts[0].layout,
        in_order([part.ids_L for part in parts]),
        offsets,
        in_order(weights) if weights else None,
    )


@dataclass(frozen=True)
class Lookup:
    """What one kernel read, with the gradient that came back to it."""

    bags: Bags
    gradient: Tensor
    """The gradient d loss / d output. If pooled, it is (B, E), and row b holds example b's gradient
    only. For sequences it is (L, D), and row l holds the gradient of lookup l's example only."""

    @property
    def layout(self) -> Layout:
        return self.bags.layout

    @property
    def num_examples(self) -> int:
        return self.bags.num_examples

    def values_of(self, feature: int, example_l: Tensor, at_l: slice | Tensor) -> Tensor:
        """Return the gradient of the output that some lookups of one feature fed, one per row."""
        if not self.layout.is_pooled:
            return self.gradient[at_l]
        return self.gradient[:, self.layout.columns[feature]][example_l]

    def without(self, bad_B: Tensor) -> Lookup:
        """Return the same lookup with zeros for the gradients of some examples."""
        size = max(1, self.num_examples)
        bad = bad_B if self.layout.is_pooled else bad_B[self.bags.bag_L % size]
        return Lookup(self.bags, torch.where(bad[:, None], 0.0, self.gradient))

    @cached_property
    def coefficient_L(self) -> Tensor | None:
        """The factor of each lookup's row in the bag's sum. None means that all factors are one."""
        bags, coefficient = self.bags, self.bags.weights_L
        if bags.layout.is_mean and not bags.is_one_hot:
            share_L = bags.lengths.to(self.gradient.dtype).reciprocal()[bags.bag_L]
            coefficient = share_L if coefficient is None else coefficient * share_L
        return coefficient

    def kept_coefficient(self, kept: LookupsByRow | None) -> Tensor | None:
        """Return `coefficient_L`, with zero for lookups of rows that are left out."""
        if kept is None:
            return self.coefficient_L
        keep_L = self.gradient.new_zeros(self.bags.ids_L.numel())
        keep_L.index_fill_(0, kept.order_L, 1.0)
        return keep_L if self.coefficient_L is None else self.coefficient_L * keep_L


def _bounds(sorted_U: Tensor, starts: Sequence[int]) -> list[int]:
    """Find the position of each start among the sorted numbers."""
    cuts: list[int] = torch.searchsorted(
        sorted_U, torch.tensor(starts, device=sorted_U.device)
    ).tolist()
    return cuts

"""What one embedding kernel reads in a step, and the gradient that comes back to it."""

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
    """Neighbouring tables of one width, taken as one matrix with their rows numbered through."""

    tables: range
    first_row: int
    """Of the stack's first row, with all tables of the kernel numbered through."""
    starts: tuple[int, ...]
    """Where each table begins in the stack, with the end."""

    @property
    def num_rows(self) -> int:
        return self.starts[-1]

    def bounds(self, rows_U: Tensor) -> list[int]:
        """Where each table begins among these sorted rows of the stack, with the end."""
        if len(self.tables) == 1:
            return [0, rows_U.numel()]
        return _bounds(rows_U, self.starts)


@dataclass(frozen=True)
class Layout:
    """How a kernel lays out its features and tables. Fixed for a run."""

    table_of_feature: tuple[int, ...]
    widths: tuple[int, ...]
    """Columns of each table here."""
    num_rows: tuple[int, ...]
    """Rows of each table here."""
    is_mean: bool = False
    """Whether the kernel itself divides a bag by its length."""
    is_stacked: bool = False
    """Whether neighbouring tables of one width are updated as one matrix: fewer, larger calls."""
    is_pooled: bool = True
    """Whether a bag's rows are added up. If not, the output is sequences: a row for every lookup,
    in their order, and all tables have one width."""

    @cached_property
    def columns(self) -> tuple[slice, ...]:
        """Where each feature lies in the kernel's output."""
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
        """Whether some features read one table."""
        return len(self.table_of_feature) > len(set(self.table_of_feature))

    @cached_property
    def has_feature_by_table(self) -> bool:
        """Whether every table has one feature, in the tables' order."""
        return self.table_of_feature == tuple(range(len(self.widths)))

    @cached_property
    def first_row(self) -> tuple[int, ...]:
        """Where each table's rows begin when all are numbered through."""
        starts = [0]
        for rows in self.num_rows:
            starts.append(starts[-1] + rows)
        return tuple(starts)

    @cached_property
    def first_row_of_feature(self) -> Tensor:
        """Where the rows of each feature's table begin."""
        return torch.tensor([self.first_row[t] for t in self.table_of_feature])

    @cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """What an update is made of: stacks of tables, or single tables."""
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
        """The first of these tables that has rows here: whoever has them has them alone.

        Pieces without rows may begin at the same place on several ranks.
        """
        return next((t for t in tables if self.num_rows[t]), tables.start)

    def cuts_of(self, row_U: Tensor) -> list[int]:
        """Where each stack's rows begin among these sorted rows, with the end."""
        if len(self.stacks) == 1:
            return [0, row_U.numel()]
        return [*_bounds(row_U, [stack.first_row for stack in self.stacks]), row_U.numel()]

    def by_stack(self, row_U: Tensor, cuts: list[int] | None = None) -> list[Tensor]:
        """Sorted rows of the kernel as sorted rows of each of its stacks."""
        cuts = self.cuts_of(row_U) if cuts is None else cuts
        return [
            row_U[start:stop] - stack.first_row if stack.first_row else row_U[start:stop]
            for stack, (start, stop) in zip(self.stacks, pairwise(cuts))
        ]


@dataclass(frozen=True)
class LookupsByRow:
    """The lookups of some bags by row: each row once, and its lookups side by side."""

    row_U: Tensor
    """Rows that were read, increasing, with all tables of the kernel numbered through."""
    count_U: Tensor
    """How many lookups each row has."""
    order_L: Tensor
    """The lookups, sorted by row; those of one row by their example."""
    sorted_position_L: Tensor
    """Where the rows of the sorted lookups stand in `row_U`."""

    @cached_property
    def start_U(self) -> Tensor:
        """Where each row's lookups begin in `order_L`."""
        return self.count_U.cumsum(0).sub_(self.count_U)

    @cached_property
    def position_L(self) -> Tensor:
        """Where the row of each lookup stands in `row_U`."""
        return torch.empty_like(self.order_L).scatter_(0, self.order_L, self.sorted_position_L)

    def only(self, keep_U: Tensor) -> LookupsByRow:
        """These rows alone, with their lookups. After one look at all rows, the work of the few."""
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
    """In `pieces` equal pieces, if all rows of one come before those of the next."""
    sorted_L, order_L = _stable_sort(row_L, pieces)
    row_U, position_L, count_U = torch.unique_consecutive(
        sorted_L, return_inverse=True, return_counts=True
    )
    return LookupsByRow(row_U, count_U, order_L, position_L)


_MANY = 1 << 16
"""Up to here numpy was seen to sort quicker than PyTorch's radix sort of integers on CPUs."""


def _stable_sort(row_L: Tensor, pieces: int) -> tuple[Tensor, Tensor]:
    """Sorted rows, and where they came from. PyTorch's own where nothing is quicker."""
    bits = row_L.numel().bit_length()
    if row_L.device.type != "cpu" or row_L.numel() > _MANY:
        sorted_L, order_L = torch.sort(row_L, stable=True)
        return sorted_L, order_L
    # A row and its place in one number: no two are equal, and numpy's vectorised sort of numbers
    # takes a third to half of the time of PyTorch's sort with places.
    packed_L = (row_L << bits).bitwise_or_(torch.arange(row_L.numel()))
    packed_L = torch.from_numpy(np.sort(packed_L.view(pieces, -1).numpy(), axis=1)).view(-1)
    return packed_L >> bits, packed_L & ((1 << bits) - 1)


@dataclass(frozen=True)
class Bags:
    """The ids that one kernel reads. Bag f * B + b holds feature f of example b."""

    layout: Layout
    ids_L: Tensor
    """Rows within their table's piece on this rank."""
    offsets: Tensor
    """Where each bag begins in ids_L, with the end: F * B + 1 numbers."""
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
        """How many numbers of the tables here each example read, as float32."""
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
        """Rows with all tables of the kernel numbered through."""
        starts_F = self.layout.first_row_of_feature.to(self.ids_L.device)
        if self.is_one_hot:
            return (self.ids_L.view(len(starts_F), -1) + starts_F[:, None]).view(-1)
        return self.ids_L + starts_F[self.bag_L // max(1, self.num_examples)]

    @cached_property
    def runs(self) -> LookupsByRow:
        """Lookups of a row lie in the order of their examples."""
        if not self.layout.shares_tables:
            is_in_pieces = self.is_one_hot and self.layout.has_feature_by_table
            return by_row(self.row_L, len(self.layout.widths) if is_in_pieces else 1)
        # An example's lookups by several features may cancel: nobody else's come in between.
        by_example_L = torch.argsort(self.bag_L % max(1, self.num_examples), stable=True)
        runs = by_row(self.row_L[by_example_L])
        return replace(runs, order_L=by_example_L[runs.order_L])

    @cached_property
    def cuts(self) -> list[int]:
        """Where each stack's rows begin in `runs`, with the end."""
        return self.layout.cuts_of(self.runs.row_U)

    def rows_of_stacks(self) -> list[Tensor]:
        """The distinct rows that are read, increasing, stack by stack."""
        return self.layout.by_stack(self.runs.row_U, self.cuts)


def joined(parts: Sequence[Bags]) -> Bags:
    """The bags of one kernel for several batches, as if these were one: part after part."""
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
    """One kernel's read, and what came back to it."""

    bags: Bags
    gradient: Tensor
    """d loss / d output. Pooled (B, E): row b holds nothing but example b's gradient. Sequences
    (L, D): row l is lookup l's, and nothing but the gradient of the example that made it."""

    @property
    def layout(self) -> Layout:
        return self.bags.layout

    @property
    def num_examples(self) -> int:
        return self.bags.num_examples

    def values_of(self, feature: int, example_l: Tensor, at_l: slice | Tensor) -> Tensor:
        """The gradients of what some lookups of one feature fed, one to a row."""
        if not self.layout.is_pooled:
            return self.gradient[at_l]
        return self.gradient[:, self.layout.columns[feature]][example_l]

    def without(self, bad_B: Tensor) -> Lookup:
        """The same with zeros for some examples."""
        size = max(1, self.num_examples)
        bad = bad_B if self.layout.is_pooled else bad_B[self.bags.bag_L % size]
        return Lookup(self.bags, torch.where(bad[:, None], 0.0, self.gradient))

    @cached_property
    def coefficient_L(self) -> Tensor | None:
        """What a row is multiplied by on its way into the bag; None is one."""
        bags, coefficient = self.bags, self.bags.weights_L
        if bags.layout.is_mean and not bags.is_one_hot:
            share_L = bags.lengths.to(self.gradient.dtype).reciprocal()[bags.bag_L]
            coefficient = share_L if coefficient is None else coefficient * share_L
        return coefficient

    def kept_coefficient(self, kept: LookupsByRow | None) -> Tensor | None:
        """`coefficient_L`, with zero for lookups of rows that are left out."""
        if kept is None:
            return self.coefficient_L
        keep_L = self.gradient.new_zeros(self.bags.ids_L.numel())
        keep_L.index_fill_(0, kept.order_L, 1.0)
        return keep_L if self.coefficient_L is None else self.coefficient_L * keep_L


def _bounds(sorted_U: Tensor, starts: Sequence[int]) -> list[int]:
    """Where each start lies among the sorted numbers."""
    cuts: list[int] = torch.searchsorted(
        sorted_U, torch.tensor(starts, device=sorted_U.device)
    ).tolist()
    return cuts

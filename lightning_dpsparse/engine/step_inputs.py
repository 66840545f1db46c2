"""What a step is given: the reads of the tables, and the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_dpsparse.engine.lookups import Bags, Layout, Lookup
from lightning_dpsparse.engine.state import TableState

# B examples of all ranks, R rows


@dataclass(frozen=True)
class Table:
    """What is public about a table, wherever its rows lie."""

    name: str
    """Path of its weight in the module."""
    num_rows: int
    features: tuple[str, ...]

    @property
    def short_name(self) -> str:
        return short_name(self.name)


def short_name(path: str) -> str:
    """A table's own name, as its configuration has it, from the path of its weight.

    >>> short_name("net.tables.embedding_bags.table_0.weight")
    'table_0'
    """
    return path.removesuffix(".weight").rpartition(".")[2]


@dataclass(frozen=True)
class Ranks:
    """Where this rank's examples stand among those of all ranks, and how ranks add up."""

    num_examples: int
    first_example: int
    sum: Callable[[Tensor], None]
    """Add a tensor up over all ranks, in place."""
    rank: int = 0
    world_size: int = 1
    word: float = 0.0
    """What this rank tells the others along with its norms."""


class Read(Protocol):
    """What one kernel read on this rank, for the examples of all ranks."""

    @property
    def table_names(self) -> Sequence[str]: ...
    @property
    def shard_offsets(self) -> Sequence[tuple[int, int]]:
        """First row and column of each table's piece here."""
        ...

    @property
    def has_whole_rows(self) -> bool:
        """Whether no table's columns are spread over several pieces."""
        ...

    @property
    def state(self) -> TableState:
        """What the mechanism keeps for the kernel's tables."""
        ...

    @property
    def order_B(self) -> Tensor | None:
        """Example of each bag column; None if columns are in the examples' order."""
        ...

    @property
    def bags(self) -> Bags: ...
    @property
    def layout(self) -> Layout: ...

    def lookup(self) -> Lookup:
        """The read with the gradient that came back to it, after the backward pass."""
        ...


def add_up(total_B: Tensor, values: Tensor, order_B: Tensor | None) -> None:
    """Add what stands at bag columns to their examples."""
    if order_B is None:
        total_B += values
    else:
        total_B.index_add_(0, order_B, values.to(total_B.dtype))


def take(values: Tensor, order_B: Tensor | None) -> Tensor:
    """Values of examples, by bag column."""
    return values if order_B is None else values[..., order_B]


def renumber(first_of_unit_B: Tensor | None, order_B: Tensor | None) -> Tensor | None:
    """The leader of each bag column, itself a column."""
    if first_of_unit_B is None or order_B is None:
        return first_of_unit_B
    return torch.argsort(order_B)[first_of_unit_B[order_B]]

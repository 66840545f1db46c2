"""What a step is given: the reads of the tables, and the other ranks.

The engine knows nothing of TorchRec or process groups. A `Read` tells it what one kernel read on
this rank, and `Ranks` how to add up over ranks. A kernel may hold the examples in an order of its
own: its bag columns. `order_B` leads from columns to examples, and the functions at the end use it.

Read next: `step.py`, which uses these; `sharded/kernel_read.py`, where a `Read` comes from.
"""

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
    """What is public about a table, whichever ranks hold its rows."""

    name: str
    """Path of the table's weight in the module."""
    num_rows: int
    features: tuple[str, ...]

    @property
    def short_name(self) -> str:
        return short_name(self.name)


def short_name(path: str) -> str:
    """Return a table's own name, as its configuration has it, from the path of its weight.

    >>> short_name("net.tables.embedding_bags.table_0.weight")
    'table_0'
    """
    return path.removesuffix(".weight").rpartition(".")[2]


@dataclass(frozen=True)
class Ranks:
    """Where this rank's examples stand among those of all ranks, and how to add up over ranks."""

    num_examples: int
    first_example: int
    sum: Callable[[Tensor], None]
    """A function that adds a tensor up over all ranks, in place."""
    rank: int = 0
    world_size: int = 1
    word: float = 0.0
    """A number that this rank sends along with its norms. All ranks get the sum of them."""


class Read(Protocol):
    """What one kernel read on this rank, for the examples of all ranks."""

    @property
    def table_names(self) -> Sequence[str]: ...
    @property
    def shard_offsets(self) -> Sequence[tuple[int, int]]:
        """First row and first column of each table's piece on this rank."""
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
        """Example of each bag column; None if the columns are in the order of the examples."""
        ...

    @property
    def bags(self) -> Bags: ...
    @property
    def layout(self) -> Layout: ...

    def lookup(self) -> Lookup:
        """Return the read with the gradient that came back to it, after the backward pass."""
        ...


def add_up(total_B: Tensor, values: Tensor, order_B: Tensor | None) -> None:
    """Add values of bag columns to the totals of their examples."""
    if order_B is None:
        total_B += values
    else:
        total_B.index_add_(0, order_B, values.to(total_B.dtype))


def take(values: Tensor, order_B: Tensor | None) -> Tensor:
    """Return the values of examples in the order of the bag columns."""
    return values if order_B is None else values[..., order_B]


def renumber(first_of_unit_B: Tensor | None, order_B: Tensor | None) -> Tensor | None:
    """Return, for each bag column, the column of the first example of its unit."""
    if first_of_unit_B is None or order_B is None:
        return first_of_unit_B
    return torch.argsort(order_B)[first_of_unit_B[order_B]]

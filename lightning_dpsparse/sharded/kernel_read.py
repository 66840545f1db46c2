"""What one kernel read in a step: ids, the cut in the graph, and the state that goes with them.

`cut.py` makes one for every kernel in every private step. After the backward pass it has the
gradient on what was read, and the engine makes the clipped sums of rows from it (`engine/step.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dpsparse.engine.lookups import Bags, Layout, Lookup
from lightning_dpsparse.engine.state import TableState
from lightning_dpsparse.sharded.kernel import Kernel

# B examples of all ranks, E width of a kernel


@dataclass(frozen=True)
class KernelRead:
    """What one kernel read in a private step, for the examples of all ranks."""

    kernel: Kernel
    state: TableState
    bags: Bags
    leaf: Tensor
    """The kernel's output, cut off from its graph: pooled (B, E), or a row for every lookup."""
    order_B: Tensor | None
    """The example of each bag column, with examples numbered rank by rank. None means that columns
    are in this order."""

    @property
    def table_names(self) -> list[str]:
        return self.kernel.table_names

    @property
    def shard_offsets(self) -> list[tuple[int, int]]:
        return self.kernel.shard_offsets

    @property
    def has_whole_rows(self) -> bool:
        return self.kernel.has_whole_rows

    @property
    def layout(self) -> Layout:
        return self.bags.layout

    def lookup(self) -> Lookup:
        """The read with its gradient, after the backward pass."""
        gradient = self.leaf.grad
        if gradient is None:  # no example's loss depends on these tables
            gradient = torch.zeros_like(self.leaf)
        return Lookup(self.bags, gradient)

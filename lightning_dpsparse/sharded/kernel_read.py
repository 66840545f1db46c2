"""What one FBGEMM kernel of a sharded collection holds, and what it read in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torch import Tensor

from lightning_dpsparse.engine.lookups import Bags, Layout, Lookup
from lightning_dpsparse.engine.rows import RowGradient
from lightning_dpsparse.sharded.debts import KernelDebts
from lightning_dpsparse.sharded.update import apply_to_rows

# B examples of all ranks, E width of a kernel


@dataclass(frozen=True)
class TablePiece:
    """The part of a table that one kernel holds."""

    name: str
    """Path of the table's weight in the module."""
    shard_offset: tuple[int, int]
    """Its first row and column."""
    has_all_columns: bool


@dataclass(frozen=True)
class KernelRead:
    """What one kernel read in this step."""

    kernel: Any
    pieces: tuple[TablePiece, ...]
    bags: Bags
    debts: KernelDebts | None
    selected_R: Tensor | None
    """Rows that may be updated, sorted, tables numbered through; None is all."""
    leaf: Tensor
    """The kernel's output, cut off: pooled (B, E), or a row for every lookup."""
    order_B: Tensor | None
    """Example of each bag column, numbered rank by rank; None if that is their order."""
    steps_before: int
    """Steps that the kernel had counted when this one began."""

    @property
    def table_names(self) -> list[str]:
        return [piece.name for piece in self.pieces]

    @property
    def shard_offsets(self) -> list[tuple[int, int]]:
        return [piece.shard_offset for piece in self.pieces]

    @property
    def has_whole_rows(self) -> bool:
        return all(piece.has_all_columns for piece in self.pieces)

    @property
    def layout(self) -> Layout:
        return self.bags.layout

    def apply(self, gradients: list[RowGradient]) -> None:
        debts = self.debts
        if debts is not None and debts.is_resting:
            debts.pay_bills()
            return
        apply_to_rows(
            self.kernel,
            self.bags.layout,
            gradients,
            self.steps_before,
            also_add=debts.bills if debts else None,
            landing=debts,
        )
        if debts:
            debts.note_updated(gradients)

    def lookup(self) -> Lookup:
        """The read with its gradient, after the backward pass."""
        gradient = self.leaf.grad
        if gradient is None:  # no example's loss depends on these tables
            gradient = torch.zeros_like(self.leaf)
        return Lookup(self.bags, gradient)


def shard_offset_of(table: Any) -> tuple[int, int]:
    """First row and column of a table's piece."""
    if table.local_metadata is None:
        return 0, 0
    first_row, first_column = table.local_metadata.shard_offsets
    return first_row, first_column


def kernel_layout(kernel: Any) -> Layout:
    """The kernel's tables and features in the engine's terms."""
    tbe = kernel.emb_module
    return Layout(
        table_of_feature=tuple(tbe.feature_table_map),
        widths=tuple(tbe.dims[t] for t in range(len(tbe.embedding_specs))),
        num_rows=tuple(spec[0] for spec in tbe.embedding_specs),
        is_mean=tbe.pooling_mode == PoolingMode.MEAN,
        is_stacked=tbe.optimizer is EmbOptimType.EXACT_SGD,
        is_pooled=tbe.pooling_mode != PoolingMode.NONE,
    )

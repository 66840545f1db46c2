"""What can be counted of private steps, if a user asks for it.

How many rows a step updates is public if the mechanism chooses them privately
(`gradient_size.py`). How many units were clipped and how many rows were read is made from the data
without noise: these diagnostics are not private.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_dpsparse.engine.step import Clipped
from lightning_dpsparse.sharded.gradient_size import GradientSize
from lightning_dpsparse.sharded.kernel_read import KernelRead
from lightning_dpsparse.sharded.process_group import sum_over_ranks


class StepMeasurements:
    """Counts of the last step, and of all steps since the counts were last asked for."""

    def __init__(self, *, diagnose: bool) -> None:
        self._diagnose = diagnose
        self._counts: Tensor | None = None
        self._gradient_size: GradientSize | None = None

    def watch_gradient_size(self, module: nn.Module, device: torch.device) -> None:
        """Start counting the rows that steps update, where the mechanism makes them public."""
        self._gradient_size = GradientSize(module, device)

    def add(self, sums: Clipped, reads: Sequence[KernelRead]) -> None:
        """Count a step that was released."""
        self._counts = _count_rows(sums, reads) if self._diagnose else None
        if self._gradient_size is not None:
            self._gradient_size.add(reads, sums.tables)

    def diagnostics(self) -> dict[str, float]:
        """Fractions of units clipped and of rows read in the last step; empty if not asked for.

        They are made from private data without noise.
        """
        if self._counts is None:
            return {}
        clipped, units, read, rows = (float(count) for count in self._counts)
        return {"units_clipped": clipped / max(1.0, units), "rows_read": read / max(1.0, rows)}

    def gradient_size(self) -> dict[str, float]:
        """Rows updated by the mean step since the last call, over all ranks; empty if secret."""
        return {} if self._gradient_size is None else self._gradient_size.take()


def _count_rows(sums: Clipped, reads: Sequence[KernelRead]) -> Tensor:
    """Numbers of units clipped, units in all, rows read and rows in all, over all ranks."""
    assert sums.units_clipped is not None
    counts = sums.units_clipped.new_zeros(4)
    counts[2] = sum(g.rows_U.numel() for read in sums.tables for g in read)
    counts[3] = sum(stack.num_rows for read in reads for stack in read.layout.stacks)
    sum_over_ranks(counts)
    counts[:2] = sums.units_clipped  # every rank has counted the units of all ranks
    return counts

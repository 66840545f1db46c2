"""What the tables know of a selection: which of their rows may take part in a step.

`selector.py` speaks of whole tables. Here their selected rows become rows of the pieces that this
rank holds, and the mechanisms of `fest.py` ask for them in every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_dpsparse.engine.mechanism import Mechanism
from lightning_dpsparse.engine.state import (
    MechanismState,
    PublicRows,
    StepNoise,
    TableKernel,
)
from lightning_dpsparse.engine.step_inputs import Read

# R rows of all tables of a kernel


class SelectedRows(PublicRows):
    """What FEST and AdaFEST+ keep for one kernel: which rows of its tables may be updated."""

    selected_R: Tensor | None = None
    """Rows that may take part, sorted, with one numbering for all tables of the kernel. It is None
    until rows were selected."""

    def set_selected_rows(self, rows: Mapping[str, Tensor]) -> None:
        """Let only these rows of each whole table take part; keys are paths of the weights."""
        kernel, layout = self.kernel, self.kernel.layout
        pieces = []
        for t, (name, (first, _)) in enumerate(zip(kernel.table_names, kernel.shard_offsets)):
            inside = (rows[name] >= first) & (rows[name] < first + layout.num_rows[t])
            pieces.append(rows[name][inside] - first + layout.first_row[t])
        self.selected_R = torch.cat(pieces).to(kernel.device)


class SelectionState(MechanismState):
    """What FEST and AdaFEST+ keep during a run: the selected rows of all tables of this rank."""

    def __init__(
        self, mechanism: Mechanism, kernels: Sequence[TableKernel], noise: StepNoise
    ) -> None:
        self._selected = [SelectedRows(kernel, noise) for kernel in kernels]
        super().__init__(mechanism, self._selected, noise)

    def set_selected_rows(self, rows: Mapping[str, Tensor]) -> None:
        """Let only these rows of each whole table take part; keys are paths of the weights."""
        for state in self._selected:
            state.set_selected_rows(rows)


def selected_rows(read: Read) -> Tensor | None:
    """The rows of this read's kernel that may take part; None means all rows."""
    return read.state.selected_R if isinstance(read.state, SelectedRows) else None

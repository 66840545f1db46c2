"""What the tables know of a selection: which of their rows may take part in a step."""

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
    """The tables of one kernel, of which only selected rows are updated."""

    selected_R: Tensor | None = None
    """Rows that may take part: sorted; rows of all tables of the kernel share one numbering. None
    until rows were selected."""

    def set_selected_rows(self, rows: Mapping[str, Tensor]) -> None:
        """Have only these rows of each whole table, by the path of its weight, take part."""
        kernel, layout = self.kernel, self.kernel.layout
        pieces = []
        for t, (name, (first, _)) in enumerate(zip(kernel.table_names, kernel.shard_offsets)):
            inside = (rows[name] >= first) & (rows[name] < first + layout.num_rows[t])
            pieces.append(rows[name][inside] - first + layout.first_row[t])
        self.selected_R = torch.cat(pieces).to(kernel.device)


class SelectionState(MechanismState):
    """All tables of this rank, of which only selected rows are updated."""

    def __init__(
        self, mechanism: Mechanism, kernels: Sequence[TableKernel], noise: StepNoise
    ) -> None:
        self._selected = [SelectedRows(kernel, noise) for kernel in kernels]
        super().__init__(mechanism, self._selected, noise)

    def set_selected_rows(self, rows: Mapping[str, Tensor]) -> None:
        """Have only these rows of each whole table, by the path of its weight, take part."""
        for state in self._selected:
            state.set_selected_rows(rows)


def selected_rows(read: Read) -> Tensor | None:
    """The rows of this read's kernel that may take part; None means all rows."""
    return read.state.selected_R if isinstance(read.state, SelectedRows) else None

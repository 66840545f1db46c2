"""DP-FEST and DP-AdaFEST+: training on rows that were selected by frequency.

Most rows of a large table occur in few examples, so that noise outweighs what they learn. FEST
selects frequent rows before training (`selection/`) and never moves any other row. AdaFEST+ chooses
again among the selected rows in every step, as AdaFEST does among all rows (`adafest.py`).

Reference: Ghazi et al. 2023 (arXiv:2311.08357), sections 3.1 and 4.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lightning_dpsparse.checks import check_kind
from lightning_dpsparse.engine.mechanism import BatchReads, Mechanism, RowChoice
from lightning_dpsparse.engine.rows import found_in
from lightning_dpsparse.engine.state import StepNoise, TableKernel
from lightning_dpsparse.engine.step_inputs import Table
from lightning_dpsparse.mechanisms.adafest import AdaFEST
from lightning_dpsparse.mechanisms.selection import Selection
from lightning_dpsparse.mechanisms.selection.state import SelectionState, selected_rows


@dataclass(frozen=True, kw_only=True)
class FEST(Mechanism):
    """DP-SGD on the selected rows: all of them get noise in every step, and no others move.

    A selection by the training data is a release of its own, and is charged beside the steps. Any
    fused optimizer works.
    """

    selection: Selection
    """How the rows that training may update are selected."""

    is_private: ClassVar[bool] = True
    threat_model: ClassVar[str] = (
        "The adversary sees the selected rows and every model on the way, after each step, and "
        "knows all other data."
    )

    def __post_init__(self) -> None:
        check_kind("selection", self.selection, Selection)

    def open(self, kernels: Sequence[TableKernel], noise: StepNoise) -> SelectionState:
        return SelectionState(self, kernels, noise)

    def choose_rows(self, batch: BatchReads) -> list[RowChoice]:
        """Choose all selected rows, whether anybody read them or not."""
        choices = []
        for read in batch.reads:
            row_U, selected_R = read.bags.runs.row_U, selected_rows(read)
            assert selected_R is not None
            unread_rows_V = selected_R[~found_in(row_U, selected_R)]
            kept = read.bags.runs.only(found_in(selected_R, row_U))
            choices.append(RowChoice(kept, unread_rows_V))
        return choices


@dataclass(frozen=True, kw_only=True)
class AdaFESTPlus(AdaFEST):
    """AdaFEST among selected rows: an example counts for these rows only, and moves no others."""

    selection: Selection
    """How the rows that may pass the threshold are selected."""

    threat_model: ClassVar[str] = (
        "The adversary sees the selected rows and every model on the way, after each step and with "
        "it which rows moved, and knows all other data."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kind("selection", self.selection, Selection)

    def open(self, kernels: Sequence[TableKernel], noise: StepNoise) -> SelectionState:
        return SelectionState(self, kernels, noise)

    def rows_that_may_pass(self, tables: Sequence[Table]) -> int:
        return self.selection.num_rows(tables)


def selection_of(mechanism: Mechanism) -> Selection | None:
    """How the rows of a mechanism are selected before training; None if all may take part.

    A mechanism that has a `selection` opens a `SelectionState`.
    """
    found = getattr(mechanism, "selection", None)
    return found if isinstance(found, Selection) else None

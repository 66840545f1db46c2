"""The selection of one run: when rows are selected, who is told, and what a checkpoint keeps.

Rows are selected before training or, with `Selection.renew`, before every period. Rank 0 selects
for all ranks. It tells the mechanism's state, which updates these rows only (`state.py`), and the
model, where ids of other rows may have to read one shared row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from lightning_dpsparse.engine.state import MechanismState
from lightning_dpsparse.engine.step_inputs import Table
from lightning_dpsparse.mechanisms.selection.counter import Features, IdCounter
from lightning_dpsparse.mechanisms.selection.frequencies import Histogram, PublicFrequencies
from lightning_dpsparse.mechanisms.selection.selection import Selection
from lightning_dpsparse.mechanisms.selection.state import SelectionState
from lightning_dpsparse.noise.sources import NoiseSource
from lightning_dpsparse.refused import Refused

# R rows of a table

T = TypeVar("T")
Rows = dict[str, Tensor]
"""The selected rows of each whole table, sorted, by the path of its weight."""


class RanksAndModel(Protocol):
    """What a selection needs of the other ranks and of the model's tables."""

    def from_rank_zero(self, make: Callable[[], T]) -> T:
        """Return on every rank what rank 0 makes."""
        ...

    def sum_over_ranks(self, tensor: Tensor) -> None:
        """Add a tensor up over all ranks, in place."""
        ...

    def share_a_row(self, rows: Rows, row_for_others: int | None) -> None:
        """Have ids of other rows read `row_for_others`; None means that they read their own."""
        ...


class RowSelector:
    """Selects rows for a run, and tells the module's tables.

    Counts of earlier periods are kept with their noise, on rank 0. To add them up costs nothing.
    """

    def __init__(
        self,
        selection: Selection,
        tables: Sequence[Table],
        source: NoiseSource,
        examples_per_unit: int,
        world: RanksAndModel,
    ) -> None:
        self.selection, self._tables, self._source = selection, tables, source
        self._examples_per_unit, self._world = examples_per_unit, world
        self._check()
        self._sums: Rows = {}
        self._rows: Rows | None = None
        self._state: SelectionState | None = None

    def _check(self) -> None:
        frequencies = self.selection.frequencies
        known = {feature for table in self._tables for feature in table.features}
        if isinstance(frequencies, Histogram) and frequencies.max_ids_of.keys() - known:
            raise Refused(
                "Expected features of the tables in max_ids_of, found "
                f"{sorted(frequencies.max_ids_of.keys() - known)}. The tables have {sorted(known)}."
            )
        row = self.selection.out_of_vocabulary_row
        smallest = min(table.num_rows for table in self._tables)
        if self.selection.maps_to_one_row and not 0 <= row < smallest:
            raise Refused(
                f"Expected out_of_vocabulary_row within every table, found {row}, where the "
                f"smallest has {smallest} rows. Name a row that every table has."
            )

    def open(self, state: MechanismState) -> None:
        """Tell this state of the selected rows, now and whenever they are renewed."""
        assert isinstance(state, SelectionState)
        self._state = state
        if self._rows is not None:
            state.set_selected_rows(self._rows)

    def select_by_public_counts(self, frequencies: PublicFrequencies) -> None:
        """Select by counts from a file, which costs nothing."""
        scores = frequencies.scores
        self._take(self._world.from_rank_zero(lambda: self.selection.largest(scores(self._tables))))

    def select_by_data(
        self, batches: Iterable[Features], device: torch.device, *, release: int
    ) -> None:
        """Select by counts of these batches. The release must have been charged before.

        `release` names the noise.
        """
        histogram = self.selection.frequencies
        assert isinstance(histogram, Histogram)
        counter = IdCounter(self._tables, histogram)
        for features in batches:
            counter.add(features)
        totals = counter.totals(self._world.sum_over_ranks, device)

        def choose() -> Rows:
            noisy = histogram.noisy(
                totals, self._tables, self._examples_per_unit, self._source, release
            )
            for name, count_R in noisy.items():
                self._sums[name] = self._sums.get(name, 0.0) + count_R.cpu()
            return self.selection.largest(self._sums)

        self._take(self._world.from_rank_zero(choose))

    def _take(self, rows: Rows) -> None:
        self._rows = rows
        self._world.share_a_row(rows, self.row_for_others)
        if self._state is not None:
            self._state.set_selected_rows(rows)

    @property
    def row_for_others(self) -> int | None:
        """The row that ids of unselected rows read; None if they read their own rows."""
        return self.selection.out_of_vocabulary_row if self.selection.maps_to_one_row else None

    def summary(self) -> str:
        """A sentence that says how many rows were selected."""
        chosen = sum(len(rows) for rows in (self._rows or {}).values())
        return f"Selected {chosen:,} of {sum(table.num_rows for table in self._tables):,} rows."

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint keeps: the selected rows, and the noisy counts if they are renewed.

        All of it was made privately, so it is no secret.
        """
        if self._rows is None:
            return None
        return {
            "of": repr(self.selection),
            "rows": self._rows,
            "row_for_others": self.row_for_others,
            "sums": self._sums if self.selection.renew else {},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with the rows of a checkpoint."""
        self._sums = dict(state["sums"])
        self._take(dict(state["rows"]))

"""Rows are selected by the data: one pass over it, noise on all counts, and the largest kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from tqdm import tqdm

from lightning_dpsparse.mechanisms.selection import Histogram, PublicFrequencies, Selection
from lightning_dpsparse.noise.sources import NoiseSource
from lightning_dpsparse.plugin.private_data import SampledData
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sampling.poisson import Phase
from lightning_dpsparse.sharded.collections import sharded_collections
from lightning_dpsparse.sharded.cut import PrivateLookup
from lightning_dpsparse.sharded.private import from_rank_zero
from lightning_dpsparse.sharded.selected import IdCounter, check_one_table_each, public_tables


class RowSelector:
    """Selects rows for a run, and tells the module's tables.

    Counts of earlier periods are kept with their noise, on rank 0: adding them up costs nothing.
    """

    def __init__(
        self, selection: Selection, module: nn.Module, source: NoiseSource, examples_per_unit: int
    ) -> None:
        self.selection, self._module, self._source = selection, module, source
        self._examples_per_unit = examples_per_unit
        self._tables = public_tables(module)
        self._check_names()
        self._sums: dict[str, Tensor] = {}
        self._rows: dict[str, Tensor] | None = None

    def _check_names(self) -> None:
        frequencies = self.selection.frequencies
        known = {feature for table in self._tables for feature in table.features}
        if isinstance(frequencies, Histogram) and frequencies.max_ids_of.keys() - known:
            raise Refused(
                "Expected features of the tables in max_ids_of, found "
                f"{sorted(frequencies.max_ids_of.keys() - known)}."
            )
        if self.selection.maps_to_one_row:
            check_one_table_each(self._module)
        row = self.selection.out_of_vocabulary_row
        smallest = min(table.num_rows for table in self._tables)
        if self.selection.maps_to_one_row and not 0 <= row < smallest:
            raise Refused(
                f"Expected out_of_vocabulary_row within every table, found {row}, where the "
                f"smallest has {smallest} rows."
            )

    def select_by_public_counts(self, frequencies: PublicFrequencies) -> None:
        """From a file: nothing to pay."""
        self._take(from_rank_zero(lambda: self.selection.largest(frequencies.scores(self._tables))))

    def select_by_data(
        self,
        shape: SampledData,
        phase: Phase | None,
        device: torch.device,
        *,
        release: int,
        quiet: bool,
    ) -> None:
        """One accounted release. It must have been charged before.

        `phase` is the stretch of the data that is counted; None is all. `release` names the noise.
        """
        histogram = self.selection.frequencies
        assert isinstance(histogram, Histogram)
        assert shape.in_order is not None
        counter = IdCounter(self._tables, histogram)
        batches = shape.in_order(phase)
        what = "Counting ids" if phase is None or phase.name is None else f"Counting {phase.name}"
        for batch in tqdm(batches, what, delay=1.0, leave=False, disable=quiet):
            counter.add(batch)
        totals = counter.totals(device)

        def choose() -> dict[str, Tensor]:
            noisy = histogram.noisy(
                totals, self._tables, self._examples_per_unit, self._source, release
            )
            for name, count_R in noisy.items():
                self._sums[name] = self._sums.get(name, 0.0) + count_R.cpu()
            return self.selection.largest(self._sums)

        self._take(from_rank_zero(choose))

    def _take(self, rows: dict[str, Tensor]) -> None:
        self._rows = rows
        set_selected_rows(self._module, rows, self.row_for_others)
        total = sum(table.num_rows for table in self._tables)
        chosen = sum(len(r) for r in rows.values())
        rank_zero_info(f"Selected {chosen:,} of {total:,} rows.")

    @property
    def row_for_others(self) -> int | None:
        return self.selection.out_of_vocabulary_row if self.selection.maps_to_one_row else None

    # ---- checkpoints ----------------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """Selected rows, and noisy counts where they will be renewed. Private, so no secret."""
        if self._rows is None:
            return None
        sums = self._sums if self.selection.renew else {}
        return {
            "of": repr(self.selection),
            "rows": self._rows,
            "row_for_others": self.row_for_others,
            "sums": sums,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._sums = dict(state["sums"])
        self._take(dict(state["rows"]))


def set_selected_rows(
    module: nn.Module, rows: Mapping[str, Tensor] | None, others: int | None
) -> None:
    """Have the module's tables update these rows only, and map other ids if asked."""
    for collection in sharded_collections(module).values():
        assert isinstance(collection, PrivateLookup)
        collection.select_rows(rows, others)

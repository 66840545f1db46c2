"""A run's selection of rows, joined to Lightning: the data that is counted, and who hears of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from tqdm import tqdm

from lightning_dpsparse.mechanisms.selection import Selection
from lightning_dpsparse.mechanisms.selection import selector as selection_of_a_run
from lightning_dpsparse.noise.sources import NoiseSource
from lightning_dpsparse.plugin.private_data import SampledData
from lightning_dpsparse.sampling.poisson import Phase
from lightning_dpsparse.sharded.features import features_of, public_tables
from lightning_dpsparse.sharded.process_group import from_rank_zero, sum_over_ranks
from lightning_dpsparse.sharded.shared_rows import check_one_table_each, share_a_row

T = TypeVar("T")


class RowSelector(selection_of_a_run.RowSelector):
    """Selects rows of a module's tables, by a file or by the data of its training loader."""

    def __init__(
        self, selection: Selection, module: nn.Module, source: NoiseSource, examples_per_unit: int
    ) -> None:
        if selection.maps_to_one_row:
            check_one_table_each(module)
        world = _World(module, lambda: rank_zero_info(self.summary()))
        super().__init__(selection, public_tables(module), source, examples_per_unit, world)

    def select_from(
        self,
        data: SampledData,
        phase: Phase | None,
        device: torch.device,
        *,
        release: int,
        quiet: bool,
    ) -> None:
        """Count the examples of one phase of the data, or of all of it, and select by them.

        This one release must have been charged before. `release` names its noise.
        """
        assert data.in_order is not None
        what = "Counting ids" if phase is None or phase.name is None else f"Counting {phase.name}"
        batches = tqdm(data.in_order(phase), what, delay=1.0, leave=False, disable=quiet)
        self.select_by_data(map(features_of, batches), device, release=release)


class _World:
    """The other ranks, and the module whose tables hear of the rows."""

    def __init__(self, module: nn.Module, announce: Callable[[], None]) -> None:
        self._module, self._announce = module, announce

    def from_rank_zero(self, make: Callable[[], T]) -> T:
        return from_rank_zero(make)

    def sum_over_ranks(self, tensor: Tensor) -> None:
        sum_over_ranks(tensor)

    def share_a_row(self, rows: Mapping[str, Tensor], row_for_others: int | None) -> None:
        share_a_row(self._module, rows, row_for_others)
        self._announce()

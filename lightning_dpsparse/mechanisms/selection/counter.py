"""Counts how many examples read each row of each table, for a selection by the data.

One example may have many ids, and must not move the counts by much. So it counts once for a row,
and only with a few distinct ids of every bag. The counts here are exact, and secret: noise comes on
top in `frequencies.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_dpsparse.engine.step_inputs import Table
from lightning_dpsparse.mechanisms.selection.frequencies import Histogram
from lightning_dpsparse.refused import Refused

# B examples, L lookups, R rows of a table

Features = Mapping[str, tuple[Tensor, Tensor]]
"""For each feature of a batch, its ids (L) and how many of them each example has (B)."""


class IdCounter:
    """Counts, for every row of every table, the examples that read it.

    Guarantees: one example adds at most one to a row's count, and at most sum_f m_f over all rows
    of all tables. Rows that nobody reads have a count too: zero.
    """

    def __init__(self, tables: Sequence[Table], histogram: Histogram) -> None:
        self._tables, self._histogram = tables, histogram
        self.counts = {t.name: torch.zeros(t.num_rows, dtype=torch.int64) for t in tables}

    def add(self, features: Features) -> None:
        """Count one batch of examples."""
        for table in self._tables:
            # A table may have features that the model itself adds to a batch, such as negatives.
            found = [f for f in table.features if f in features]
            if not found:
                raise Refused(
                    f"Expected one of the features {list(table.features)} of table {table.name!r} "
                    f"in the data, found {sorted(features)}. Select by public frequencies."
                )
            keys = [self._distinct(*features[f], f, table.num_rows) for f in found]
            key = keys[0] if len(keys) == 1 else torch.cat(keys).unique()
            ids = key % table.num_rows
            self.counts[table.name].index_add_(0, ids, torch.ones_like(ids))

    def _distinct(self, ids_L: Tensor, lengths_B: Tensor, feature: str, num_rows: int) -> Tensor:
        """Keys example * num_rows + id of the m_f smallest distinct ids of every bag, sorted."""
        most = self._histogram.most_ids(feature)
        if ids_L.numel() and not 0 <= int(ids_L.min()) <= int(ids_L.max()) < num_rows:
            raise Refused(
                f"Expected ids within their tables, found ids out of range for {feature!r} (0 to "
                f"{num_rows - 1}). Hash the feature into the table's rows, or give the table more "
                "rows."
            )
        example_L = torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B)
        key_L = example_L * num_rows + ids_L
        if bool((lengths_B <= 1).all()):
            return key_L
        key = key_L.unique()
        example = key // num_rows
        count_B = torch.bincount(example, minlength=len(lengths_B))
        position = torch.arange(len(key)) - (count_B.cumsum(0) - count_B)[example]
        return key[position < most]

    def totals(
        self, sum_over_ranks: Callable[[Tensor], None], device: torch.device
    ) -> dict[str, Tensor]:
        """The counts of all ranks, added up, on every rank."""
        totals = {name: count_R.to(device) for name, count_R in self.counts.items()}
        for count_R in totals.values():
            sum_over_ranks(count_R)
        return totals

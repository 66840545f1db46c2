"""The description of a selection: which rows training may touch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_dpsparse.engine.step_inputs import Table
from lightning_dpsparse.mechanisms.selection.frequencies import Frequencies, Histogram
from lightning_dpsparse.refused import Refused

# R rows of a table: its whole public range of ids, whether they occur or not


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The rows that training may touch: those with the largest counts."""

    frequencies: Frequencies
    """PublicFrequencies, NoisyHistogram or GumbelHistogram."""

    rows_per_table: int | None = None
    """How many of each table. Smaller tables are taken whole."""

    rows_in_total: int | None = None
    """Or: how many of all tables together, whichever they are in."""

    unselected: Literal["frozen", "out_of_vocabulary"] = "frozen"
    """Ids of other rows read those rows' initial values, which no data has touched; or they read
    one row of their table that stands for all of them, and learns."""

    out_of_vocabulary_row: int = 0
    """That row. It is always selected, beside the others."""

    renew: bool = False
    """With by_day: count every period before training on it, and select by the sum so far."""

    def __post_init__(self) -> None:
        given = [self.rows_per_table, self.rows_in_total]
        if sum(value is not None for value in given) != 1:
            raise Refused(
                "Expected one of rows_per_table and rows_in_total, found "
                f"{'neither' if given[0] is None else 'both'}."
            )
        if self.unselected not in ("frozen", "out_of_vocabulary"):
            raise Refused(
                f"Expected unselected 'frozen' or 'out_of_vocabulary', found {self.unselected!r}."
            )
        if min(value for value in given if value is not None) < 1:
            raise Refused("Expected at least one row to be selected, found fewer.")
        if self.renew and not isinstance(self.frequencies, Histogram):
            raise Refused(
                "Expected counts of the data with renew=True, found public ones: there is nothing "
                "to renew. Leave renew out."
            )

    @property
    def maps_to_one_row(self) -> bool:
        return self.unselected == "out_of_vocabulary"

    def num_rows(self, tables: Sequence[Table]) -> int:
        """How many rows will be selected, the out-of-vocabulary ones aside."""
        if self.rows_per_table is not None:
            return sum(min(self.rows_per_table, table.num_rows) for table in tables)
        assert self.rows_in_total is not None
        return min(self.rows_in_total, sum(table.num_rows for table in tables))

    def largest(self, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The selected rows of every table, sorted. A function of the scores alone."""
        if self.rows_per_table is not None:
            rows = {
                name: score_R.topk(min(self.rows_per_table, len(score_R)), sorted=False).indices
                for name, score_R in scores.items()
            }
        else:
            assert self.rows_in_total is not None
            sizes = [len(score_R) for score_R in scores.values()]
            is_selected = torch.zeros(sum(sizes), dtype=torch.bool)
            most = min(self.rows_in_total, sum(sizes))
            joined = torch.cat([score_R.cpu() for score_R in scores.values()])
            is_selected[joined.topk(most, sorted=False).indices] = True
            parts = is_selected.split(sizes)
            rows = {name: part.nonzero().squeeze(1) for name, part in zip(scores, parts)}
        if self.maps_to_one_row:
            extra = {name: r.new_tensor([self.out_of_vocabulary_row]) for name, r in rows.items()}
            rows = {name: torch.cat([r, extra[name]]).unique() for name, r in rows.items()}
        return {name: r.sort().values for name, r in rows.items()}

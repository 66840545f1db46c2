"""The description of a selection: which rows training may update.

These are the rows with the largest counts, in each table or over all tables. The description says
where counts come from (`frequencies.py`), how many rows are selected, and what ids of other rows
read. `selector.py` carries it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_dpsparse.checks import check_choice, check_flag, check_kind, check_whole
from lightning_dpsparse.engine.step_inputs import Table
from lightning_dpsparse.mechanisms.selection.frequencies import Frequencies, Histogram
from lightning_dpsparse.refused import Refused

# R rows of a table: its whole public range of ids, whether they occur or not


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The rows that training may update: those with the largest counts."""

    frequencies: Frequencies
    """Where the counts come from: PublicFrequencies, NoisyHistogram or GumbelHistogram."""

    rows_per_table: int | None = None
    """Number of rows that are selected in each table. Smaller tables are selected whole."""

    rows_in_total: int | None = None
    """Instead of rows_per_table: number of rows that are selected over all tables together."""

    unselected: Literal["frozen", "out_of_vocabulary"] = "frozen"
    """What ids of other rows read. With frozen they read their own rows, which keep their initial
    values. With out_of_vocabulary they read one row of their table, which stands for all of them
    and learns."""

    out_of_vocabulary_row: int = 0
    """With out_of_vocabulary: the row of every table that stands for all ids of other rows. It is
    always selected, in addition to rows_per_table or rows_in_total."""

    renew: bool = False
    """Whether every period is counted before training on it, so that rows are selected by the sum
    of all counts so far. It needs by_day."""

    def __post_init__(self) -> None:
        given = [self.rows_per_table, self.rows_in_total]
        if sum(value is not None for value in given) != 1:
            raise Refused(
                "Expected one of rows_per_table and rows_in_total, found "
                f"{'neither' if given[0] is None else 'both'}. Set one of them."
            )
        check_kind("frequencies", self.frequencies, Frequencies)
        check_choice("unselected", self.unselected, ("frozen", "out_of_vocabulary"))
        for name in ("rows_per_table", "rows_in_total"):
            if getattr(self, name) is not None:
                expected = f"at least one row to be selected by {name}"
                check_whole(name, getattr(self, name), expected=expected)
        check_whole("out_of_vocabulary_row", self.out_of_vocabulary_row, 0)
        check_flag("renew", self.renew)
        if self.renew and not isinstance(self.frequencies, Histogram):
            raise Refused(
                "Expected counts of the data with renew=True, found public ones: there is nothing "
                "to renew. Leave renew out."
            )

    @property
    def maps_to_one_row(self) -> bool:
        return self.unselected == "out_of_vocabulary"

    def num_rows(self, tables: Sequence[Table]) -> int:
        """Number of rows that will be selected, without the out-of-vocabulary ones."""
        if self.rows_per_table is not None:
            return sum(min(self.rows_per_table, table.num_rows) for table in tables)
        assert self.rows_in_total is not None
        return min(self.rows_in_total, sum(table.num_rows for table in tables))

    def largest(self, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The selected rows of every table, sorted. They depend on the scores alone."""
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

"""DP-SGD: noise on every row, every step (Abadi et al. 2016, arXiv:1607.00133)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from lightning_dpsparse.engine.mechanism import Draw, Mechanism
from lightning_dpsparse.engine.rows import RowGradient


@dataclass(frozen=True)
class DPSGD(Mechanism):
    """theta <- update(theta, (sum_b clip(g_b) + N(0, sigma^2 C^2 I)) / expected batch) on all rows.

    The exact mechanism, and the slow one: its cost is the height of the tables.
    """

    chunk_rows: int = 1 << 14
    """Rows that are updated at a time: noise never takes more memory than this many."""

    is_private: ClassVar[bool] = True
    reaches_all_rows: ClassVar[bool] = True
    threat_model: ClassVar[str] = (
        "The adversary sees every model on the way, after each step, and knows all other data."
    )

    def updates(self, clipped: RowGradient, num_rows: int, draw: Draw) -> Iterator[RowGradient]:
        bounds = range(0, num_rows, self.chunk_rows)
        starts = torch.tensor([*bounds, num_rows], device=clipped.rows_U.device)
        cuts = torch.searchsorted(clipped.rows_U, starts).tolist()
        for part, start in enumerate(bounds):
            stop = min(start + self.chunk_rows, num_rows)
            rows = torch.arange(start, stop, device=clipped.rows_U.device)
            values = draw(rows, part)
            here = slice(cuts[part], cuts[part + 1])
            values.index_add_(0, clipped.rows_U[here] - start, clipped.values_UD[here])
            yield RowGradient(rows, values, first_row=start)

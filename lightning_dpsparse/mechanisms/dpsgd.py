"""DP-SGD: every row gets noise in every step (Abadi et al. 2016, arXiv:1607.00133).

A step must not tell which rows its examples read. DP-SGD hides that in the simplest way: it updates
all rows, whether they were read or not. So its cost grows with the number of rows of the tables.
`lazydp/` releases the same model in less time, and `adafest.py` updates fewer rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from lightning_dpsparse.checks import check_whole
from lightning_dpsparse.engine.mechanism import Mechanism
from lightning_dpsparse.engine.rows import RowGradient
from lightning_dpsparse.engine.state import Draw, StepNoise, TableKernel, TableState


@dataclass(frozen=True)
class DPSGD(Mechanism):
    """theta <- update(theta, (sum_b clip(g_b) + N(0, sigma^2 C^2 I)) / expected batch) on all rows.

    It is the exact mechanism, and a slow one: its cost grows with the number of rows of the tables.
    """

    chunk_rows: int = 1 << 14
    """Number of rows that are updated at a time. Noise takes memory for this many rows at most."""

    is_private: ClassVar[bool] = True
    threat_model: ClassVar[str] = (
        "The adversary sees every model on the way, after each step, and knows all other data."
    )

    def __post_init__(self) -> None:
        check_whole("chunk_rows", self.chunk_rows)

    def check_optimizer(self, kind: str, weight_decay: float) -> None:
        """Accept any optimizer, because every row takes part in every step."""

    def open_table(self, kernel: TableKernel, noise: StepNoise) -> TableState:
        return NoiseOnAllRows(kernel, noise, self.chunk_rows)


class NoiseOnAllRows(TableState):
    """Every row of every table gets noise in every step, chunk by chunk."""

    def __init__(self, kernel: TableKernel, noise: StepNoise, chunk_rows: int) -> None:
        super().__init__(kernel, noise)
        self._chunk_rows = chunk_rows

    def with_noise(self, clipped: RowGradient, num_rows: int, draw: Draw) -> Iterator[RowGradient]:
        bounds = range(0, num_rows, self._chunk_rows)
        starts = torch.tensor([*bounds, num_rows], device=clipped.rows_U.device)
        cuts = torch.searchsorted(clipped.rows_U, starts).tolist()
        for part, start in enumerate(bounds):
            stop = min(start + self._chunk_rows, num_rows)
            rows_U = torch.arange(start, stop, device=clipped.rows_U.device)
            values_UD = draw(rows_U, part)
            here = slice(cuts[part], cuts[part + 1])
            values_UD.index_add_(0, clipped.rows_U[here] - start, clipped.values_UD[here])
            yield RowGradient(rows_U, values_UD, first_row=start)

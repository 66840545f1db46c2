"""EANA: noise on the rows that were read. Not private; a baseline (Ning et al. 2022)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from lightning_dpsparse.engine.mechanism import Draw, Mechanism
from lightning_dpsparse.engine.rows import RowGradient


@dataclass(frozen=True)
class EANA(Mechanism):
    """DP-SGD's update on rows that some example read, and on no other.

    NOT differentially private, whatever the noise: a row that moved tells that somebody had its id.
    """

    is_private: ClassVar[bool] = False
    threat_model: ClassVar[str] = "None: which rows moved tells which ids were in the data."

    def updates(self, clipped: RowGradient, num_rows: int, draw: Draw) -> Iterator[RowGradient]:
        if clipped.rows_U.numel():
            noise = draw(clipped.rows_U, 0)
            yield RowGradient(clipped.rows_U, noise.add_(clipped.values_UD))

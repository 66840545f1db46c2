"""EANA: noise on the rows that were read. Not private; a baseline (Ning et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_dpsparse.accounting.events import DpEvent, not_private
from lightning_dpsparse.engine.mechanism import Mechanism


@dataclass(frozen=True)
class EANA(Mechanism):
    """DP-SGD's update on rows that some example read, and on no other.

    NOT differentially private, whatever the noise: a row that moved tells that somebody had its id.
    """

    is_private: ClassVar[bool] = False
    threat_model: ClassVar[str] = "None: which rows moved tells which ids were in the data."

    def event(self, noise_multiplier: float) -> DpEvent:
        return not_private()

"""EANA: rows that were read get noise (Ning et al. 2022). It is a baseline, and is not private.

Noise hides how far a row moved, but it does not hide that the row moved. So anybody who sees the
model before and after a step learns which ids its examples had. EANA shows how fast training could
be if that did not matter; `lazydp/` and `adafest.py` are fast and private.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_dpsparse.accounting.events import DpEvent, not_private
from lightning_dpsparse.engine.mechanism import Mechanism


@dataclass(frozen=True)
class EANA(Mechanism):
    """DP-SGD's update on rows that some example read, and on no other.

    It is NOT differentially private, whatever the noise: a row that moved tells that somebody had
    its id.
    """

    is_private: ClassVar[bool] = False
    threat_model: ClassVar[str] = "None: which rows moved tells which ids were in the data."

    def event(self, noise_multiplier: float) -> DpEvent:
        return not_private()

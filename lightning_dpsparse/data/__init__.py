"""Click data: Criteo's files and a synthetic stand-in of the same shape."""

from lightning_dpsparse.data.batch import ClickDataset, Clicks, collate
from lightning_dpsparse.data.criteo import CriteoData, Part
from lightning_dpsparse.data.synthetic import SyntheticClicks, SyntheticData

__all__ = [
    "ClickDataset",
    "Clicks",
    "CriteoData",
    "Part",
    "SyntheticClicks",
    "SyntheticData",
    "collate",
]

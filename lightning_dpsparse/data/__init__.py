"""Click and watch data: Criteo, MovieLens, and synthetic stand-ins of the same shapes."""

from lightning_dpsparse.data.batch import ClickDataset, Clicks, collate, join
from lightning_dpsparse.data.criteo import CriteoData, Part
from lightning_dpsparse.data.movielens import (
    MovieLensData,
    MovieLensWindows,
    Ratings,
    SyntheticMovieLens,
    Timelines,
    WatchData,
    read_ratings,
)
from lightning_dpsparse.data.synthetic import SyntheticClicks, SyntheticData

__all__ = [
    "ClickDataset",
    "Clicks",
    "CriteoData",
    "MovieLensData",
    "MovieLensWindows",
    "Part",
    "Ratings",
    "SyntheticClicks",
    "SyntheticData",
    "SyntheticMovieLens",
    "Timelines",
    "WatchData",
    "collate",
    "join",
    "read_ratings",
]

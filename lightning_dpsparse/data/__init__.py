"""Click and watch data: Criteo, MovieLens, and synthetic stand-ins of the same shapes.

`batch.py` has the arrays of examples that all data sets share, and the data module above them.
`prepare.py` turns Criteo's text files into arrays once and `criteo.py` reads these; `ratings.py`
reads MovieLens' files and `movielens.py` makes windows of them; `synthetic.py` makes clicks on the
fly. Nothing here looks at private data to choose a vocabulary: rows are hashed or public.
"""

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

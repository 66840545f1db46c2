"""Rows that are selected before training, by how often their ids occur.

FEST and AdaFEST+ (`mechanisms/fest.py`) train on some rows only. Which rows these are is decided
once, or once for every period: from public counts, which costs nothing, or from counts of the
training data with noise, which is a release of its own and is charged beside the steps.

Read next: `selection.py`, the description; `frequencies.py`, the counts and their price;
`counter.py`, counting the data; `selector.py`, a run's selection; `state.py`, what the tables know.
"""

from lightning_dpsparse.mechanisms.selection.frequencies import (
    Frequencies,
    GumbelHistogram,
    Histogram,
    NoisyHistogram,
    PublicFrequencies,
)
from lightning_dpsparse.mechanisms.selection.selection import Selection

__all__ = [
    "Frequencies",
    "GumbelHistogram",
    "Histogram",
    "NoisyHistogram",
    "PublicFrequencies",
    "Selection",
]

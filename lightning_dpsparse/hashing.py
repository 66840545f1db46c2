"""A fixed, public hash on arrays: the same everywhere, and independent of any data."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(x: U64) -> U64:
    """SplitMix64's finalizer: a bijection of 64-bit words that scatters every bit.

    Reference: Steele, Lea, Flood 2014, Fast Splittable Pseudorandom Number Generators.

    >>> mix(np.array([0, 1], np.uint64)).tolist()
    [16294208416658607535, 10451216379200822465]
    """
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def salt(*words: int) -> np.uint64:
    """One 64-bit word that stands for a sequence of small integers."""
    state = np.zeros(1, np.uint64)
    for word in words:
        state = mix(state ^ np.uint64(word % 2**64))
    return np.uint64(state[0])


def unit(x: U64) -> NDArray[np.float64]:
    """Hash words as numbers in [0, 1)."""
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53

"""Normal draws from a cryptographic keystream, on CPUs: whole numbers with a known distribution.

A word w of 32 random bits becomes x = w / 2^31 in float32, and x becomes the number y that a normal
draw falls below with probability (1 + x) / 2. Rounded to a whole number, y alone would be poor
noise: only a few words lead to each number, and not always equally many (a tenth more or less near
zero, and none at all far out). So the difference of two uniform draws of 15 bits is added, each a
sixteenth to a thirty-second of a standard deviation wide. It blurs these irregularities away. What
remains was computed for every whole number (`tests/noise/test_law.py`): it has the probability of a
rounded normal draw plus that difference, up to a factor of 1 +- 2e-5. Adding independent draws to a
noisy number costs no privacy. The normal part is made smaller, so that the variance of the sum is
right; `hidden_share` says how much of the noise is Gaussian.

A generator of b bits ends after sqrt(2 b ln 2) standard deviations, and beyond four of them float32
has few numbers x left below one. So draws beyond four standard deviations are made again from 53
bits, and these go on to 9.3. Otherwise an example could push a coordinate to where the noise of a
data set without it never reaches, and so be recognised with certainty, more often than a small
delta allows.
"""

from __future__ import annotations

import math
import threading
from statistics import NormalDist

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from torch import Tensor

from lightning_dpsparse.hashing import unit
from lightning_dpsparse.noise.erfinv import erfinv_
from lightning_dpsparse.noise.grid import grid_of, round_to_

Floats = NDArray[np.float32]

_CHUNK = 1 << 17
"""Numbers that are drawn at a time. They stay in cache, and the calls cost less than the draws."""

_BLUR = 1 << 15
"""Number of values that each of the two uniform draws may have."""
_BLUR_VARIANCE = 2 * (_BLUR**2 - 1) / 12 + 1 / 12
"""Variance of both uniform draws together, and of rounding."""

_NEAR = 128 * (2 * round(math.erf(4.0 / math.sqrt(2.0)) * 2.0**23) + 1) + 64
"""The first word beyond the tail. Words from here on, and from minus here down, are replaced. Near
one, float32 has the multiples of 2^-24, and 128 words are rounded to each. Here the words of one
multiple end. It is an odd one, so that this word, in the middle between two, is rounded up."""
_BEYOND = (1.0 - _NEAR * 2.0**-31) / 2.0
"""Probability of each of the two tails."""
TAIL = -NormalDist().inv_cdf(_BEYOND)
"""Where the tails begin, in standard deviations: 4.0."""
_TAIL = np.float32(TAIL / math.sqrt(2.0))
"""Where the tails begin in results of erfinv: between the last one that stays and the next."""


def hidden_share(stddev: float) -> float:
    """Compute the standard deviation of a draw's Gaussian part, divided by that of the draw.

    The result is just below one.
    """
    return math.sqrt(1.0 - _BLUR_VARIANCE / (stddev / grid_of(stddev)) ** 2)


SMALLEST_HIDDEN_SHARE = hidden_share(1.0)
"""At a power of two, where a standard deviation has the coarsest grid for its size."""


class Keystream:
    """Draws from AES-128 in counter mode, under a key that nothing else uses."""

    def __init__(self, key: bytes) -> None:
        self._bytes = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    def uniform(self, count: int) -> Tensor:
        """Draw float64 numbers in (0, 1], with 53 bits."""
        words = np.frombuffer(self._bytes.update(bytes(8 * count)), dtype="<u8")
        return torch.from_numpy(1.0 - unit(words))

    def dither_(self, out: Tensor) -> Tensor:
        """Overwrite contiguous numbers with uniform draws of 16 bits, from -1/2 to below 1/2."""
        memory = _SCRATCH
        for piece in out.view(-1).split(_CHUNK):
            count = piece.numel()
            self._bytes.update_into(_ZEROS[: 2 * count], memory.bytes)
            drawn = memory.numbers[:count]
            np.multiply(memory.halves[:count], np.float32(2.0**-16), out=drawn, dtype=np.float32)
            piece.copy_(torch.from_numpy(drawn))
        return out

    def normal_(self, out: Tensor, stddev: float) -> Tensor:
        """Overwrite contiguous numbers, on any device, with draws of N(0, stddev^2).

        Guarantees: draws are multiples of `grid_of(stddev)`.
        """
        grid, far = grid_of(stddev), _Far()
        for piece in out.view(-1).split(_CHUNK):
            drawn = self._whole_numbers(piece.numel(), stddev / grid, far)
            np.multiply(drawn, np.float32(grid), out=drawn)
            piece.copy_(torch.from_numpy(drawn))
        return self._draw_far(out, stddev, far)

    def add_(self, out: Tensor, stddev: float) -> Tensor:
        """Round contiguous numbers to `grid_of(stddev)`, and add the draws of `normal_` to them."""
        grid, far = grid_of(stddev), _Far()
        for piece in out.view(-1).split(_CHUNK):
            drawn = self._whole_numbers(piece.numel(), stddev / grid, far)
            if piece.dtype == torch.float32 and piece.device.type == "cpu":
                _add_to(piece.numpy(), drawn, grid)
            else:
                round_to_(piece, grid).add_(torch.from_numpy(drawn).to(piece), alpha=grid)
        return self._draw_far(out, stddev, far)

    def _whole_numbers(self, count: int, stddev: float, far: _Far) -> Floats:
        """Draw whole numbers of this standard deviation, in memory that the next call overwrites.

        Those beyond the tail have only the uniform part, and are noted in `far`. The calls are
        numpy's, which take half the time of torch's: on pieces of this size that saves a sixth.
        """
        memory = _SCRATCH
        self._bytes.update_into(_ZEROS[: 8 * count], memory.bytes)
        drawn, other = memory.numbers[:count], memory.others[:count]
        np.copyto(drawn, memory.words[:count], casting="unsafe")
        np.multiply(drawn, np.float32(2.0**-31), out=drawn)
        erfinv_(drawn)
        far.note_and_clear(drawn, other, memory.is_far[:count])
        np.multiply(drawn, np.float32(math.sqrt(2.0) * _gaussian_part(stddev)), out=drawn)
        np.rint(drawn, out=drawn)
        bits = memory.words[count : 2 * count]
        np.bitwise_and(bits, np.int32(0x7FFF7FFF), out=bits)
        one, two = memory.halves[2 * count : 3 * count], memory.halves[3 * count : 4 * count]
        np.copyto(other, np.subtract(one, two, out=memory.blur[:count]))
        return np.add(drawn, other, out=drawn)

    def _draw_far(self, out: Tensor, stddev: float, far: _Far) -> Tensor:
        places, sign = far.found()
        if places.numel():
            grid = grid_of(stddev)
            size = torch.special.ndtri(self.uniform(places.numel()).mul_(_BEYOND))
            size.mul_(_gaussian_part(stddev / grid)).round_().mul_(grid)
            out.view(-1).index_add_(0, places.to(out.device), size.copysign_(sign).to(out))
        return out


def _gaussian_part(stddev: float) -> float:
    return math.sqrt(stddev**2 - _BLUR_VARIANCE)


class _Far:
    """Notes the draws of one stream that lie beyond the tail. They are made again together."""

    def __init__(self) -> None:
        self._seen = 0
        self._places: list[NDArray[np.int64]] = []
        self._values: list[Floats] = []

    def note_and_clear(self, drawn: Floats, memory: Floats, is_far: NDArray[np.bool_]) -> None:
        """Note the draws beyond the tail, and set them to zero.

        `drawn` has the standard deviation sqrt(1/2), as erfinv leaves it.
        """
        places = np.flatnonzero(np.greater(np.abs(drawn, out=memory), _TAIL, out=is_far))
        if places.size:
            self._places.append(places + self._seen)
            self._values.append(drawn[places])
            drawn[places] = 0.0
        self._seen += len(drawn)

    def found(self) -> tuple[Tensor, Tensor]:
        """Return where the noted draws are, and numbers that have their signs."""
        if not self._places:
            return torch.empty(0, dtype=torch.int64), torch.empty(0)
        places, values = np.concatenate(self._places), np.concatenate(self._values)
        return torch.from_numpy(places), torch.from_numpy(values).double()


def _add_to(values: Floats, drawn: Floats, grid: float) -> None:
    np.multiply(values, np.float32(1.0 / grid), out=values)
    np.rint(values, out=values)
    np.add(values, drawn, out=values)
    np.multiply(values, np.float32(grid), out=values)


class _Scratch(threading.local):
    """Memory that a thread uses again and again: new memory would cost as much as the draws."""

    def __init__(self) -> None:
        self.bytes = bytearray(8 * _CHUNK + 16)  # the cipher asks for a block more than it fills
        self.words = np.frombuffer(self.bytes, dtype=np.int32)
        self.halves = np.frombuffer(self.bytes, dtype=np.int16)
        self.numbers = np.empty(_CHUNK, dtype=np.float32)
        self.others = np.empty(_CHUNK, dtype=np.float32)
        self.blur = np.empty(_CHUNK, dtype=np.int16)
        self.is_far = np.empty(_CHUNK, dtype=np.bool_)


_SCRATCH = _Scratch()
_ZEROS = memoryview(bytes(8 * _CHUNK))

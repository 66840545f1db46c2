"""Normal draws of a cryptographic keystream, on CPUs: whole numbers, whose law is known.

A word w of 32 random bits becomes x = w / 2^31, in float32, and x the number y that a normal draw
falls below with probability (1 + x) / 2. Rounded to a whole number, y alone would be poor noise: a
few of the words lead to each number, and not always as many (a tenth more or less, near zero; none
at all, far out). So the difference of two uniform draws of 15 bits is added, each a sixteenth to a
thirty-second of a standard deviation wide. That blurs it away, and what remains was computed number
by number (`tests/noise/test_law.py`): every whole number has the probability of a rounded normal
draw plus that difference, up to a factor of 1 +- 2e-5. Adding independent draws to a noisy number
costs no privacy. The normal part is made smaller by as much, so that the variance is right;
`hidden_share` says how much of the noise is Gaussian.

Beyond four standard deviations, where float32 has few numbers below one, and where a generator of b
bits ends after sqrt(2 b ln 2) standard deviations, draws are made anew from 53 bits: they go on to
9.3. An example that could push a coordinate to where no other data set's noise ever reaches would
be told from its absence for certain, more often than a small delta allows.
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
"""Numbers drawn at a time: what stays in cache, and enough that calls cost less than draws."""

_BLUR = 1 << 15
"""Values of each of the two uniform draws."""
_BLUR_VARIANCE = 2 * (_BLUR**2 - 1) / 12 + 1 / 12
"""Of both together, and of rounding."""

_NEAR = 128 * (2 * round(math.erf(4.0 / math.sqrt(2.0)) * 2.0**23) + 1) + 64
"""Words from here on, and from minus here down, are replaced. Near one, float32 has the multiples
of 2^-24, 128 words each: this is where one of them ends (an odd one, so that this word, which lies
in the middle between two, is rounded up)."""
_BEYOND = (1.0 - _NEAR * 2.0**-31) / 2.0
"""Probability of each of the two tails."""
TAIL = -NormalDist().inv_cdf(_BEYOND)
"""Where they begin, in standard deviations: 4.0."""
_TAIL = np.float32(TAIL / math.sqrt(2.0))
"""The same, of draws as erfinv makes them: between the last that stays and the next."""


def hidden_share(stddev: float) -> float:
    """Standard deviation of the Gaussian part of a draw, over that of the draw. Just below one."""
    return math.sqrt(1.0 - _BLUR_VARIANCE / (stddev / grid_of(stddev)) ** 2)


class Keystream:
    """AES-128 in counter mode, under a key that nothing else uses."""

    def __init__(self, key: bytes) -> None:
        self._bytes = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    def uniform(self, count: int) -> Tensor:
        """Float64 numbers in (0, 1], with 53 bits."""
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
        """Overwrite contiguous numbers, wherever they are, with draws of N(0, stddev^2).

        Guarantees: draws are multiples of `grid_of(stddev)`.
        """
        grid, far = grid_of(stddev), _Far()
        for piece in out.view(-1).split(_CHUNK):
            drawn = self._whole_numbers(piece.numel(), stddev / grid, far)
            np.multiply(drawn, np.float32(grid), out=drawn)
            piece.copy_(torch.from_numpy(drawn))
        return self._draw_far(out, stddev, far)

    def add_(self, out: Tensor, stddev: float) -> Tensor:
        """Round contiguous numbers to `grid_of(stddev)`, and add such draws to them."""
        grid, far = grid_of(stddev), _Far()
        for piece in out.view(-1).split(_CHUNK):
            drawn = self._whole_numbers(piece.numel(), stddev / grid, far)
            if piece.dtype == torch.float32 and piece.device.type == "cpu":
                _add_to(piece.numpy(), drawn, grid)
            else:
                round_to_(piece, grid).add_(torch.from_numpy(drawn).to(piece), alpha=grid)
        return self._draw_far(out, stddev, far)

    def _whole_numbers(self, count: int, stddev: float, far: _Far) -> Floats:
        """Draws of this standard deviation, in memory that the next call takes again.

        Those beyond the tail are zero but for their blur, and noted in `far`. With numpy, whose
        calls take half the time of torch's: on pieces of this size that is a sixth of the whole.
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
    """Draws of one stream that lie beyond the tail, to be made anew together."""

    def __init__(self) -> None:
        self._seen = 0
        self._places: list[NDArray[np.int64]] = []
        self._values: list[Floats] = []

    def note_and_clear(self, drawn: Floats, memory: Floats, is_far: NDArray[np.bool_]) -> None:
        """`drawn` has the standard deviation sqrt(1/2), as erfinv leaves it."""
        places = np.flatnonzero(np.greater(np.abs(drawn, out=memory), _TAIL, out=is_far))
        if places.size:
            self._places.append(places + self._seen)
            self._values.append(drawn[places])
            drawn[places] = 0.0
        self._seen += len(drawn)

    def found(self) -> tuple[Tensor, Tensor]:
        """Where they are, and numbers of their signs."""
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
    """Fresh memory would cost as much as the draws."""

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

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
from torch import Tensor

from lightning_dpsparse.hashing import unit
from lightning_dpsparse.noise.erfinv import erfinv_
from lightning_dpsparse.noise.grid import grid_of

_CHUNK = 1 << 17
"""Numbers drawn at a time: what stays in cache, and enough that calls cost less than draws."""

_BLUR = 1 << 15
"""Values of each of the two uniform draws."""
_BLUR_VARIANCE = 2 * (_BLUR**2 - 1) / 12 + 1 / 12
"""Of both together, and of rounding."""

_NEAR = 128 * round(math.erf(4.0 / math.sqrt(2.0)) * 2.0**24) + 64
"""Words from here on, and from minus here down, are replaced. Near one, float32 has the multiples
of 2^-24: 128 words each, so that this is where one of them ends."""
_BEYOND = (1.0 - _NEAR * 2.0**-31) / 2.0
"""Probability of each of the two tails."""
TAIL = -NormalDist().inv_cdf(_BEYOND)
"""Where they begin, in standard deviations: 4.0."""


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

    def normal_(self, out: Tensor, stddev: float) -> Tensor:
        """Overwrite contiguous numbers, wherever they are, with draws of N(0, stddev^2).

        Guarantees: draws are multiples of `grid_of(stddev)`.
        """
        grid = grid_of(stddev)
        for piece in out.view(-1).split(_CHUNK):
            torch.mul(self._whole_numbers(piece.numel(), stddev / grid).to(piece), grid, out=piece)
        return out

    def add_(self, out: Tensor, stddev: float) -> Tensor:
        """Round contiguous numbers to `grid_of(stddev)`, and add such draws to them."""
        grid = grid_of(stddev)
        for piece in out.view(-1).split(_CHUNK):
            drawn = self._whole_numbers(piece.numel(), stddev / grid).to(piece)
            piece.mul_(1.0 / grid).round_().add_(drawn).mul_(grid)
        return out

    def _whole_numbers(self, count: int, stddev: float) -> Tensor:
        """Draws of this standard deviation, in memory that the next call takes again."""
        memory, scale = _SCRATCH, math.sqrt(stddev**2 - _BLUR_VARIANCE)
        self._bytes.update_into(_ZEROS[: 8 * count], memory.bytes)
        drawn = memory.numbers[:count].copy_(memory.words[:count]).mul_(2.0**-31)
        erfinv_(drawn).mul_(scale * math.sqrt(2.0)).round_()
        far = np.flatnonzero(memory.unsigned_words[:count] + np.uint32(_NEAR) >= 2 * _NEAR)
        if far.size:
            beyond = torch.special.ndtri(self.uniform(far.size).mul_(_BEYOND)).mul_(-scale).round_()
            sign = memory.words[torch.from_numpy(far)].double()
            drawn[torch.from_numpy(far)] = beyond.copysign_(sign).float()
        blur = memory.halves[2 * count : 4 * count].bitwise_right_shift_(1)
        return drawn.add_(torch.sub(blur[:count], blur[count:], out=memory.blur[:count]))


class _Scratch(threading.local):
    """Fresh memory would cost as much as the draws."""

    def __init__(self) -> None:
        self.bytes = bytearray(8 * _CHUNK + 16)  # the cipher asks for a block more than it fills
        self.words = torch.frombuffer(self.bytes, dtype=torch.int32)
        self.unsigned_words = self.words.numpy().view(np.uint32)
        self.halves = torch.frombuffer(self.bytes, dtype=torch.int16)
        self.numbers = torch.empty(_CHUNK)
        self.blur = torch.empty(_CHUNK, dtype=torch.int16)


_SCRATCH = _Scratch()
_ZEROS = memoryview(bytes(8 * _CHUNK))

"""Normal draws of a cryptographic keystream, on CPUs.

A word w of 32 random bits becomes x = w / 2^31, in float32, and x the number that a normal draw
falls below with probability (1 + x) / 2. Then draws are turned in pairs: (y, z) becomes
(c y + s z, c z - s y), with c^2 + s^2 = 1. Normal draws stay normal and independent under that. But
one word alone makes one of few numbers, and the fewer the further from zero: whoever subtracts the
right gradient could see that it was right. Two words make any number.
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
from lightning_dpsparse.noise.tails import deepen_tails_

_CHUNK = 1 << 17
"""Numbers drawn at a time: what stays in cache, and enough that calls cost less than draws."""

TAIL = -NormalDist().inv_cdf(9.5 * 2.0**-25)
"""Standard deviations beyond which draws are made anew (`tails.py`): 5.0. Near one, x is a multiple
of 2^-24; this is where the reach of the ninth below one ends, so that x tells exactly which draws
are beyond."""

_COS, _SIN = math.cos(1.0), math.sin(1.0)


class Keystream:
    """AES-128 in counter mode, under a key that nothing else uses."""

    def __init__(self, key: bytes) -> None:
        self._bytes = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    def uniform(self, count: int) -> Tensor:
        """Float64 numbers in (0, 1], with 53 bits."""
        words = np.frombuffer(self._bytes.update(bytes(8 * count)), dtype="<u8")
        return torch.from_numpy(1.0 - unit(words))

    def normal_(self, out: Tensor, stddev: float) -> Tensor:
        """Overwrite contiguous numbers, wherever they are, with draws of N(0, stddev^2)."""
        for piece in out.view(-1).split(_CHUNK):
            self._add_(piece.zero_(), stddev)
        return out

    def add_(self, out: Tensor, stddev: float) -> Tensor:
        """Add such draws to them."""
        for piece in out.view(-1).split(_CHUNK):
            self._add_(piece, stddev)
        return out

    def _add_(self, piece: Tensor, stddev: float) -> None:
        if piece.dtype != torch.float32 or piece.device.type != "cpu":
            drawn = torch.zeros(piece.numel())
            self._add_(drawn, stddev)
            piece += drawn.to(piece)
            return
        # Not a matrix product: users may have those rounded to 8 bits.
        half, scale = (piece.numel() + 1) // 2, stddev * math.sqrt(2.0)
        y, z = self._halves(half)
        one, two = piece[:half], piece[half:]
        one.add_(y, alpha=scale * _COS).add_(z, alpha=scale * _SIN)
        two.add_(z[: len(two)], alpha=scale * _COS).sub_(y[: len(two)], alpha=scale * _SIN)

    def _halves(self, count: int) -> tuple[Tensor, Tensor]:
        """Twice so many draws of N(0, 1/2), which erfinv makes, each of a word of its own."""
        memory, both = _SCRATCH, 2 * count
        self._bytes.update_into(_ZEROS[: 4 * both], memory.bytes)
        drawn = memory.numbers[:both].copy_(memory.words[:both]).mul_(2.0**-31)
        deepen_tails_(erfinv_(drawn), math.sqrt(0.5), self.uniform, TAIL)
        return drawn[:count], drawn[count:]


class _Scratch(threading.local):
    """Fresh memory would cost as much as the draws."""

    def __init__(self) -> None:
        self.bytes = bytearray(4 * _CHUNK + 16)  # the cipher asks for a block more than it fills
        self.words = torch.frombuffer(self.bytes, dtype=torch.int32)
        self.numbers = torch.empty(_CHUNK)


_SCRATCH = _Scratch()
_ZEROS = memoryview(bytes(4 * _CHUNK))

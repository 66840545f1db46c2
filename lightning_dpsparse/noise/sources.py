"""Three ways to turn a key and a stream into standard normal draws.

SecureNoise a cryptographic keystream (AES-128 in counter mode), for those who must assume an
            adversary that predicts ordinary generators.
FastNoise   the same for many numbers on CPUs, where nothing is quicker; for others torch's own
            generator, re-keyed for every stream. The default.
RowNoise    a draw is a function of (key, purpose, table, global row, column, step) alone: slow, the
            same however a table is cut, and replayable. Made of 53 bits: it ends at 8.6 standard
            deviations, where the others go on (`tails.py`).
"""

from __future__ import annotations

import math
import threading
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_dpsparse.hashing import U64, mix, unit
from lightning_dpsparse.noise.keys import KEY_BYTES, RunKey, Stream
from lightning_dpsparse.noise.keystream import Keystream
from lightning_dpsparse.noise.tails import deepen_tails_

# R rows, D columns


_CHUNK_ON_GPU = 1 << 21
"""Numbers added at a time."""


class NoiseSource(Protocol):
    """Fills tensors with normal draws of mean zero.

    Guarantees: fills of different streams are independent; the same key and stream give the same
    draws again.
    """

    @property
    def is_by_row(self) -> bool:
        """Whether a draw belongs to a row of a table, so that tables are filled one by one."""
        ...

    def fill_(
        self,
        out_RD: Tensor,
        stream: Stream,
        stddev: float = 1.0,
        rows_R: Tensor | None = None,
        steps_R: Tensor | None = None,
    ) -> Tensor:
        """Overwrite `out_RD`; `rows_R` are its rows within the shard, if not the first ones.

        `steps_R` gives each row its own step instead of the stream's, where a draw belongs to a
        row; elsewhere the stream alone names the draws.
        """
        ...

    def add_(self, out_RD: Tensor, stream: Stream, stddev: float) -> Tensor:
        """Add such draws to `out_RD`, which is contiguous, without memory for all of them."""
        ...

    def uniform(self, count: int, stream: Stream, device: torch.device) -> Tensor:
        """Float64 numbers in (0, 1], with 53 bits."""
        ...


class SecureNoise:
    """A cryptographic keystream (`keystream.py`), made on CPUs."""

    is_by_row: ClassVar[bool] = False

    def __init__(self, key: RunKey) -> None:
        self._key = key

    def fill_(
        self,
        out_RD: Tensor,
        stream: Stream,
        stddev: float = 1.0,
        rows_R: Tensor | None = None,
        steps_R: Tensor | None = None,
    ) -> Tensor:
        return self._keystream(stream).normal_(out_RD, stddev)

    def add_(self, out_RD: Tensor, stream: Stream, stddev: float) -> Tensor:
        return self._keystream(stream).add_(out_RD, stddev)

    def uniform(self, count: int, stream: Stream, device: torch.device) -> Tensor:
        return self._keystream(stream).uniform(count).to(device)

    def _keystream(self, stream: Stream) -> Keystream:
        return Keystream(self._key.bytes_for(stream, KEY_BYTES))


_FEW = 1 << 16
"""So many numbers are drawn before a keystream has caught up with torch's generator on CPUs, which
is quicker to begin."""


class FastNoise(SecureNoise):
    """Whatever is quickest: torch's own generator, or for many numbers on CPUs the keystream."""

    def fill_(
        self,
        out_RD: Tensor,
        stream: Stream,
        stddev: float = 1.0,
        rows_R: Tensor | None = None,
        steps_R: Tensor | None = None,
    ) -> Tensor:
        if out_RD.device.type == "cpu" and out_RD.numel() > _FEW:
            return super().fill_(out_RD, stream, stddev)
        return _normal_(out_RD, stddev, self._generator(out_RD.device, stream))

    def add_(self, out_RD: Tensor, stream: Stream, stddev: float) -> Tensor:
        if out_RD.device.type == "cpu" and out_RD.numel() > _FEW:
            return super().add_(out_RD, stream, stddev)
        generator, flat = self._generator(out_RD.device, stream), out_RD.view(-1)
        drawn = flat.new_empty(min(flat.numel(), _CHUNK_ON_GPU))
        for piece in flat.split(_CHUNK_ON_GPU):
            piece += _normal_(drawn[: piece.numel()], stddev, generator)
        return out_RD

    def uniform(self, count: int, stream: Stream, device: torch.device) -> Tensor:
        return _uniform(count, self._generator(device, stream))

    def _generator(self, device: torch.device, stream: Stream) -> torch.Generator:
        """At the stream's beginning. On CPU the same object every time: use it at once."""
        if device.type == "cpu":
            return _MERSENNE.at(self._key, stream)
        generator = torch.Generator(device)
        return generator.manual_seed(int.from_bytes(self._key.bytes_for(stream, 8), "big") >> 1)


def _normal_(out: Tensor, stddev: float, generator: torch.Generator) -> Tensor:
    out.normal_(0.0, stddev, generator=generator)
    return deepen_tails_(out, stddev, lambda count: _uniform(count, generator))


def _uniform(count: int, generator: torch.Generator) -> Tensor:
    return 1.0 - torch.rand(
        count, dtype=torch.float64, device=generator.device, generator=generator
    )


class _Mersenne(threading.local):
    """torch's CPU generator with all of its 624 words drawn from the key, one in every thread.

    `manual_seed` will not do: it keeps the low 32 bits of the seed, and a run with a few million
    streams would use some of them twice.
    """

    _WORDS = 624
    _WORDS_AT = 24  # byte offset of the words in torch's generator state; each takes eight bytes

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._state = self._generator.get_state()
        end = self._WORDS_AT + 8 * self._WORDS
        self._words = self._state.numpy()[self._WORDS_AT : end].view("<u8")

    def at(self, key: RunKey, stream: Stream) -> torch.Generator:
        self._words[:] = np.frombuffer(key.bytes_for(stream, 4 * self._WORDS), dtype="<u4")
        return self._generator.set_state(self._state)


_MERSENNE = _Mersenne()


class RowNoise:
    """Keyed by global row: what one rank draws, any other placement draws too."""

    is_by_row: ClassVar[bool] = True

    def __init__(self, key: RunKey) -> None:
        self._key = key

    def fill_(
        self,
        out_RD: Tensor,
        stream: Stream,
        stddev: float = 1.0,
        rows_R: Tensor | None = None,
        steps_R: Tensor | None = None,
    ) -> Tensor:
        first_row, first_column = stream.shard
        rows, columns = out_RD.shape
        row_R = (
            np.arange(first_row, first_row + rows, dtype=np.uint64)
            if rows_R is None
            else rows_R.cpu().numpy().astype(np.uint64) + np.uint64(first_row)
        )
        column_D = np.arange(first_column, first_column + columns, dtype=np.uint64)
        if steps_R is None:
            drawn_RD = self._draw(stream, stream.step, row_R, column_D)
        else:
            step_R = steps_R.cpu().numpy()
            drawn_RD = np.empty((rows, columns), dtype=np.float32)
            for step in np.unique(step_R):
                here = step_R == step
                drawn_RD[here] = self._draw(stream, int(step), row_R[here], column_D)
        return out_RD.copy_(torch.from_numpy(drawn_RD)).mul_(stddev)

    def _draw(self, stream: Stream, step: int, row_R: U64, column_D: U64) -> NDArray[np.float32]:
        everywhere = Stream(stream.purpose, stream.table, step)
        k0, k1, k2 = np.frombuffer(self._key.bytes_for(everywhere, 24), dtype="<u8")
        cell_RD = mix(mix(row_R ^ k0)[:, None] + mix(column_D ^ k1)) ^ k2
        radius = np.sqrt(-2.0 * np.log(1.0 - unit(mix(cell_RD))))
        angle = 2.0 * math.pi * unit(mix(cell_RD + np.uint64(1)))
        return (radius * np.cos(angle)).astype(np.float32)

    def add_(self, out_RD: Tensor, stream: Stream, stddev: float) -> Tensor:
        out_RD += self.fill_(torch.empty_like(out_RD), stream, stddev)
        return out_RD

    def uniform(self, count: int, stream: Stream, device: torch.device) -> Tensor:
        """Keyed by the stream, as elsewhere: these belong to no row."""
        k0, k1 = np.frombuffer(self._key.bytes_for(stream, 16), dtype="<u8")
        words = mix(mix(np.arange(count, dtype=np.uint64) ^ k0) ^ k1)
        return torch.from_numpy(1.0 - unit(words)).to(device)

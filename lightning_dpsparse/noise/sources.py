"""Three ways to turn a key and a stream into normal draws on a public grid (`grid.py`).

SecureNoise draws from a cryptographic keystream (AES-128 in counter mode), which is made on CPUs
            (`keystream.py`).
FastNoise   does the same for many numbers on CPUs, where nothing is faster. It draws few numbers
            with numpy's generator, and numbers on other devices with the device's own, in float64.
            These get a new key for every stream. FastNoise is the default.
RowNoise    makes a draw a function of (key, purpose, table, global row, column, step) alone. So the
            draws do not depend on how a table is cut, and can be replayed, but they are slow. They
            are made of 53 bits and end at 8.6 standard deviations, where the others go on.
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
from lightning_dpsparse.noise.grid import grid_of, round_to_
from lightning_dpsparse.noise.keys import KEY_BYTES, RunKey, Stream
from lightning_dpsparse.noise.keystream import Keystream

# R rows, D columns


_CHUNK_ON_GPU = 1 << 21
"""Numbers that are drawn at a time on a GPU."""


class NoiseSource(Protocol):
    """Fills tensors with normal draws of mean zero.

    Guarantees: fills of different streams are independent; the same key and stream give the same
    draws again; draws are multiples of `grid_of(stddev)`.
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
        """Overwrite `out_RD` with draws of N(0, stddev^2).

        `rows_R` are the rows of `out_RD` within the shard; None means the first ones. If the source
        draws by row, `steps_R` gives each row a step of its own instead of the stream's. With other
        sources the stream alone names the draws.
        """
        ...

    def add_(self, out_RD: Tensor, stream: Stream, stddev: float) -> Tensor:
        """Round contiguous numbers to `grid_of(stddev)`, and add the draws of `fill_` to them."""
        ...

    def dither_(self, out_RD: Tensor, stream: Stream, rows_R: Tensor | None = None) -> Tensor:
        """Overwrite `out_RD` with uniform draws of 16 bits or more, from -1/2 to 1/2."""
        ...

    def uniform(self, count: int, stream: Stream, device: torch.device) -> Tensor:
        """Draw float64 numbers in (0, 1], with 53 bits."""
        ...


class SecureNoise:
    """Draws from a cryptographic keystream (`keystream.py`), which is made on CPUs."""

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

    def dither_(self, out_RD: Tensor, stream: Stream, rows_R: Tensor | None = None) -> Tensor:
        return self._keystream(stream).dither_(out_RD)

    def uniform(self, count: int, stream: Stream, device: torch.device) -> Tensor:
        return self._keystream(stream).uniform(count).to(device)

    def _keystream(self, stream: Stream) -> Keystream:
        return Keystream(self._key.bytes_for(stream, KEY_BYTES))


_FEW = 1 << 14
"""Up to this many numbers, numpy is faster than a keystream, which takes longer to begin."""


class FastNoise(SecureNoise):
    """Draws in the fastest way.

    On CPUs this is the keystream, or for few numbers numpy's ziggurat. Elsewhere it is the device's
    own generator.
    """

    def fill_(
        self,
        out_RD: Tensor,
        stream: Stream,
        stddev: float = 1.0,
        rows_R: Tensor | None = None,
        steps_R: Tensor | None = None,
    ) -> Tensor:
        if out_RD.device.type != "cpu":
            return self._add_on_device_(out_RD.zero_(), stream, stddev)
        if out_RD.numel() > _FEW:
            return super().fill_(out_RD, stream, stddev)
        return self._few(out_RD, stream, stddev)

    def add_(self, out_RD: Tensor, stream: Stream, stddev: float) -> Tensor:
        if out_RD.device.type != "cpu":
            return self._add_on_device_(out_RD, stream, stddev)
        if out_RD.numel() > _FEW:
            return super().add_(out_RD, stream, stddev)
        drawn = self._few(torch.empty_like(out_RD), stream, stddev)
        return round_to_(out_RD, grid_of(stddev)).add_(drawn)

    def dither_(self, out_RD: Tensor, stream: Stream, rows_R: Tensor | None = None) -> Tensor:
        if out_RD.device.type == "cpu":
            return super().dither_(out_RD, stream)
        return out_RD.uniform_(-0.5, 0.5, generator=self._generator(out_RD.device, stream))

    def uniform(self, count: int, stream: Stream, device: torch.device) -> Tensor:
        if device.type == "cpu":
            return torch.from_numpy(1.0 - _PHILOX.at(self._key, stream).random(count))
        generator = self._generator(device, stream)
        return 1.0 - torch.rand(count, dtype=torch.float64, device=device, generator=generator)

    def _few(self, out: Tensor, stream: Stream, stddev: float) -> Tensor:
        """Draw few numbers, exact in float64 and without a largest one.

        A number takes four times as long as one of a keystream.
        """
        grid, drawn = grid_of(stddev), _PHILOX.at(self._key, stream).standard_normal(out.numel())
        np.rint(np.multiply(drawn, stddev / grid, out=drawn), out=drawn)
        return out.copy_(torch.from_numpy(drawn).view_as(out)).mul_(grid)

    def _add_on_device_(self, out: Tensor, stream: Stream, stddev: float) -> Tensor:
        """Round `out`, and add noise to it on its device.

        A draw is made of two in float64: their sum reaches further than either. The CPU need not
        wait for the device.
        """
        generator, grid = self._generator(out.device, stream), grid_of(stddev)
        for piece in out.view(-1).split(_CHUNK_ON_GPU):
            drawn = torch.randn(
                2, piece.numel(), dtype=torch.float64, device=out.device, generator=generator
            )
            whole = drawn.sum(0).mul_(stddev / grid / math.sqrt(2.0)).round_()
            piece.mul_(1.0 / grid).round_().add_(whole.to(piece.dtype)).mul_(grid)
        return out

    def _generator(self, device: torch.device, stream: Stream) -> torch.Generator:
        """Make a generator that stands at the beginning of the stream."""
        generator = torch.Generator(device)
        return generator.manual_seed(int.from_bytes(self._key.bytes_for(stream, 8), "big") >> 1)


class _Philox(threading.local):
    """A generator of numpy that gets a new key for every stream.

    Making a new generator would take longer than drawing.
    """

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._bits)
        self._state = self._bits.state

    def at(self, key: RunKey, stream: Stream) -> np.random.Generator:
        """Return the generator, at the beginning of the stream.

        It is the same object every time, so the draws must be made at once.
        """
        words = np.frombuffer(key.bytes_for(stream, KEY_BYTES), dtype="<u8")
        self._state["state"]["key"] = words
        self._bits.state = self._state
        return self._generator


_PHILOX = _Philox()


class RowNoise:
    """Draws by global row: the draws are the same wherever the rows are placed."""

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
        row_R, column_D = self._cells(out_RD, stream, rows_R)
        if steps_R is None:
            drawn_RD = self._draw(stream, stream.step, row_R, column_D)
        else:
            step_R = steps_R.cpu().numpy()
            drawn_RD = np.empty(out_RD.shape)
            for step in np.unique(step_R):
                here = step_R == step
                drawn_RD[here] = self._draw(stream, int(step), row_R[here], column_D)
        grid = grid_of(stddev)
        return out_RD.copy_(torch.from_numpy(np.rint(drawn_RD * (stddev / grid)))).mul_(grid)

    def dither_(self, out_RD: Tensor, stream: Stream, rows_R: Tensor | None = None) -> Tensor:
        row_R, column_D = self._cells(out_RD, stream, rows_R)
        words_RD = mix(self._words(stream, stream.step, row_R, column_D))
        return out_RD.copy_(torch.from_numpy(unit(words_RD) - 0.5))

    def _cells(self, out_RD: Tensor, stream: Stream, rows_R: Tensor | None) -> tuple[U64, U64]:
        """Return the rows and columns of `out_RD` within the whole table."""
        first_row, first_column = stream.shard
        rows, columns = out_RD.shape
        row_R = (
            np.arange(first_row, first_row + rows, dtype=np.uint64)
            if rows_R is None
            else rows_R.cpu().numpy().astype(np.uint64) + np.uint64(first_row)
        )
        return row_R, np.arange(first_column, first_column + columns, dtype=np.uint64)

    def _words(self, stream: Stream, step: int, row_R: U64, column_D: U64) -> U64:
        everywhere = Stream(stream.purpose, stream.table, step)
        k0, k1, k2 = np.frombuffer(self._key.bytes_for(everywhere, 24), dtype="<u8")
        return mix(mix(row_R ^ k0)[:, None] + mix(column_D ^ k1)) ^ k2

    def _draw(self, stream: Stream, step: int, row_R: U64, column_D: U64) -> NDArray[np.float64]:
        cell_RD = self._words(stream, step, row_R, column_D)
        radius = np.sqrt(-2.0 * np.log(1.0 - unit(mix(cell_RD))))
        angle = 2.0 * math.pi * unit(mix(cell_RD + np.uint64(1)))
        drawn: NDArray[np.float64] = radius * np.cos(angle)
        return drawn

    def add_(self, out_RD: Tensor, stream: Stream, stddev: float) -> Tensor:
        round_to_(out_RD, grid_of(stddev))
        return out_RD.add_(self.fill_(torch.empty_like(out_RD), stream, stddev))

    def uniform(self, count: int, stream: Stream, device: torch.device) -> Tensor:
        """Draw by the stream, as other sources do: these numbers belong to no row."""
        k0, k1 = np.frombuffer(self._key.bytes_for(stream, 16), dtype="<u8")
        words = mix(mix(np.arange(count, dtype=np.uint64) ^ k0) ^ k1)
        return torch.from_numpy(1.0 - unit(words)).to(device)

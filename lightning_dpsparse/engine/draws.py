"""Noise for rows of a stack of tables, from the stream that belongs to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from lightning_dpsparse.engine.lookups import Stack
from lightning_dpsparse.noise.keys import Stream
from lightning_dpsparse.noise.sources import NoiseSource

# U rows, D width of a table


@dataclass(frozen=True)
class StackNoise:
    """Draws for one stack of tables on this rank: its owner draws, nobody else."""

    source: NoiseSource
    stack: Stack
    table_names: Sequence[str]
    """Of all tables of the kernel."""
    shard_offsets: Sequence[tuple[int, int]]
    """First row and column of each table's piece here."""
    stream_table: int
    """The table whose name the stream has, where all share one: it has rows here."""

    def fill_(
        self,
        out_UD: Tensor,
        purpose: str,
        step: int,
        rows_U: Tensor,
        *,
        part: int = 0,
        stddev: float = 1.0,
        steps_U: Tensor | None = None,
    ) -> Tensor:
        """Overwrite `out_UD` with N(0, stddev^2) for these rows, in increasing order.

        (purpose, step, part) must be new with every call, unless the source is by row: then a draw
        is a function of purpose, row and step alone, and `steps_U` may give each row its own step.
        """
        if not self.source.is_by_row:  # one stream for all
            stream = self._stream(self.stream_table, purpose, step, part)
            return self.source.fill_(out_UD, stream, stddev)
        for t, (start, stop) in enumerate(pairwise(self.stack.bounds(rows_U))):
            here = slice(start, stop)
            self.source.fill_(
                out_UD[here],
                self._stream(self.stack.tables[t], purpose, step, part),
                stddev,
                rows_U[here] - self.stack.starts[t],
                None if steps_U is None else steps_U[here],
            )
        return out_UD

    def dither_(
        self, out_UD: Tensor, purpose: str, step: int, rows_U: Tensor, *, part: int = 0
    ) -> Tensor:
        """Overwrite `out_UD` with uniform draws between -1/2 and 1/2, named as in `fill_`."""
        if not self.source.is_by_row:
            return self.source.dither_(out_UD, self._stream(self.stream_table, purpose, step, part))
        for t, (start, stop) in enumerate(pairwise(self.stack.bounds(rows_U))):
            here = slice(start, stop)
            stream = self._stream(self.stack.tables[t], purpose, step, part)
            self.source.dither_(out_UD[here], stream, rows_U[here] - self.stack.starts[t])
        return out_UD

    def _stream(self, table: int, purpose: str, step: int, part: int) -> Stream:
        return Stream(purpose, self.table_names[table], step, self.shard_offsets[table], part)

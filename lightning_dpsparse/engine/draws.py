"""Noise for rows of a stack of tables, from the stream that belongs to them.

Noise comes from named streams (`noise/keys.py`), and noise that must be independent may not share a
name. Tables are cut over ranks and updated in stacks, so the name of a stream says which piece of
which table it is for. This file puts the names together; `noise/sources.py` makes the draws.
"""

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
    """Draws noise for one stack of tables, on the rank that holds it and on no other."""

    source: NoiseSource
    stack: Stack
    table_names: Sequence[str]
    """Names of all tables of the kernel."""
    shard_offsets: Sequence[tuple[int, int]]
    """First row and first column of each table's piece on this rank."""
    stream_table: int
    """The table that names the stream where all tables share one. It has rows on this rank."""

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
        """Overwrite `out_UD` with draws of N(0, stddev^2) for these rows, which are increasing.

        (purpose, step, part) must be new with every call, unless the source draws by row. In that
        case a draw is a function of purpose, row and step alone, and `steps_U` may give each row a
        step of its own.
        """
        if not self.source.is_by_row:  # all rows share one stream
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
        """Overwrite `out_UD` with uniform draws between -1/2 and 1/2, with names as in `fill_`."""
        if not self.source.is_by_row:
            return self.source.dither_(out_UD, self._stream(self.stream_table, purpose, step, part))
        for t, (start, stop) in enumerate(pairwise(self.stack.bounds(rows_U))):
            here = slice(start, stop)
            stream = self._stream(self.stack.tables[t], purpose, step, part)
            self.source.dither_(out_UD[here], stream, rows_U[here] - self.stack.starts[t])
        return out_UD

    def _stream(self, table: int, purpose: str, step: int, part: int) -> Stream:
        return Stream(purpose, self.table_names[table], step, self.shard_offsets[table], part)

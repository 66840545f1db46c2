"""How large the tables' gradients are: rows that a step updates, against all rows.

DP-SGD updates every row, and mechanisms such as AdaFEST update few. Papers report how many times
smaller that makes the gradient. The rows may be counted only if the mechanism makes them public.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from lightning_dpsparse.engine.rows import RowGradient
from lightning_dpsparse.engine.step_inputs import Read, short_name
from lightning_dpsparse.sharded.collections import sharded_tables


class GradientSize:
    """Counts the rows that steps update, table by table, and the numbers in them.

    It gives counts only if the mechanism chooses rows privately. Else they would tell of the data.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        configs = dict(sharded_tables(module))
        self._place = {name: i for i, name in enumerate(configs)}
        self._numbers_in_all = sum(c.num_embeddings * c.embedding_dim for c in configs.values())
        self._device = device
        self._forget()

    def _forget(self) -> None:
        self._steps, self._numbers, self._is_secret = 0, 0, False
        self._rows = [0] * len(self._place)

    def add(self, reads: Sequence[Read], updated: Sequence[Sequence[RowGradient]]) -> None:
        """Count one step on this rank."""
        self._steps += 1
        for read, gradients in zip(reads, updated):
            public = read.state.public_rows(gradients)
            if public is None:
                self._is_secret = True
                continue
            for stack, rows_U in zip(read.layout.stacks, public):
                self._numbers += rows_U.numel() * read.layout.widths[stack.tables.start]
                for table, (start, stop) in zip(stack.tables, pairwise(stack.bounds(rows_U))):
                    if read.shard_offsets[table][1] == 0:  # the first columns count the row
                        self._rows[self._place[read.table_names[table]]] += stop - start

    def take(self) -> dict[str, float]:
        """Counts of the mean step since the last call, over all ranks. All ranks must call it.

        DP-SGD updates every number of every table. The reduction says how many times fewer numbers
        were updated.
        """
        totals = torch.tensor([*self._rows, self._numbers, self._is_secret], dtype=torch.float64)
        totals = totals.to(self._device)
        if dist.get_world_size() > 1:
            dist.all_reduce(totals)
        *rows, numbers, is_secret = (totals / max(1, self._steps)).tolist()
        self._forget()
        if is_secret:
            return {}
        return {
            **{f"rows_updated/{short_name(name)}": rows[i] for name, i in self._place.items()},
            "rows_updated": sum(rows),
            "gradient_reduction": self._numbers_in_all / max(1.0, numbers),
        }

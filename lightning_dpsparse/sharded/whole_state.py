"""A module's state dict with whole tables, gathered on one rank.

A process that only holds the plain module, such as the one that started the ranks, can load it.
Checkpoints are written shard by shard instead (`checkpoint.py`): a large table never has to fit
into one process there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dpsparse.sharded.collections import sharded_tables
from lightning_dpsparse.sharded.shards import local_shards


def gather_whole_state(module: nn.Module) -> dict[str, Any] | None:
    """The state dict on rank 0, and None on all others. All ranks must call it."""
    tables = [path for path, _ in sharded_tables(module)]
    state = {key: value for key, value in module.state_dict().items() if key not in tables}
    for path in tables:
        pieces = [
            (shard.row_offset, shard.column_offset, shard.table_shape, shard.weight.detach().cpu())
            for shard in local_shards(module)
            if shard.key == path
        ]
        gathered: list[Any] | None = [None] * dist.get_world_size() if _is_first() else None
        dist.gather_object(pieces, gathered)
        if gathered is not None:
            state[path] = _joined_pieces([piece for rank in gathered for piece in rank])
    return state if _is_first() else None


def _is_first() -> bool:
    return dist.get_rank() == 0


def _joined_pieces(pieces: list[tuple[int, int, tuple[int, int], Tensor]]) -> Tensor:
    whole = torch.empty(pieces[0][2])
    for row, column, _, weight in pieces:
        whole[row : row + weight.shape[0], column : column + weight.shape[1]] = weight
    return whole

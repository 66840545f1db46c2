"""Cuts a batch into parts, so that a large private step fits in memory.

Each part is read and clipped by itself, and the sum over all parts gets noise once (`private.py`).
Ranks read together, so all of them need the same number of parts, if only empty ones.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lightning_dpsparse.sharded.examples import cut_examples, num_examples


def split_batch(batch: Any, most: int, device: torch.device) -> list[Any]:
    """Cut `batch` into parts of at most `most` examples, and into equally many on every rank."""
    size = num_examples(batch)
    parts = torch.tensor(-(-size // most), device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(parts, op=dist.ReduceOp.MAX)
    count = max(1, int(parts))
    if count == 1:
        return [batch]
    bounds = [size * i // count for i in range(count + 1)]
    return [cut_examples(batch, size, bounds[i], bounds[i + 1]) for i in range(count)]


def empty_batch(batch: Any) -> Any:
    """A batch without examples that has the form of this one."""
    return cut_examples(batch, num_examples(batch), 0, 0)

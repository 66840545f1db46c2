"""Cut a batch into parts, so that a large private step fits in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def split_batch(batch: Any, most: int, device: torch.device) -> list[Any]:
    """`batch` in parts of at most `most` examples, as many parts on every rank.

    Tensors and KeyedJaggedTensors are cut along the examples, inside dataclasses, dicts, lists and
    tuples; anything else goes whole into every part.
    """
    size = _num_examples(batch)
    parts = torch.tensor(-(-size // most), device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(parts, op=dist.ReduceOp.MAX)
    count = max(1, int(parts))
    if count == 1:
        return [batch]
    bounds = [size * i // count for i in range(count + 1)]
    return [_cut(batch, size, start, stop) for start, stop in zip(bounds, bounds[1:])]  # noqa: RUF007


def nobody(batch: Any) -> Any:
    """A batch of no examples, in the form of this one."""
    return _cut(batch, _num_examples(batch), 0, 0)


def _num_examples(batch: Any) -> int:
    for value in leaves(batch):
        if isinstance(value, KeyedJaggedTensor):
            return value.stride()
    raise ValueError(
        f"Expected a KeyedJaggedTensor in the batch, found none in {type(batch).__name__}: its "
        "examples cannot be counted."
    )


def _children(value: Any) -> list[Any] | None:
    if isinstance(value, (Tensor, KeyedJaggedTensor)):
        return None
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else None


def leaves(value: Any) -> Iterator[Any]:
    """All that a batch is made of, inside dataclasses, dicts, lists and tuples."""
    children = _children(value)
    if children is None:
        yield value
    else:
        for child in children:
            yield from leaves(child)


def _cut(value: Any, size: int, start: int, stop: int) -> Any:
    if isinstance(value, KeyedJaggedTensor):
        return _cut_bags(value, start, stop)
    if isinstance(value, Tensor):
        return value[start:stop] if value.dim() and value.shape[0] == size else value
    children = _children(value)
    if children is None:
        return value
    cut = [_cut(child, size, start, stop) for child in children]
    if isinstance(value, dict):
        return dict(zip(value, cut))
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(cut)
    return type(value)(*cut)  # dataclasses and named tuples


def _cut_bags(features: KeyedJaggedTensor, start: int, stop: int) -> KeyedJaggedTensor:
    lengths = features.lengths().view(len(features.keys()), features.stride())
    inside = torch.zeros_like(lengths, dtype=torch.bool)
    inside[:, start:stop] = True
    keep = torch.repeat_interleave(inside.flatten(), lengths.flatten())
    weights = features.weights_or_none()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values()[keep],
        weights=None if weights is None else weights[keep],
        lengths=lengths[:, start:stop].flatten(),
        stride=stop - start,
    )

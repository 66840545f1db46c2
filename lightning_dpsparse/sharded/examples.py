"""Takes examples out of a batch, whatever the batch is made of.

Tensors, arrays, KeyedJaggedTensors and JaggedTensors hold one entry per example; lists of plain
values as long as the batch do, too. They are found inside dataclasses, dicts, lists and tuples.
Anything else belongs to the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from lightning_dpsparse.refused import Refused

# B examples, F features, L ids, K examples that are taken

_PLAIN = (str, bytes, int, float, bool, type(None))


@dataclass(frozen=True)
class Change:
    """What to do with each kind of thing that has one entry per example."""

    tensor: Callable[[Tensor], Tensor]
    bags: Callable[[KeyedJaggedTensor], KeyedJaggedTensor]
    jagged: Callable[[JaggedTensor], JaggedTensor]
    values: Callable[[list[Any]], list[Any]]


def num_examples(batch: Any, fallback: int | None = None) -> int:
    """Number of examples in a batch by its KeyedJaggedTensor, or `fallback` if it has none."""
    found = count_of(batch)
    if found is not None:
        return found
    if fallback is not None:
        return fallback
    raise Refused(
        f"Expected a KeyedJaggedTensor in the batch, found none in {type(batch).__name__}: its "
        "examples cannot be counted. Put the ids of all features into one."
    )


def count_of(batch: Any) -> int | None:
    """Number of examples in a batch by its KeyedJaggedTensor; None if it has none."""
    for value in leaves(batch):
        if isinstance(value, KeyedJaggedTensor):
            return value.stride()
    return None


def cut_examples(batch: Any, size: int, start: int, stop: int) -> Any:
    """The examples from `start` to `stop` of a batch of `size` examples."""
    return _changed(
        batch,
        size,
        Change(
            lambda value: value[start:stop],
            lambda bags: _cut_bags(bags, start, stop),
            lambda jagged: _take_jagged(jagged, torch.arange(start, stop)),
            lambda values: values[start:stop],
        ),
    )


def take_examples(batch: Any, size: int, index: list[int]) -> Any:
    """A batch of copies of these examples, in this order. An example may come twice."""
    index_K = torch.tensor(index, dtype=torch.int64)
    return _changed(
        batch,
        size,
        Change(
            lambda value: value[index_K.to(value.device)],
            lambda bags: _take_bags(bags, index_K),
            lambda jagged: _take_jagged(jagged, index_K),
            lambda values: [values[i] for i in index],
        ),
    )


def empty_examples(batch: Any, size: int, which: list[int]) -> Any:
    """A copy of a batch in which some examples have no ids, and zeros as floats. Integers stay."""
    index = torch.tensor(which, dtype=torch.int64)

    def zero(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value.clone()
        return value.index_fill(0, index.to(value.device), 0.0)

    def empty(bags: KeyedJaggedTensor) -> KeyedJaggedTensor:
        lengths_FB = bags.lengths().view(len(bags.keys()), size).clone()
        lengths_FB[:, index.to(lengths_FB.device)] = 0
        keep = _kept(bags.lengths(), lengths_FB.flatten() == bags.lengths())
        return _rebuilt(bags, lengths_FB, keep)

    def empty_jagged(jagged: JaggedTensor) -> JaggedTensor:
        lengths_B = jagged.lengths().index_fill(0, index.to(jagged.lengths().device), 0)
        keep = _kept(jagged.lengths(), lengths_B == jagged.lengths())
        return JaggedTensor(values=jagged.values()[keep], lengths=lengths_B)

    return _changed(batch, size, Change(zero, empty, empty_jagged, list))


def leaves(value: Any) -> Iterator[Any]:
    """Every value of a batch that lies inside its dataclasses, dicts, lists and tuples."""
    children = _children(value)
    if children is None:
        yield value
    else:
        for child in children:
            yield from leaves(child)


def tensors(batch: Any) -> Iterator[Tensor]:
    """All tensors of a batch, those of its bags included."""
    for value in leaves(batch):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (KeyedJaggedTensor, JaggedTensor)):
            yield value.values()
            yield value.lengths()
            weights = value.weights_or_none()
            if weights is not None:
                yield weights


def _children(value: Any) -> list[Any] | None:
    if isinstance(value, (Tensor, KeyedJaggedTensor, JaggedTensor, np.ndarray)):
        return None
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else None


def _changed(value: Any, size: int, change: Change) -> Any:
    if isinstance(value, KeyedJaggedTensor):
        return change.bags(value) if value.stride() == size else value
    if isinstance(value, JaggedTensor):
        return change.jagged(value) if value.lengths().numel() == size else value
    if isinstance(value, Tensor):
        return change.tensor(value) if value.dim() and value.shape[0] == size else value
    if isinstance(value, np.ndarray):
        if not value.ndim or value.shape[0] != size or value.dtype == object:
            return value
        return change.tensor(torch.from_numpy(value)).numpy()
    children = _children(value)
    if children is None:
        return value
    if isinstance(value, (list, tuple)) and len(value) == size and _is_one_each(children, size):
        return type(value)(change.values(children))
    changed = [_changed(child, size, change) for child in children]
    if isinstance(value, dict):
        return dict(zip(value, changed))
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(changed)
    return type(value)(*changed)  # dataclasses and named tuples


def _is_one_each(children: list[Any], size: int) -> bool:
    """Whether a list as long as the batch holds one entry per example, and not parts of a batch."""
    if all(isinstance(child, _PLAIN) for child in children):
        return bool(children)
    return all(
        isinstance(child, Tensor) and (not child.dim() or child.shape[0] != size)
        for child in children
    )


def _cut_bags(bags: KeyedJaggedTensor, start: int, stop: int) -> KeyedJaggedTensor:
    lengths_FB = bags.lengths().view(len(bags.keys()), bags.stride())
    inside_FB = torch.zeros_like(lengths_FB, dtype=torch.bool)
    inside_FB[:, start:stop] = True
    keep_L = _kept(bags.lengths(), inside_FB.flatten())
    return _rebuilt(bags, lengths_FB[:, start:stop], keep_L)


def _take_bags(bags: KeyedJaggedTensor, index_K: Tensor) -> KeyedJaggedTensor:
    lengths_FB = bags.lengths().view(len(bags.keys()), bags.stride())
    start_FB = (bags.lengths().cumsum(0) - bags.lengths()).view_as(lengths_FB)
    index_K = index_K.to(lengths_FB.device)
    lengths_FK = lengths_FB[:, index_K]
    return _rebuilt(bags, lengths_FK, _positions(start_FB[:, index_K].flatten(), lengths_FK))


def _take_jagged(jagged: JaggedTensor, index_K: Tensor) -> JaggedTensor:
    lengths_B = jagged.lengths()
    start_B = lengths_B.cumsum(0) - lengths_B
    index_K = index_K.to(lengths_B.device)
    at = _positions(start_B[index_K], lengths_B[index_K])
    return JaggedTensor(values=jagged.values()[at], lengths=lengths_B[index_K])


def _positions(start: Tensor, lengths: Tensor) -> Tensor:
    """start, start + 1, ... for each of the pieces, one after the other."""
    lengths = lengths.flatten()
    first = lengths.cumsum(0) - lengths
    within = torch.arange(int(lengths.sum()), device=lengths.device)
    return within + torch.repeat_interleave(start - first, lengths)


def _kept(lengths: Tensor, is_kept: Tensor) -> Tensor:
    """For every id, whether its bag is kept."""
    return torch.repeat_interleave(is_kept, lengths)


def _rebuilt(bags: KeyedJaggedTensor, lengths: Tensor, at: Tensor) -> KeyedJaggedTensor:
    weights = bags.weights_or_none()
    return KeyedJaggedTensor(
        keys=bags.keys(),
        values=bags.values()[at],
        weights=None if weights is None else weights[at],
        lengths=lengths.flatten(),
        stride=lengths.shape[1],
    )

"""The average of a whole model on this rank: pieces of tables, and dense layers.

Dense layers are averaged in every step, since every step moves all of them. Tables are averaged by
rows (`engine/averaging.py`): with a privacy plan the mechanism's state sees to it, without one the
lookups do (`cut.py`). Buffers are not averaged: an average has those of the weights. `swap` lets
averages and weights change places, so that evaluation and files see the average.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

from lightning_dpsparse.engine.averaging import AverageClock, AverageOfRest, RowAverage
from lightning_dpsparse.sharded.collections import sharded_collections
from lightning_dpsparse.sharded.cut import PrivateLookup
from lightning_dpsparse.sharded.kernel import Kernel
from lightning_dpsparse.sharded.shards import local_kernels, tables_hidden


@dataclass(frozen=True)
class LocalWeights:
    """The parameters of a model on this rank, in memory of their own."""

    dense: Mapping[str, Tensor]
    tables: Sequence[Sequence[Tensor]]
    """For each kernel its stacks of tables."""


@torch.no_grad()
def copy_weights(module: nn.Module) -> LocalWeights:
    """Copy what a module holds on this rank."""
    dense = {name: parameter.clone() for name, parameter in _dense(module).items()}
    kernels = (kernel for _, kernel in local_kernels(module))
    return LocalWeights(dense, [[weight.clone() for weight in k.weights()] for k in kernels])


class ModelAverage:
    """The average of a module's parameters on this rank, from the next step on. `close` ends it.

    Args:
        half_life: Number of steps after which a step counts half; None means that all count alike.
        total: What all steps so far weigh together; zero begins anew.
        so_far: The average of these steps, if there are any.
    """

    def __init__(
        self,
        module: nn.Module,
        half_life: float | None,
        total: float = 0.0,
        so_far: LocalWeights | None = None,
    ) -> None:
        self._module, self._clock = module, AverageClock(half_life, total)
        self._dense = _dense(module)
        self._averages = {name: torch.zeros_like(p.detach()) for name, p in self._dense.items()}
        self._finite = [name for name, p in self._dense.items() if bool(p.isfinite().all())]
        self._infinite = [name for name in self._dense if name not in self._finite]
        """Masks, for instance. They are kept as they are: an average of infinities is NaN."""
        self._tables = [
            (kernel, _open(collection, kernel, self._clock))
            for collection in _lookups(module)
            for kernel in collection.all_kernels()
        ]
        self.is_swapped = False
        """Whether the module holds the averages."""
        self._marks: list[float] = []
        if so_far is not None:
            for name, average in self._averages.items():
                average.copy_(so_far.dense[name])
            for (_, table), given in zip(self._tables, so_far.tables, strict=True):
                table.start_from(given)

    def close(self) -> None:
        """No further step will be taken. The averages stay."""
        for collection in _lookups(self._module):
            collection.averages.clear()

    @property
    def total(self) -> float:
        """What all steps so far weigh together if the latest weighs one."""
        return self._clock.total

    @torch.no_grad()
    def note_step(self) -> None:
        """A step has been taken: dense layers are averaged now, and rows when they move."""
        assert not self.is_swapped
        share = self._clock.tick()
        if self._finite:
            averages = [self._averages[name] for name in self._finite]
            torch._foreach_lerp_(averages, [self._dense[name] for name in self._finite], share)
        for name in self._infinite:
            self._averages[name].copy_(self._dense[name])
        for _, table in self._tables:
            table.note_step(share)

    def bring_up_to_date(self) -> None:
        """The averages are about to be seen."""
        for _, table in self._tables:
            table.bring_up_to_date()

    @torch.no_grad()
    def swap(self) -> None:
        """Let averages and weights change places."""
        self.bring_up_to_date()
        for name, parameter in self._dense.items():
            before = parameter.clone()
            parameter.copy_(self._averages[name])
            self._averages[name].copy_(before)
        for _, table in self._tables:
            table.swap()
        self.is_swapped = not self.is_swapped
        self._marks = self._versions()

    def is_left_alone(self, module: nn.Module) -> bool:
        """Whether this is the module, and nobody has written to it since the last `swap`."""
        return module is self._module and self._versions() == self._marks

    @torch.no_grad()
    def _versions(self) -> list[float]:
        """What changes when somebody writes. Writes through `.data` show in the values alone."""
        dense = self._dense.values()
        return [
            *(parameter._version for parameter in dense),
            *(float(parameter.double().sum()) for parameter in dense),
            *(kernel.writes_by_others for kernel, _ in self._tables),
        ]

    def taken_out(self) -> LocalWeights:
        """The averages, while the module holds the weights. They are not copied."""
        assert not self.is_swapped
        return LocalWeights(self._averages, [table.averages for _, table in self._tables])

    def both(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of a state dict of the module, the same with averages, and with weights.

        Tensors are not copied.
        """
        self.bring_up_to_date()
        others = {
            parameter.data_ptr(): self._averages[name]
            for name, parameter in self._dense.items()
            if parameter.numel()
        }
        pieces = {place: piece for _, table in self._tables for place, piece in _pieces(table)}
        beside = {key: _beside(key, value, others, pieces) for key, value in state.items()}
        return (dict(state), beside) if self.is_swapped else (beside, dict(state))


def _lookups(module: nn.Module) -> Iterator[PrivateLookup]:
    for collection in sharded_collections(module).values():
        assert isinstance(collection, PrivateLookup)
        yield collection


def _dense(module: nn.Module) -> dict[str, nn.Parameter]:
    with tables_hidden(module):
        return {n: p for n, p in module.named_parameters() if p.is_floating_point()}


def _open(collection: PrivateLookup, kernel: Kernel, clock: AverageClock) -> RowAverage:
    """Average the rows of one kernel: in private training its mechanism sees to it."""
    if collection.is_guarded:
        return collection.states[kernel].open_average(clock)
    average = collection.averages[kernel] = AverageOfRest(kernel, clock)
    return average


Place = tuple[str, tuple[int, ...]]
"""Name of a table's weight in the state dict, and where a piece of it begins."""


def _pieces(table: RowAverage) -> Iterator[tuple[Place, Tensor]]:
    """What lies beside each table of a kernel, as views."""
    kernel = table.kernel
    for stack, beside_RD in zip(kernel.layout.stacks, table.averages):
        for i, t in enumerate(stack.tables):
            piece = beside_RD[stack.starts[i] : stack.starts[i + 1]]
            yield (kernel.table_names[t], tuple(kernel.shard_offsets[t])), piece


def _beside(
    key: str, value: Any, others: Mapping[int, Tensor], pieces: Mapping[Place, Tensor]
) -> Any:
    """What lies beside one entry of a state dict; buffers have nothing beside them."""
    if isinstance(value, ShardedTensor):
        shards = [
            Shard(pieces[key, tuple(shard.metadata.shard_offsets)], shard.metadata)
            if shard.tensor.numel()
            else shard
            for shard in value.local_shards()
        ]
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            shards, value.metadata(), process_group=value._process_group
        )
    if isinstance(value, Tensor) and value.numel():
        found = others.get(value.data_ptr())
        return value if found is None or found.shape != value.shape else found
    return value

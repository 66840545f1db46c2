"""One run's private steps: the engine, joined to sharded tables and a process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor, nn

from lightning_dpsparse.engine.ghost import DenseCapture, check_layers
from lightning_dpsparse.engine.step import Clipped, Ranks, Recipe, clipped_sums, release
from lightning_dpsparse.noise.keys import RunKey
from lightning_dpsparse.plan import PrivacyPlan
from lightning_dpsparse.sharded.seam import ShardedTables, all_reads
from lightning_dpsparse.sharded.shards import sharded_collections, tables_hidden


class PrivateSteps:
    """Opens the seams of a module's tables and takes private steps on it."""

    def __init__(self, module: nn.Module, plan: PrivacyPlan, expected_batch: int) -> None:
        check_layers(module)
        self._collections = [
            collection
            for collection in sharded_collections(module).values()
            if isinstance(collection, ShardedTables)
        ]
        with tables_hidden(module):
            trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._dense = DenseCapture(trainable)
        self._recipe = Recipe(
            plan.mechanism, plan.clipping, plan.clip_norm, plan.noise_multiplier, expected_batch
        )
        self._noise = plan.make_source(_shared_key(plan))
        self._sums: Clipped | None = None
        self._flat = self._dense.new_flat()
        self._step = 0

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Around the forward pass of a step."""
        self._forget()
        for collection in self._collections:
            collection.is_cut = True
        try:
            with self._dense:
                yield
        finally:
            for collection in self._collections:
                collection.is_cut = False

    def add_part(self, loss_n: Tensor) -> None:
        """Backward pass and clipping of one part of the batch. Nothing is updated yet."""
        for parameter in self._dense.parameters.values():
            parameter.grad = None
        reads, ranks = all_reads(self._collections), self._ranks(loss_n.numel())
        out = self._flat if self._sums is None else None  # fresh memory costs more than the work
        part = clipped_sums(loss_n, reads, self._dense, self._recipe, ranks, out)
        self._sums = part if self._sums is None else self._sums + part

    def step(self, loss_n: Tensor) -> None:
        """The last part of the batch, then noise and the update of all."""
        self.add_part(loss_n)
        assert self._sums is not None
        release(
            self._sums,
            all_reads(self._collections),
            self._dense,
            self._recipe,
            self._ranks(loss_n.numel()),
            self._noise,
            self._step,
        )
        self._sums = None
        self._step += 1
        self._forget()

    def start(self) -> None:
        """Before the first part of a batch: whatever an interrupted step left is void."""
        self._sums = None
        for collection in self._collections:
            collection.start_step()

    def _forget(self) -> None:
        self._dense.clear()
        for collection in self._collections:
            collection.reads.clear()

    def _ranks(self, local_size: int) -> Ranks:
        padded = {collection.padded_size for collection in self._collections if collection.reads}
        if len(padded) != 1 or local_size > max(padded):
            raise ValueError(
                "Expected one loss for every example of the batch that the tables read, found "
                f"{local_size} losses. Return one loss per example, in order."
            )
        size = padded.pop()
        world, rank = dist.get_world_size(), dist.get_rank()
        return Ranks(world * size, rank * size, _sum_over_ranks)


def _sum_over_ranks(tensor: Tensor) -> None:
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor)


def _shared_key(plan: PrivacyPlan) -> RunKey:
    """Rank 0's key on every rank: shards differ by stream, replicated layers draw alike."""
    keys = [plan.make_key()]
    dist.broadcast_object_list(keys, src=0)
    return keys[0]

"""One run's private steps: the engine, joined to sharded tables and a process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dpsparse.engine.dense import DenseForms
from lightning_dpsparse.engine.ghost import DenseCapture, check_layers
from lightning_dpsparse.engine.rounding import check_price, price
from lightning_dpsparse.engine.step import Clipped, Ranks, Recipe, clipped_sums, release
from lightning_dpsparse.mechanisms.lazydp import LazyDP
from lightning_dpsparse.noise.keys import RunKey
from lightning_dpsparse.run_plan import RunPlan
from lightning_dpsparse.sharded.collections import sharded_collections
from lightning_dpsparse.sharded.debts import KernelDebts, Progress, pay_all
from lightning_dpsparse.sharded.gradient_size import GradientSize
from lightning_dpsparse.sharded.seam import Seam, all_reads
from lightning_dpsparse.sharded.shards import tables_hidden

T = TypeVar("T")


class PrivateSteps:
    """Opens the seams of a module's tables and takes private steps on it."""

    _unit_sizes: Sequence[int] | None = None

    def __init__(
        self, module: nn.Module, run: RunPlan, key: RunKey, *, diagnose: bool = False
    ) -> None:
        check_layers(module)
        self._collections = [
            collection
            for collection in sharded_collections(module).values()
            if isinstance(collection, Seam)
        ]
        with tables_hidden(module):
            trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._dense = DenseCapture(trainable)
        plan = run.plan
        self._forms = DenseForms(plan.dense, module, trainable)
        self._recipe = Recipe(
            plan.mechanism,
            plan.clipping,
            plan.clip_norm,
            run.noise_multiplier,
            run.expected_batch,
            plan.make_source(key),
            diagnose,
        )
        check_price(self.rounding_price)
        for collection in self._collections:
            pay_all(list(collection.debts.values()))  # what a run that was interrupted left
            collection.debts.clear()
            if isinstance(plan.mechanism, LazyDP):
                collection.defer_noise(
                    plan.mechanism, self._recipe.noise, self._recipe.noise_stddev
                )
            if plan.mechanism.needs_whole_rows:
                collection.check_whole_rows(type(plan.mechanism).__name__)
        self._sums: Clipped | None = None
        self._counts: Tensor | None = None
        self._gradient_size: GradientSize | None = None
        self._flat = self._dense.new_flat()
        self._step = 0

    @contextmanager
    def capture(self, *, is_whole: bool = True) -> Iterator[None]:
        """Around the forward pass of a step, or of a part of it."""
        self._forget()
        for collection in self._collections:
            collection.is_cut, collection.is_whole = True, is_whole
        try:
            with self._dense:
                yield
        finally:
            for collection in self._collections:
                collection.is_cut = False

    def add_part(self, loss_n: Tensor) -> None:
        """Backward pass and clipping of one part of the batch. Nothing is updated yet."""
        mechanism = self._recipe.mechanism
        if mechanism.chooses_by_batch:
            raise ValueError(
                "Expected the whole batch in one part, found more: "
                f"{type(mechanism).__name__} chooses rows by all of it. Leave max_physical_batch "
                "out, or draw fewer examples."
            )
        if self._unit_sizes is not None:
            raise ValueError(
                "Expected the whole batch in one part, found more: a user's examples must be "
                "clipped together. Leave max_physical_batch out, or draw fewer users."
            )
        self._clip(loss_n)

    def step(self, loss_n: Tensor) -> None:
        """The last part of the batch, then noise and the update of all."""
        self._clip(loss_n)
        assert self._sums is not None
        for debts in self._debts():
            debts.owe_for(self._step, self._recipe.noise_stddev)
        release(
            self._sums,
            all_reads(self._collections),
            self._dense,
            self._recipe,
            self._ranks(loss_n.numel()),
            self._step,
        )
        self._counts = self._count_rows() if self._recipe.diagnose else None
        if self._gradient_size is not None:
            self._gradient_size.add(all_reads(self._collections), self._sums.tables)
        self._sums = None
        self._forget()

    def pay_all(self, progress: Progress | None = None) -> None:
        """Noise that was put off lands now. Local work: ranks need not wait for each other."""
        pay_all(self._debts(), progress)

    def _debts(self) -> list[KernelDebts]:
        return [debts for collection in self._collections for debts in collection.debts.values()]

    def start(self, step: int, unit_sizes: Sequence[int] | None = None) -> None:
        """Before the first part of a batch: whatever an interrupted step left is void.

        `step` names the noise: never the same for two batches under one key.
        `unit_sizes` is how many examples each user has in this rank's batch, in order: a user is
        then clipped as one. Without it every example is. All ranks give it, or none.
        """
        if unit_sizes is not None and min(unit_sizes, default=1) < 1:
            raise ValueError(
                f"Expected at least one example of every user, found {min(unit_sizes)}. Leave out "
                "users without examples."
            )
        self._step, self._sums, self._unit_sizes = step, None, unit_sizes
        self._dense.set_forms(self._forms.at(step, self._recipe.noise))
        if self._flat.numel() != self._dense.size:
            self._flat = self._dense.new_flat()
        for collection in self._collections:
            collection.start_step()

    def _count_rows(self) -> Tensor:
        """Units clipped and in all, rows read and in all, over all ranks."""
        assert self._sums is not None
        assert self._sums.units_clipped is not None
        counts = self._sums.units_clipped.new_zeros(4)
        counts[2] = sum(g.rows_U.numel() for read in self._sums.tables for g in read)
        reads = all_reads(self._collections)
        counts[3] = sum(stack.num_rows for read in reads for stack in read.layout.stacks)
        _sum_over_ranks(counts)
        counts[:2] = self._sums.units_clipped  # every rank has counted all
        return counts

    def diagnostics(self) -> dict[str, float]:
        """Of the last step, where asked for. Made from private data without noise."""
        if self._counts is None:
            return {}
        clipped, units, read, rows = (float(count) for count in self._counts)
        return {"units_clipped": clipped / max(1.0, units), "rows_read": read / max(1.0, rows)}

    def watch_gradient_size(self, module: nn.Module, device: torch.device) -> None:
        """From now on, where it is no secret."""
        if self._recipe.mechanism.releases_rows:
            self._gradient_size = GradientSize(module, device)

    def gradient_size(self) -> dict[str, float]:
        """Of the mean step since the last call; empty where it is a secret. Asks all ranks."""
        return {} if self._gradient_size is None else self._gradient_size.take()

    @property
    def rounding_price(self) -> float:
        """The part of the clip norm that is kept for rounding, rows of tables aside."""
        recipe = self._recipe
        if recipe.noise_stddev == 0:
            return 0.0
        sensitivity = recipe.clip_norm / recipe.expected_batch
        return price(recipe.noise_stddev, sensitivity, recipe.expected_batch, self._dense.size)

    @property
    def noise_stddev(self) -> float:
        """Of the noise on each coordinate of the mean gradient."""
        return self._recipe.noise_stddev

    def _clip(self, loss_n: Tensor) -> None:
        for parameter in self._dense.parameters.values():
            parameter.grad = None
        reads, ranks = all_reads(self._collections), self._ranks(loss_n.numel())
        leader_B = None if self._unit_sizes is None else self._leaders(loss_n, ranks)
        out = self._flat if self._sums is None else None  # fresh memory costs more than the work
        part = clipped_sums(
            loss_n, reads, self._dense, self._recipe, ranks, self._step, leader_B, out
        )
        self._sums = part if self._sums is None else self._sums + part

    def _forget(self) -> None:
        self._dense.clear()
        for collection in self._collections:
            collection.forget_read()

    def _ranks(self, local_size: int) -> Ranks:
        padded = {collection.padded_size for collection in self._collections} - {0}
        if len(padded) != 1 or local_size > max(padded):
            raise ValueError(
                "Expected one loss for every example of the batch that the tables read, found "
                f"{local_size} losses. Return one loss per example, in order."
            )
        size = padded.pop()
        world, rank = dist.get_world_size(), dist.get_rank()
        return Ranks(world * size, rank * size, _sum_over_ranks, rank, world)

    def _leaders(self, loss_n: Tensor, ranks: Ranks) -> Tensor | None:
        """The first example of every example's unit, for all ranks; None if each is its own."""
        sizes = torch.tensor(self._unit_sizes, dtype=torch.int64)
        if sizes.sum() != loss_n.numel():
            raise ValueError(
                f"Expected unit sizes that add up to the {loss_n.numel()} losses of this rank, "
                f"found {len(sizes)} users with {int(sizes.sum())} examples. Give the number of "
                "examples of each user, in the order of the batch."
            )
        all_B = torch.arange(ranks.num_examples, device=loss_n.device)
        # Padding leads itself, and makes the ranks' pieces equal in size.
        leader_P = all_B.view(dist.get_world_size(), -1)[dist.get_rank()].clone()
        first_U = ranks.first_example + sizes.cumsum(0) - sizes
        leader_P[: loss_n.numel()] = first_U.repeat_interleave(sizes).to(loss_n.device)
        leader_B = torch.empty_like(all_B)
        dist.all_gather_into_tensor(leader_B, leader_P)
        return None if torch.equal(leader_B, all_B) else leader_B


def _sum_over_ranks(tensor: Tensor) -> None:
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor)


def from_rank_zero(make: Callable[[], T]) -> T:
    """What rank 0 makes, on every rank; its error too, so that none waits for it."""
    made: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            made[0] = make()
        except Exception as error:
            made[1] = error
    dist.broadcast_object_list(made, src=0)
    if made[1] is not None:
        raise made[1]
    result: T = made[0]
    return result

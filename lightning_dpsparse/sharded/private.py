"""One run's private steps: the engine, joined to sharded tables and a process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dpsparse.engine.dense import DenseForms
from lightning_dpsparse.engine.ghost import DenseCapture, check_layers, padding_rows
from lightning_dpsparse.engine.graph import graph_of
from lightning_dpsparse.engine.mechanism import WholeBatch
from lightning_dpsparse.engine.rounding import check_price, price
from lightning_dpsparse.engine.state import MechanismState, Progress, Reading
from lightning_dpsparse.engine.step import Clipped, Ranks, StepConfig, clipped_sums, release
from lightning_dpsparse.noise.keys import RunKey
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.run_plan import RunPlan
from lightning_dpsparse.sharded.collections import sharded_collections
from lightning_dpsparse.sharded.cut import PrivateLookup, all_reads
from lightning_dpsparse.sharded.dense_parameters import DenseParameters
from lightning_dpsparse.sharded.gradient_size import GradientSize
from lightning_dpsparse.sharded.kernel_read import KernelRead
from lightning_dpsparse.sharded.observation import Observation
from lightning_dpsparse.sharded.table_weights import watch_weights
from lightning_dpsparse.sharded.whole_batch import Parts, list_ids

T = TypeVar("T")


class PrivateSteps:
    """Opens the seams of a module's tables and takes private steps on it. `close` it in the end."""

    _unit_sizes: Sequence[int] | None = None
    _num_examples: int | None = None

    def __init__(
        self,
        module: nn.Module,
        run: RunPlan,
        key: RunKey,
        *,
        diagnose: bool = False,
        probe: Callable[[], None] | None = None,
    ) -> None:
        check_layers(module)
        self._module, self._plan, self._probe = module, run.plan, probe
        self._collections = [
            collection
            for collection in sharded_collections(module).values()
            if isinstance(collection, PrivateLookup)
        ]
        self.parameters = DenseParameters(module)
        self._padding = padding_rows(module)
        plan = run.plan
        self._config = StepConfig(
            plan.mechanism,
            plan.clipping,
            plan.clip_norm,
            run.noise_multiplier,
            run.expected_batch,
            plan.make_source(key),
            diagnose,
        )
        self._take_up_parameters()
        check_price(self.rounding_price)
        self._undo: list[Callable[[], None]] = []
        self.state = self._open()
        for collection in self._collections:
            collection.is_guarded = True
            self._undo.append(watch_weights(collection, partial(_before_read, collection)))
        self._sums: Clipped | None = None
        self._whole_batch: WholeBatch | None = None
        self._counts: Tensor | None = None
        self._gradient_size: GradientSize | None = None
        self._step = 0
        self._is_open = False
        """Whether a step was charged and has not been released yet."""
        self._seen = 0
        """Examples of the step so far, on this rank."""
        self.released: dict[int, tuple[Tensor, int]] = {}
        """The gradient that each dense parameter, by identity, got last, and its version then."""
        self._known_paths: set[object] = set()
        self.is_probe_due = False
        """Whether the probe is to look at this step, whatever its path."""

    def _open(self) -> MechanismState:
        """The mechanism's state for this run, known to every collection."""
        for collection in self._collections:
            collection.before_release()  # what a run that was interrupted left
            collection.states.clear()
        kernels = [(c, kernel) for c in self._collections for kernel in c.all_kernels()]
        state = self._config.open([kernel for _, kernel in kernels])
        for (collection, kernel), table in zip(kernels, state.tables):
            collection.states[kernel] = table
        return state

    def _take_up_parameters(self) -> None:
        trainable = self.parameters.trainable
        self._dense = DenseCapture(trainable)
        self._forms = DenseForms(self._plan.dense, self._module, trainable)
        self._flat = self._dense.new_flat()

    def close(self) -> None:
        """The module is an ordinary one again."""
        self.parameters.close()
        for undo in self._undo:
            undo()
        self._undo = []
        for collection in self._collections:
            collection.is_guarded = False

    @contextmanager
    def capture(self, *, is_whole: bool = True) -> Iterator[None]:
        """Around the forward pass of a step, or of a part of it."""
        self._forget()
        with self._cut(is_whole=is_whole), self._dense:
            yield

    @contextmanager
    def _cut(self, *, is_whole: bool) -> Iterator[None]:
        for collection in self._collections:
            collection.reading = Reading.WHOLE_BATCH if is_whole else Reading.PART
        try:
            yield
        finally:
            for collection in self._collections:
                collection.reading = Reading.OUTSIDE

    def observe(self, forward: Callable[[], Tensor]) -> Observation:
        """One pass that is looked at and leads to nothing."""
        with self.capture(is_whole=False):
            loss_n = forward()
        loss_n = self._read_the_rest(loss_n)
        self._check_sizes(loss_n)
        padded_size = self._collections[0].padded_size
        return Observation(loss_n, all_reads(self._collections), self._dense, padded_size)

    def read_in_parts(self, parts: Parts) -> None:
        """The batch of this step comes in these parts. To be called before the first of them."""
        self._whole_batch = WholeBatch(
            lambda: list_ids(parts, self._collections, self._config, sum_over_ranks, self._step)
        )

    def add_part(self, loss_n: Tensor) -> None:
        """Backward pass and clipping of one part of the batch. Nothing is updated yet."""
        if self._unit_sizes is not None:
            raise Refused(
                "Expected the whole batch in one part, found more: a user's examples must be "
                "clipped together. Leave max_physical_batch out, or draw fewer users."
            )
        self._clip(loss_n)

    def step(self, loss_n: Tensor) -> None:
        """The last part of the batch, then noise and the update of all."""
        self._clip(loss_n)
        self._is_open = False
        if self._num_examples is not None and self._seen != self._num_examples:
            raise Refused(
                "Expected the examples that were drawn for this step, found another number of "
                "them. Leave none out and add none: give an example that should not count a loss "
                "of zero."
            )
        sums, reads, ranks = self._sums, all_reads(self._collections), self._ranks(loss_n)
        assert sums is not None
        if sums.word and self._probe is not None:
            self._probe()  # before anything is released
        release(sums, reads, self._dense, self.state, ranks, self._step)
        for parameter, row in self._padding:
            if parameter.grad is not None:
                parameter.grad[row] = 0.0  # noise would move it
        gradients = ((id(p), p.grad) for p in self._dense.parameters.values())
        self.released = {key: (g, g._version) for key, g in gradients if g is not None}
        self._counts = self._count_rows(sums, reads) if self._config.diagnose else None
        if self._gradient_size is not None:
            self._gradient_size.add(reads, sums.tables)
        self._sums = None
        self._forget()

    def table_versions(self) -> list[list[int]]:
        """How often each table was written to from Python, the mechanism's own writes aside."""
        return [[k.writes_by_others for k in c.all_kernels()] for c in self._collections]

    def before_release(self, progress: Progress | None = None) -> None:
        """The tables are about to be seen. Local work: ranks need not wait for each other."""
        self.state.before_release(progress)

    def start(
        self,
        step: int,
        unit_sizes: Sequence[int] | None = None,
        num_examples: int | None = None,
    ) -> bool:
        """Before the first part of a batch: whatever an interrupted step left is void.

        `step` names the noise: never the same for two batches under one key.
        `unit_sizes` is how many examples each user has in this rank's batch, in order: a user is
        then clipped as one. Without it every example is. All ranks give it, or none.
        `num_examples` is how many were drawn for this rank, where that is known.

        Returns whether other parameters than before are trainable.
        """
        if unit_sizes is not None and min(unit_sizes, default=1) < 1:
            raise Refused(
                "Expected at least one example of every user, found none of some. Leave out users "
                "without examples."
            )
        self._step, self._sums, self._unit_sizes = step, None, unit_sizes
        self._num_examples, self._seen, self._is_open = num_examples, 0, True
        self._whole_batch = None
        has_changed = self.parameters.follow()
        if has_changed:
            self._take_up_parameters()
        self._dense.set_forms(self._forms.at(step, self._config.noise))
        if self._flat.numel() != self._dense.size:
            self._flat = self._dense.new_flat()
        for collection in self._collections:
            collection.start_step()
        return has_changed

    def _count_rows(self, sums: Clipped, reads: Sequence[KernelRead]) -> Tensor:
        """Units clipped and in all, rows read and in all, over all ranks."""
        assert sums.units_clipped is not None
        counts = sums.units_clipped.new_zeros(4)
        counts[2] = sum(g.rows_U.numel() for read in sums.tables for g in read)
        counts[3] = sum(stack.num_rows for read in reads for stack in read.layout.stacks)
        sum_over_ranks(counts)
        counts[:2] = sums.units_clipped  # every rank has counted all
        return counts

    def diagnostics(self) -> dict[str, float]:
        """Of the last step, where asked for. Made from private data without noise."""
        if self._counts is None:
            return {}
        clipped, units, read, rows = (float(count) for count in self._counts)
        return {"units_clipped": clipped / max(1.0, units), "rows_read": read / max(1.0, rows)}

    def watch_gradient_size(self, module: nn.Module, device: torch.device) -> None:
        """Start counting the rows that steps update, where the mechanism makes them public."""
        self._gradient_size = GradientSize(module, device)

    def gradient_size(self) -> dict[str, float]:
        """Rows in the mean step since the last call, over all ranks; empty if they are secret."""
        return {} if self._gradient_size is None else self._gradient_size.take()

    @property
    def rounding_price(self) -> float:
        """The part of the clip norm that is kept for rounding, rows of tables aside."""
        recipe = self._config
        if recipe.noise_stddev == 0:
            return 0.0
        sensitivity = recipe.clip_norm / recipe.expected_batch
        return price(recipe.noise_stddev, sensitivity, recipe.expected_batch, self._dense.size)

    @property
    def noise_stddev(self) -> float:
        """Of the noise on each coordinate of the mean gradient."""
        return self._config.noise_stddev

    def _clip(self, loss_n: Tensor) -> None:
        if not self._is_open:
            raise Refused(
                "Expected one backward pass for every step that is charged, found a second one: it "
                "would see the same examples at no price. Return all losses from training_step, "
                "and let the optimizer call its closure once."
            )
        for parameter in self._dense.parameters.values():
            parameter.grad = None
        loss_n = self._read_the_rest(loss_n)
        self._check_backward(loss_n)
        ranks = self._ranks(loss_n)
        self._seen += loss_n.numel()
        first_of_unit_B = None if self._unit_sizes is None else self._leaders(loss_n, ranks)
        out = self._flat if self._sums is None else None  # fresh memory costs more than the work
        part = clipped_sums(
            loss_n,
            all_reads(self._collections),
            self._dense,
            self._config,
            self.state,
            ranks,
            self._step,
            first_of_unit_B,
            out,
            self._whole_batch,
        )
        self._sums = part if self._sums is None else self._sums + part

    def _read_the_rest(self, loss_n: Tensor) -> Tensor:
        """Collections that the forward pass did not read are read by nobody: every step releases
        the same."""
        unread = [collection for collection in self._collections if not collection.padded_size]
        with self._cut(is_whole=False):
            for collection in unread:
                loss_n = loss_n + collection.read_empty_batch(loss_n.numel(), loss_n.device)
        return loss_n

    def _check_backward(self, loss_n: Tensor) -> None:
        """The graph must end where a private step can see it, and nowhere else."""
        graph, reads = graph_of(loss_n), all_reads(self._collections)
        if self._dense.has_gradients() or any(read.leaf.grad is not None for read in reads):
            raise Refused(
                "Expected the first backward pass of the step, found that one has been made in "
                "training_step. Return the losses instead, one per example."
            )
        leaves = {id(read.leaf) for read in reads}
        for leaf in graph.leaves:
            # TorchRec and the capture have leaves of no numbers.
            if leaf.numel() and id(leaf) not in leaves and not self._dense.made(leaf):
                raise Refused(
                    "Expected gradients on parameters of the module and on its tables only, found "
                    f"one for another tensor, of shape {tuple(leaf.shape)}"
                    f"{self._whose(leaf)}: it would be neither clipped nor noised. Register it as "
                    "a parameter before training begins, or detach it."
                )
        self._path = (graph.signature, self._dense.path)
        self._is_new = self._path not in self._known_paths

    def _whose(self, leaf: Tensor) -> str:
        names = [name for name, p in self._module.named_parameters() if p is leaf]
        return f" ({names[0]!r})" if names else ""

    def note_path(self) -> None:
        """The probe found nothing wrong with the path that this step took."""
        self._known_paths.add(self._path)
        self.is_probe_due = False

    def _forget(self) -> None:
        self._dense.clear()
        for collection in self._collections:
            collection.forget_read()

    def _check_sizes(self, loss_n: Tensor) -> None:
        for collection in self._collections:
            if collection.local_size != loss_n.numel():
                raise Refused(
                    "Expected one loss for each of the examples that "
                    f"{collection.path!r} read, in order, found another number of losses. "
                    "Leave no example out: multiply the loss of one that should not count by zero."
                )

    def _ranks(self, loss_n: Tensor) -> Ranks:
        self._check_sizes(loss_n)
        size = self._collections[0].padded_size
        world, rank = dist.get_world_size(), dist.get_rank()
        wants_probe = self._probe is not None and (self._is_new or self.is_probe_due)
        return Ranks(
            world * size, rank * size, sum_over_ranks, rank, world, word=float(wants_probe)
        )

    def _leaders(self, loss_n: Tensor, ranks: Ranks) -> Tensor | None:
        """The first example of every example's unit, for all ranks; None if each is its own."""
        sizes = torch.tensor(self._unit_sizes, dtype=torch.int64)
        if sizes.sum() != loss_n.numel():
            raise Refused(
                "Expected unit sizes that add up to the losses of this rank, found others. Give "
                "the number of examples of each user, in the order of the batch."
            )
        all_B = torch.arange(ranks.num_examples, device=loss_n.device)
        # Padding leads itself, and makes the ranks' pieces equal in size.
        first_of_unit_P = all_B.view(dist.get_world_size(), -1)[dist.get_rank()].clone()
        first_U = ranks.first_example + sizes.cumsum(0) - sizes
        first_of_unit_P[: loss_n.numel()] = first_U.repeat_interleave(sizes).to(loss_n.device)
        first_of_unit_B = torch.empty_like(all_B)
        dist.all_gather_into_tensor(first_of_unit_B, first_of_unit_P)
        return None if torch.equal(first_of_unit_B, all_B) else first_of_unit_B


def _before_read(collection: PrivateLookup) -> None:
    """Somebody is about to read a table's weights as they are."""
    if collection.is_cut:
        raise Refused(
            f"Expected training_step to read tables through {collection.path!r}, found that "
            "it reads a table's weight itself: what examples do to it would be neither clipped nor "
            "noised. Look rows up; for weight decay set it in FusedOptimizer."
        )
    collection.before_release()


def sum_over_ranks(tensor: Tensor) -> None:
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

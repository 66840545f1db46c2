"""All tables of a module in private training: they are cut together, and read in every step.

What a step releases must not depend on which tables its batch reads. So tables that the forward
pass left out read an empty batch, and get their noise like the others. Weights that user code reads
past the lookups are watched (`table_weights.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn

from lightning_dpsparse.engine.state import MechanismState, Reading
from lightning_dpsparse.engine.step import StepConfig
from lightning_dpsparse.engine.step_inputs import Ranks
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.collections import sharded_collections
from lightning_dpsparse.sharded.cut import PrivateLookup, all_reads
from lightning_dpsparse.sharded.kernel_read import KernelRead
from lightning_dpsparse.sharded.process_group import sum_over_ranks
from lightning_dpsparse.sharded.table_weights import watch_weights


class PrivateTables:
    """The sharded collections of a module, from the first private step to `close`."""

    def __init__(self, module: nn.Module) -> None:
        self.collections = [
            collection
            for collection in sharded_collections(module).values()
            if isinstance(collection, PrivateLookup)
        ]
        self._undo: list[Callable[[], None]] = []

    def open(self, config: StepConfig) -> MechanismState:
        """Open the mechanism's state for this run, and give it to every collection."""
        for collection in self.collections:
            collection.before_release()  # an interrupted run may have left work
            collection.states.clear()
        kernels = [(c, kernel) for c in self.collections for kernel in c.all_kernels()]
        state = config.open([kernel for _, kernel in kernels])
        for (collection, kernel), table in zip(kernels, state.tables):
            collection.states[kernel] = table
        for collection in self.collections:
            collection.is_guarded = True
            self._undo.append(watch_weights(collection, partial(_before_read, collection)))
        return state

    def close(self) -> None:
        """Make the tables ordinary ones again. What the mechanism keeps for them stays."""
        for undo in self._undo:
            undo()
        self._undo = []
        for collection in self.collections:
            collection.is_guarded = False

    def start_step(self) -> None:
        for collection in self.collections:
            collection.start_step()

    @contextmanager
    def cut(self, *, is_whole: bool) -> Iterator[None]:
        """Inside, lookups are those of a private step, or of one part of it."""
        for collection in self.collections:
            collection.reading = Reading.WHOLE_BATCH if is_whole else Reading.PART
        try:
            yield
        finally:
            for collection in self.collections:
                collection.reading = Reading.OUTSIDE

    def read_the_rest(self, loss_n: Tensor) -> Tensor:
        """Read an empty batch from collections that the forward pass did not read.

        Every step must release the same tables. Returns the losses with these reads in their graph.
        """
        unread = [collection for collection in self.collections if not collection.padded_size]
        with self.cut(is_whole=False):
            for collection in unread:
                loss_n = loss_n + collection.read_empty_batch(loss_n.numel(), loss_n.device)
        return loss_n

    def reads(self) -> list[KernelRead]:
        """What every kernel read in this step, or in this part of it."""
        return all_reads(self.collections)

    def ranks(self, loss_n: Tensor, word: float = 0.0) -> Ranks:
        """Where this rank's examples stand among all. The other ranks are told `word`."""
        for collection in self.collections:
            if collection.local_size != loss_n.numel():
                raise Refused(
                    "Expected one loss for each of the examples that "
                    f"{collection.path!r} read, in order, found another number of losses. "
                    "Leave no example out: multiply the loss of one that should not count by zero."
                )
        size, world, rank = self.padded_size, dist.get_world_size(), dist.get_rank()
        return Ranks(world * size, rank * size, sum_over_ranks, rank, world, word)

    @property
    def padded_size(self) -> int:
        """Number of examples of every rank, after padding."""
        return self.collections[0].padded_size

    def forget_reads(self) -> None:
        for collection in self.collections:
            collection.forget_read()

    def versions(self) -> list[list[int]]:
        """Number of writes to each kernel from Python, without those of the mechanism itself."""
        return [[k.writes_by_others for k in c.all_kernels()] for c in self.collections]


def _before_read(collection: PrivateLookup) -> None:
    """Prepare a table's weights for a read past the lookup, or refuse it in a private step."""
    if collection.is_cut:
        raise Refused(
            f"Expected training_step to read tables through {collection.path!r}, found that "
            "it reads a table's weight itself: what examples do to it would be neither clipped nor "
            "noised. Look rows up; for weight decay set it in FusedOptimizer."
        )
    collection.before_release()

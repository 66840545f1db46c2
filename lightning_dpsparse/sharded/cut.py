"""The cut: where a sharded lookup ends and the rest of the model begins.

In private training each kernel's output is replaced by a detached leaf. The backward pass stops
there and leaves the gradient on the rank that owns the rows, for the examples of all ranks. Before
and after every read the mechanism's state is called (engine/state.py): that is where deferred noise
is paid, for instance. Without a plan, averages of rows are told before the rows move. Nothing else
happens here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from lightning_dpsparse.engine.averaging import RowAverage
from lightning_dpsparse.engine.lookups import Bags
from lightning_dpsparse.engine.state import Reading, TableState, finish
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded import upstream
from lightning_dpsparse.sharded.collections import is_pooled, table_configs, weight_path
from lightning_dpsparse.sharded.kernel import Kernel
from lightning_dpsparse.sharded.kernel_read import KernelRead
from lightning_dpsparse.sharded.upstream import TablePiece

# P examples of one rank after padding, W ranks, B = W * P examples of all


class PrivateLookup(nn.Module):
    """A sharded collection of TorchRec's whose lookups can be cut.

    It also skips TorchRec's own initial values. These would come from each rank's generator, so
    that equal seeds give equal pieces, and from initialisers that see a flat view of a table.
    `initialise_shards` draws them instead.
    """

    def reset_parameters(self) -> None:
        """Do nothing, because `initialise_shards` draws the initial values."""

    def _create_lookups(self) -> None:
        super()._create_lookups()  # type: ignore[misc]
        self.reading = Reading.OUTSIDE
        """Why rows are read now. In a private step lookups are cut, unless gradients are off."""
        self.is_guarded = False
        """Whether reads outside a private step get no gradient, which would update the rows."""
        self.reads: list[KernelRead] = []
        self.padded_size = 0
        """Number of examples that every rank has in a private read, after padding to the largest
        rank. It is zero if there was no read. Ranks without tables know it too."""
        self.local_size = 0
        """Number of examples of this rank in a private read, without padding."""
        self.states: dict[Kernel, TableState] = {}
        """What the mechanism keeps for each kernel, from the first private run on."""
        self.averages: dict[Kernel, RowAverage] = {}
        """The averages of each kernel's rows, in training without a plan."""
        self.path = upstream.path_of(self)
        """Path of the collection in its module."""
        upstream.check_collection(self, is_pooled=is_pooled(self))
        self.is_weighted = is_pooled(self) and upstream.is_weighted(self)
        """Whether ids come with weights."""
        self.kernels = [
            [Kernel(module, self._pieces(module)) for module in modules]
            for modules in upstream.kernel_modules(self)
        ]
        """The kernels of each lookup on this rank."""
        for index, kernels in enumerate(self.kernels):
            for kernel in kernels:
                _Cut(self, index, kernel)
        self.register_state_dict_pre_hook(lambda *_: self.before_release())

    def _pieces(self, module: Any) -> list[TablePiece]:
        return [
            TablePiece(
                table.name,
                weight_path(self.path, self, table.name),
                upstream.shard_offset_of(table),
                upstream.has_all_columns(table),
            )
            for table in upstream.tables_of(module)
        ]

    def all_kernels(self) -> Iterator[Kernel]:
        return chain.from_iterable(self.kernels)

    @property
    def is_cut(self) -> bool:
        return self.reading.is_private

    @property
    def reading_now(self) -> Reading:
        """Why rows are read now. A read without gradients is outside a step, unless for ids."""
        is_cut = torch.is_grad_enabled() or self.reading is Reading.IDS
        return self.reading if is_cut else Reading.OUTSIDE

    def before_release(self) -> None:
        """Do what the mechanism put off, because the tables are about to be seen."""
        finish(list(self.states.values()))

    def forget_read(self) -> None:
        self.reads.clear()
        self.padded_size = self.local_size = 0

    def read_empty_batch(self, num_examples: int, device: torch.device) -> Tensor:
        """Read empty bags, for a step whose forward pass did not read these tables.

        They must get their noise all the same. Returns a zero whose graph leads to this read: in
        the backward pass other ranks may wait for this one.
        """
        keys = list(dict.fromkeys(f for c in table_configs(self) for f in c.feature_names))
        nothing = torch.zeros(0, device=device)
        empty = KeyedJaggedTensor(
            keys=keys,
            values=nothing.long(),
            weights=nothing if self.is_weighted else None,
            lengths=torch.zeros(len(keys) * num_examples, dtype=torch.int64, device=device),
            stride=num_examples,
        )
        return _sum_of(self(empty), is_pooled=is_pooled(self)) * 0.0

    def start_step(self) -> None:
        """Note how many steps were counted before the first forward pass of a private step."""
        for kernels in self.kernels:
            steps = max((kernel.steps for kernel in kernels), default=0)
            for kernel in kernels:
                kernel.steps_before = steps

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """Look rows up as TorchRec does. In a private step all batches are padded to the largest.

        Gloo cannot gather pieces of unequal size in the backward pass of row-wise tables. Padding
        examples have empty bags, and their outputs are cut off again.
        """
        if self.reading_now is Reading.OUTSIDE:
            return super().forward(features)
        size = self.local_size = features.stride()
        self.padded_size = _largest(size, features.device())
        if size == self.padded_size:
            return self._forward_unwatched(features)
        whole = self._forward_unwatched(_pad(features, self.padded_size)).wait()
        return _first_examples(whole, size, is_pooled=is_pooled(self))

    def _forward_unwatched(self, features: KeyedJaggedTensor) -> Any:
        """Look rows up without the capture of dense layers, which would find none and cost time."""
        with torch._C.DisableTorchFunction():
            return super().forward(features)


class _Cut:
    """Two hooks on one kernel, before and after every read."""

    def __init__(self, collection: PrivateLookup, lookup: int, kernel: Kernel) -> None:
        self._collection, self._lookup, self._kernel = collection, lookup, kernel
        self._steps = 0
        self._bags: Bags | None = None
        self._is_order_known = False
        self._ranks: list[int] | None = None
        kernel.module.register_forward_pre_hook(self._before_lookup)
        kernel.module.register_forward_hook(self._after_lookup)

    def _before_lookup(self, module: nn.Module, args: tuple[KeyedJaggedTensor]) -> None:
        """Call the mechanism's state when the ids are known and the rows are not read yet."""
        collection, reading = self._collection, self._collection.reading_now
        self._steps = self._kernel.steps
        state = collection.states.get(self._kernel)
        if state is None and self._kernel not in collection.averages:
            return
        features = args[0]
        self._bags = Bags(
            self._kernel.layout,
            features.values().long(),
            features.offsets().long(),
            features.weights_or_none() if collection.is_weighted else None,
        )
        if state is None:
            return
        state.before_read(self._bags, reading)
        if reading is Reading.IDS:
            nothing = self._bags.offsets.new_zeros(0, dtype=torch.float32)
            order_B = self._order(nothing.device)
            collection.reads.append(KernelRead(self._kernel, state, self._bags, nothing, order_B))

    def _after_lookup(
        self, module: nn.Module, args: tuple[KeyedJaggedTensor], output: Tensor
    ) -> Tensor | None:
        """Call the mechanism's state when the rows were read, and cut here in a private step."""
        collection, kernel = self._collection, self._kernel
        reading, bags, self._bags = collection.reading_now, self._bags, None
        self._correct_count(reading)
        if not reading.is_private:
            if bags is not None and output.requires_grad and kernel in collection.averages:
                # FBGEMM moves the rows in the backward pass, right after this hook of the output.
                average = collection.averages[kernel]
                output.register_hook(lambda _: average.before_update(bags.rows_of_stacks()))
            return output.detach() if collection.is_guarded else None
        if any(read.kernel is kernel for read in collection.reads):
            raise Refused(
                f"Expected the tables of {collection.path!r} to be read once in a private step, "
                "found a second call: an example's norm would miss what the two share. Read all "
                "features in one call."
            )
        assert bags is not None  # a mechanism is open in private steps
        state, output = collection.states[kernel], output.detach()
        state.after_read(bags, output, reading)
        leaf = output.requires_grad_()
        collection.reads.append(KernelRead(kernel, state, bags, leaf, self._order(output.device)))
        return leaf

    def _correct_count(self, reading: Reading) -> None:
        """Correct FBGEMM's count of optimizer steps.

        It counts every read as a step, those of evaluation and of every part of a batch included.
        """
        kernel, collection = self._kernel, self._collection
        if kernel.steps == self._steps:  # this optimizer does not count
            return
        if reading.is_private:
            kernel.set_steps(kernel.steps_before + 1)
        elif collection.is_guarded or not (collection.training and torch.is_grad_enabled()):
            kernel.set_steps(self._steps)

    def _order(self, device: torch.device) -> Tensor | None:
        """The example that each bag column holds; None if columns are in the order of examples."""
        if not self._is_order_known:  # TorchRec decides it in the first forward pass
            self._ranks = upstream.ranks_in_order(self._collection, self._lookup)
            self._is_order_known = True
        if self._ranks is None:
            return None
        size = self._collection.padded_size
        first = torch.tensor(self._ranks, device=device)[:, None] * size
        return (first + torch.arange(size, device=device)).flatten()


class ShardedTables(PrivateLookup, ShardedEmbeddingBagCollection):
    """Pooled tables, whose lookups can be cut."""


class ShardedSequences(PrivateLookup, ShardedEmbeddingCollection):
    """Tables whose rows come one by one, and whose lookups can be cut."""


def _first_examples(output: Any, size: int, *, is_pooled: bool) -> Any:
    """A collection's output for the first `size` examples. The others are padding, without rows."""
    if is_pooled:
        return KeyedTensor(output.keys(), output.length_per_key(), output.values()[:size])
    return {
        name: JaggedTensor(
            values=sequences.values(),
            lengths=sequences.lengths()[:size],
            weights=sequences.weights_or_none(),
        )
        for name, sequences in output.items()
    }


def _sum_of(output: Any, *, is_pooled: bool) -> Tensor:
    """The sum of everything in a collection's output, which may still be on its way."""
    values = [output] if is_pooled else output.values()
    return torch.stack([piece.values().sum() for piece in values]).sum()


def _largest(size: int, device: torch.device) -> int:
    """Number of examples in the largest of all ranks' batches, and at least one."""
    if dist.get_world_size() == 1:
        return max(1, size)
    largest = torch.tensor(size, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return max(1, int(largest))


def _pad(features: KeyedJaggedTensor, size: int) -> KeyedJaggedTensor:
    """Add empty bags at the end of every feature, up to `size` examples."""
    lengths = features.lengths().view(len(features.keys()), features.stride())
    padded = torch.nn.functional.pad(lengths, (0, size - features.stride()))
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        weights=features.weights_or_none(),
        lengths=padded.flatten(),
        stride=size,
    )


def all_reads(collections: Sequence[PrivateLookup]) -> list[KernelRead]:
    return list(chain.from_iterable(collection.reads for collection in collections))

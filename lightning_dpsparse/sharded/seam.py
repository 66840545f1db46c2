"""The cut: where a sharded lookup ends and the rest of the model begins.

In private training each FBGEMM kernel's output is replaced by a detached leaf. The backward pass
stops there and leaves the gradient on the rank that owns the rows, for the examples of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from lightning_dpsparse.engine.lookups import Layout, Lookup, Stack
from lightning_dpsparse.engine.rows import RowGradient
from lightning_dpsparse.sharded.update import apply_to_rows

# P examples of one rank after padding, W ranks, B = W * P examples of all, E width of a kernel


@dataclass(frozen=True)
class TablePiece:
    """The part of a table that one kernel holds."""

    name: str
    """Path of the table's weight in the module."""
    first_row: int
    first_column: int


@dataclass(frozen=True)
class KernelRead:
    """What one kernel read in this step."""

    kernel: Any
    pieces: tuple[TablePiece, ...]
    layout: Layout
    ids_L: Tensor
    offsets: Tensor
    weights_L: Tensor | None
    leaf_BE: Tensor
    order_B: Tensor | None
    """Example of each bag column, numbered rank by rank; None if that is their order."""
    steps_before: int
    """Steps that the kernel had counted when this one began."""

    @property
    def table_names(self) -> list[str]:
        return [piece.name for piece in self.pieces]

    @property
    def corners(self) -> list[tuple[int, int]]:
        return [(piece.first_row, piece.first_column) for piece in self.pieces]

    @property
    def stacks(self) -> tuple[Stack, ...]:
        return self.layout.stacks

    def apply(self, gradients: list[RowGradient]) -> None:
        apply_to_rows(self.kernel, self.layout, gradients, self.steps_before)

    def lookup(self) -> Lookup:
        """The read with its gradient, after the backward pass."""
        gradient_BE = self.leaf_BE.grad
        if gradient_BE is None:  # no example's loss depends on these tables
            gradient_BE = torch.zeros_like(self.leaf_BE)
        return Lookup(self.layout, self.ids_L, self.offsets, gradient_BE, self.weights_L)


class ShardedTables(ShardedEmbeddingBagCollection):
    """TorchRec's sharded collection, with a seam that private training opens.

    It also leaves out TorchRec's own initial values: those are drawn from the rank's generator
    (equal halves on equal seeds), by initialisers that get a flat view. `initialise_shards` does it
    instead.
    """

    def reset_parameters(self) -> None:
        """Nothing: see above."""

    def _create_lookups(self) -> None:
        super()._create_lookups()
        self.is_cut = False
        self.reads: list[KernelRead] = []
        self.padded_size = 0
        self._steps_before = [0] * len(self._lookups)
        for index, lookup in enumerate(self._lookups):
            for kernel in lookup._emb_modules:
                kernel.register_forward_hook(self._seam(index, kernel))

    def start_step(self) -> None:
        """Before the first forward pass of a private step."""
        self._steps_before = [
            max((int(k.emb_module.iter_cpu.item()) for k in lookup._emb_modules), default=0)
            for lookup in self._lookups
        ]

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[KeyedTensor] | KeyedTensor:
        """As TorchRec's; cut and in training, every rank's batch is padded to the largest one.

        Gloo cannot gather pieces of unequal size in row-wise tables' backward pass. Padding
        examples have empty bags, and their rows are cut off again.
        """
        if not (self.is_cut and self.training and torch.is_grad_enabled()):
            return super().forward(features)
        size = features.stride()
        self.padded_size = _largest(size, features.device())
        if size == self.padded_size:
            return self._forward_unwatched(features)
        whole = self._forward_unwatched(_pad(features, self.padded_size)).wait()
        return KeyedTensor(whole.keys(), whole.length_per_key(), whole.values()[:size])

    def _forward_unwatched(self, features: KeyedJaggedTensor) -> LazyAwaitable[KeyedTensor]:
        """Without the capture of dense layers, which has nothing to see here and costs time."""
        with torch._C.DisableTorchFunction():
            return super().forward(features)

    def _seam(self, index: int, kernel: Any) -> Any:
        pieces, layout = self._pieces(kernel), kernel_layout(kernel)

        def hook(
            module: nn.Module, args: tuple[KeyedJaggedTensor], output: Tensor
        ) -> Tensor | None:
            if not (self.is_cut and self.training and torch.is_grad_enabled()):
                return None
            if any(read.kernel is kernel for read in self.reads):
                raise ValueError(
                    f"Expected the tables of {self._module_fqn!r} to be read once in a private "
                    "step, found a second call: an example's norm would miss what the two share. "
                    "Read all features in one call."
                )
            leaf_BE = output.detach().requires_grad_()
            # Read after the forward pass, from the kernel: it may have rewritten ids in place.
            tbe = kernel.emb_module
            self.reads.append(
                KernelRead(
                    kernel=kernel,
                    pieces=pieces,
                    layout=layout,
                    ids_L=tbe._indices,
                    offsets=tbe._offsets,
                    weights_L=args[0].weights_or_none() if self._is_weighted else None,
                    leaf_BE=leaf_BE,
                    order_B=self._order(index, output.device),
                    steps_before=self._steps_before[index],
                )
            )
            return leaf_BE

        return hook

    def _pieces(self, kernel: Any) -> tuple[TablePiece, ...]:
        return tuple(
            TablePiece(
                f"{self._module_fqn}.embedding_bags.{table.name}.weight",
                *(table.local_metadata.shard_offsets if table.local_metadata else (0, 0)),
            )
            for table in kernel.config.embedding_tables
        )

    def _order(self, index: int, device: torch.device) -> Tensor | None:
        """Which example each bag column holds. Two-level sharding interleaves the hosts' ranks."""
        input_dist = self._input_dists[index]
        stagger = getattr(getattr(input_dist, "_dist", None), "_stagger", 1)
        if stagger == 1:
            return None
        world = dist.get_world_size(self._env.process_group)
        ranks = [x + world // stagger * y for x in range(world // stagger) for y in range(stagger)]
        if ranks == list(range(world)):
            return None
        first = torch.tensor(ranks, device=device)[:, None] * self.padded_size
        return (first + torch.arange(self.padded_size, device=device)).flatten()


def kernel_layout(kernel: Any) -> Layout:
    """The kernel's tables and features in the engine's terms."""
    tbe = kernel.emb_module
    return Layout(
        table_of_feature=tuple(tbe.feature_table_map),
        widths=tuple(tbe.dims[t] for t in range(len(tbe.embedding_specs))),
        num_rows=tuple(spec[0] for spec in tbe.embedding_specs),
        is_mean=tbe.pooling_mode == PoolingMode.MEAN,
        is_stacked=tbe.optimizer is EmbOptimType.EXACT_SGD,
    )


def _largest(size: int, device: torch.device) -> int:
    """The largest of all ranks' batches, at least one example."""
    if dist.get_world_size() == 1:
        return max(1, size)
    largest = torch.tensor(size, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return max(1, int(largest))


def _pad(features: KeyedJaggedTensor, size: int) -> KeyedJaggedTensor:
    """Empty bags at the end of every feature."""
    lengths = features.lengths().view(len(features.keys()), features.stride())
    padded = torch.nn.functional.pad(lengths, (0, size - features.stride()))
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        weights=features.weights_or_none(),
        lengths=padded.flatten(),
        stride=size,
    )


def all_reads(collections: list[ShardedTables]) -> list[KernelRead]:
    return list(chain.from_iterable(collection.reads for collection in collections))

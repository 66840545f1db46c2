"""The cut: where a sharded lookup ends and the rest of the model begins.

In private training each FBGEMM kernel's output is replaced by a detached leaf. The backward pass
stops there and leaves the gradient on the rank that owns the rows, for the examples of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from lightning_dpsparse.engine.lookups import Bags
from lightning_dpsparse.mechanisms.lazydp import LazyDP
from lightning_dpsparse.noise.sources import NoiseSource
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.collections import table_configs, weight_path
from lightning_dpsparse.sharded.debts import KernelDebts, pay_all
from lightning_dpsparse.sharded.kernel_read import (
    KernelRead,
    TablePiece,
    kernel_layout,
    shard_offset_of,
)
from lightning_dpsparse.sharded.selected import OneRowForOthers, rows_of_kernel
from lightning_dpsparse.sharded.update import set_steps, version_of

# P examples of one rank after padding, W ranks, B = W * P examples of all


class PrivateLookup(nn.Module):
    """What makes of TorchRec's sharded collection one that private training can open.

    It also leaves out TorchRec's own initial values: those are drawn from the rank's generator
    (equal halves on equal seeds), by initialisers that get a flat view. `initialise_shards` does it
    instead.
    """

    _lookups: list[Any]
    _input_dists: list[Any]
    _env: Any
    _module_fqn: str
    _is_weighted = False

    def reset_parameters(self) -> None:
        """Nothing: see above."""

    def _first_examples(self, output: Any, size: int) -> Any:
        """What the collection gave for the first examples: the others are padding."""
        raise NotImplementedError

    def _sum_of(self, output: Any) -> Tensor:
        """Everything that the collection gave, added up."""
        raise NotImplementedError

    def _create_lookups(self) -> None:
        super()._create_lookups()  # type: ignore[misc]
        self.is_cut = False
        self.is_guarded = False
        """Whether reads outside a private step have no gradient: it would update the rows."""
        self.is_whole = True
        """Whether the step's only part is being read."""
        self.reads: list[KernelRead] = []
        self.padded_size = 0
        """Examples of every rank in a private read, the largest's; zero if there was none. A rank
        without tables has one too."""
        self.local_size = 0
        """Examples of this rank in it."""
        self.debts: dict[Any, KernelDebts] = {}
        """What rows of each kernel owe, where noise is deferred."""
        self._steps_before = [0] * len(self._lookups)
        self._counted: dict[Any, int] = {}
        """Steps that each kernel had counted before the read that is under way."""
        self._bags: dict[Any, Bags] = {}
        self._selected: dict[Any, Tensor] = {}
        self._map_ids: OneRowForOthers | None = None
        for index, lookup in enumerate(self._lookups):
            for kernel in lookup._emb_modules:
                kernel.register_forward_pre_hook(self._before(kernel))
                kernel.register_forward_hook(self._seam(index, kernel))
        self.register_state_dict_pre_hook(lambda *_: pay_all(list(self.debts.values())))

    def select_rows(self, rows: Mapping[str, Tensor] | None, row_for_others: int | None) -> None:
        """From now on only these rows of each table (by the path of its weight) are updated.

        With `row_for_others` all other ids read that row of their table, in training and after.
        """
        self._selected.clear()
        self._map_ids = None
        if rows is None:
            return
        for kernel, pieces in self._kernels():
            self._selected[kernel] = rows_of_kernel(
                rows,
                kernel_layout(kernel),
                [piece.name for piece in pieces],
                [piece.shard_offset for piece in pieces],
                kernel.emb_module.current_device,
            )
        if row_for_others is not None:
            configs = table_configs(self)
            names = [weight_path(self._module_fqn, self, c.name) for c in configs]
            self._map_ids = OneRowForOthers(configs, [rows[n] for n in names], row_for_others)

    def check_whole_rows(self, mechanism: str) -> None:
        for _, pieces in self._kernels():
            for piece in pieces:
                if not piece.has_all_columns:
                    raise Refused(
                        f"Expected all columns of a row on one rank with {mechanism}, found "
                        f"{piece.name!r} cut by columns. Place it table-wise or row-wise."
                    )

    def defer_noise(self, mechanism: LazyDP, noise: NoiseSource, noise_stddev: float) -> None:
        """From now on rows owe noise, of this standard deviation on each step's gradient."""
        for kernel, pieces in self._kernels():
            self.debts[kernel] = KernelDebts(
                kernel,
                kernel_layout(kernel),
                [piece.name for piece in pieces],
                [piece.shard_offset for piece in pieces],
                mechanism,
                noise,
                noise_stddev,
            )

    @property
    def _is_private_read(self) -> bool:
        return self.is_cut and torch.is_grad_enabled()

    def forget_read(self) -> None:
        self.reads.clear()
        self.padded_size = self.local_size = 0

    def read_empty_batch(self, num_examples: int, device: torch.device) -> Tensor:
        """A read of empty bags, for a step whose forward pass had no need of these tables.

        Their noise must come all the same. Returns zero, with the read behind it: a rank that has
        read them for others waits for all in the backward pass.
        """
        keys = list(dict.fromkeys(f for c in table_configs(self) for f in c.feature_names))
        nothing = torch.zeros(0, device=device)
        empty = KeyedJaggedTensor(
            keys=keys,
            values=nothing.long(),
            weights=nothing if self._is_weighted else None,
            lengths=torch.zeros(len(keys) * num_examples, dtype=torch.int64, device=device),
            stride=num_examples,
        )
        return self._sum_of(self(empty)) * 0.0

    def versions(self) -> list[int]:
        """How often each kernel's weights were written to, payments aside."""
        return [
            version_of(kernel.emb_module)
            - (self.debts[kernel].own_writes if kernel in self.debts else 0)
            for lookup in self._lookups
            for kernel in lookup._emb_modules
        ]

    def start_step(self) -> None:
        """Before the first forward pass of a private step."""
        self._steps_before = [
            max((int(k.emb_module.iter_cpu.item()) for k in lookup._emb_modules), default=0)
            for lookup in self._lookups
        ]

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """As TorchRec's; cut and in training, every rank's batch is padded to the largest one.

        Gloo cannot gather pieces of unequal size in row-wise tables' backward pass. Padding
        examples have empty bags, and their rows are cut off again.
        """
        if self._map_ids is not None:
            features = self._map_ids(features)
        if not self._is_private_read:
            return super().forward(features)
        size = self.local_size = features.stride()
        self.padded_size = _largest(size, features.device())
        if size == self.padded_size:
            return self._forward_unwatched(features)
        whole = self._forward_unwatched(_pad(features, self.padded_size)).wait()
        return self._first_examples(whole, size)

    def _forward_unwatched(self, features: KeyedJaggedTensor) -> Any:
        """Without the capture of dense layers, which has nothing to see here and costs time."""
        with torch._C.DisableTorchFunction():
            return super().forward(features)

    def _before(self, kernel: Any) -> Any:
        """Look at the ids before they are read: their rows may owe noise."""
        layout = kernel_layout(kernel)

        def hook(module: nn.Module, args: tuple[KeyedJaggedTensor]) -> None:
            self._counted[kernel] = int(kernel.emb_module.iter_cpu.item())
            debts = self.debts.get(kernel)
            if debts is None and not self._is_private_read:
                return
            features = args[0]
            weights_L = features.weights_or_none() if self._is_weighted else None
            bags = Bags(layout, features.values().long(), features.offsets().long(), weights_L)
            if debts is not None:
                debts.pay_bills()  # of a step that was broken off, or of this one's first read
                if not self._is_on_credit(debts):
                    debts.pay_before_reading(bags, only_owing=not self._is_private_read)
            if self._is_private_read:
                self._bags[kernel] = bags

        return hook

    def _is_on_credit(self, debts: KernelDebts) -> bool:
        return self._is_private_read and self.is_whole and debts.gives_credit

    def _seam(self, index: int, kernel: Any) -> Any:
        pieces = self._pieces(kernel)

        def hook(
            module: nn.Module, args: tuple[KeyedJaggedTensor], output: Tensor
        ) -> Tensor | None:
            self._correct_count(index, kernel)
            if not self._is_private_read:
                return output.detach() if self.is_guarded else None
            if any(read.kernel is kernel for read in self.reads):
                raise Refused(
                    f"Expected the tables of {self._module_fqn!r} to be read once in a private "
                    "step, found a second call: an example's norm would miss what the two share. "
                    "Read all features in one call."
                )
            bags, debts = self._bags.pop(kernel), self.debts.get(kernel)
            output = output.detach()
            if debts is not None and self._is_on_credit(debts):
                debts.read_on_credit(bags, output)
            leaf = output.requires_grad_()
            self.reads.append(
                KernelRead(
                    kernel=kernel,
                    pieces=pieces,
                    bags=bags,
                    debts=debts,
                    selected_R=self._selected.get(kernel),
                    leaf=leaf,
                    order_B=self._order(index, output.device),
                    steps_before=self._steps_before[index],
                )
            )
            return leaf

        return hook

    def _correct_count(self, index: int, kernel: Any) -> None:
        """FBGEMM counts every read as a step of the optimizer: evaluation's, and a step's parts."""
        tbe, before = kernel.emb_module, self._counted.pop(kernel)
        if int(tbe.iter_cpu.item()) == before:  # an optimizer that does not count
            return
        if self._is_private_read:
            set_steps(tbe, self._steps_before[index] + 1)
        elif self.is_guarded or not (self.training and torch.is_grad_enabled()):
            set_steps(tbe, before)

    def _kernels(self) -> Iterator[tuple[Any, tuple[TablePiece, ...]]]:
        """Every kernel of this rank, with the pieces of tables that it holds."""
        for lookup in self._lookups:
            for kernel in lookup._emb_modules:
                yield kernel, self._pieces(kernel)

    def _pieces(self, kernel: Any) -> tuple[TablePiece, ...]:
        return tuple(
            TablePiece(
                weight_path(self._module_fqn, self, table.name),
                shard_offset_of(table),
                table.local_cols == table.embedding_dim,
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


class ShardedTables(PrivateLookup, ShardedEmbeddingBagCollection):
    """Pooled tables, with a seam."""

    def _first_examples(self, output: KeyedTensor, size: int) -> KeyedTensor:
        return KeyedTensor(output.keys(), output.length_per_key(), output.values()[:size])

    def _sum_of(self, output: KeyedTensor) -> Tensor:
        return output.values().sum()


class ShardedSequences(PrivateLookup, ShardedEmbeddingCollection):
    """Tables whose rows come one by one, with a seam."""

    def _first_examples(
        self, output: dict[str, JaggedTensor], size: int
    ) -> dict[str, JaggedTensor]:
        """Padding has no rows: there are fewer lengths, and the same values."""
        return {
            name: JaggedTensor(
                values=sequences.values(),
                lengths=sequences.lengths()[:size],
                weights=sequences.weights_or_none(),
            )
            for name, sequences in output.items()
        }

    def _sum_of(self, output: dict[str, JaggedTensor]) -> Tensor:
        return torch.stack([sequences.values().sum() for sequences in output.values()]).sum()


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


def all_reads(collections: list[PrivateLookup]) -> list[KernelRead]:
    return list(chain.from_iterable(collection.reads for collection in collections))

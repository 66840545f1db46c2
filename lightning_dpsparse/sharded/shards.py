"""The pieces of tables that lie on this rank, as live views, and what is done with them.

A table may be cut by rows and by columns, and a rank may hold several pieces. `local_shards` lists
them. Here they get their initial values, which usually do not depend on how the table is cut, take
their part of a whole table, and are hidden from code that must not see them.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.types import ShardedModule

from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.collections import (
    PLAIN,
    sharded_collections,
    sharded_tables,
    weight_path,
)
from lightning_dpsparse.sharded.kernel import Kernel
from lightning_dpsparse.sharded.seeding import seed_torch

# Rows are initialised in blocks of this many, each block from a seed of its own, so that a table
# starts the same however it is cut.
_ROWS_PER_BLOCK = 16384

# Initialisers that treat every element alike: they may be run block by block.
_ELEMENTWISE = {
    nn.init.uniform_,
    nn.init.normal_,
    nn.init.trunc_normal_,
    nn.init.constant_,
    nn.init.zeros_,
    nn.init.ones_,
}


@dataclass(frozen=True)
class TableShard:
    """The part of one table that this rank owns."""

    key: str
    """Key of the table's weight in the module's state dict."""
    row_offset: int
    column_offset: int
    table_shape: tuple[int, int]
    weight: Tensor
    """Live view of the kernel's memory, (rows here, columns here)."""
    init_fn: Callable[[Tensor], Any]

    def slice_of(self, table: Tensor) -> Tensor:
        """The same rows and columns of a whole table."""
        rows, columns = self.weight.shape
        return table[
            self.row_offset : self.row_offset + rows,
            self.column_offset : self.column_offset + columns,
        ]


def local_kernels(module: nn.Module) -> Iterator[tuple[str, Kernel]]:
    """(path of the collection, kernel) for every kernel on this rank."""
    for path, collection in sharded_collections(module).items():
        for kernel in collection.all_kernels():
            yield path, kernel


def local_shards(module: nn.Module) -> Iterator[TableShard]:
    """Every non-empty piece of a table on this rank."""
    # The kernels' own descriptions of tables have lost the initialisers: take them from here.
    configs = dict(sharded_tables(module))
    collections = sharded_collections(module)
    for path, kernel in local_kernels(module):
        for piece, weight in zip(kernel.pieces, kernel.table_weights()):
            row, column = piece.shard_offset
            key = weight_path(path, collections[path], piece.table)
            config = configs[key]
            if weight.numel():
                yield TableShard(
                    key=key,
                    row_offset=row,
                    column_offset=column,
                    table_shape=(config.num_embeddings, config.embedding_dim),
                    weight=weight,
                    init_fn=config.init_fn,
                )


@contextmanager
def tables_hidden(module: nn.Module) -> Iterator[None]:
    """Inside, `module.parameters()` lists dense parameters only.

    An optimizer that met the tables would allocate state as large as they are.
    """
    tables = [
        m for child in module.modules() if isinstance(child, ShardedModule) for m in child.modules()
    ]
    parameters = [table._parameters for table in tables]
    try:
        for table in tables:
            table._parameters = {}
        yield
    finally:
        for table, original in zip(tables, parameters):
            table._parameters = original


def dense_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Trainable parameters outside the tables, in the module's order."""
    with tables_hidden(module):
        return [parameter for parameter in module.parameters() if parameter.requires_grad]


def dense_buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(name, owner, key) of every buffer outside the tables."""
    inside = {id(m) for c in module.modules() if isinstance(c, ShardedModule) for m in c.modules()}
    for path, owner in module.named_modules():
        if id(owner) not in inside:
            for key in owner._buffers:
                yield f"{path}.{key}" if path else key, owner, key


@contextmanager
def tables_on_meta() -> Iterator[None]:
    """Inside, a table collection takes no memory: its shards are allocated later.

    Only collections are treated so: a blanket meta device would leave dense layers without values.
    """
    originals = [kind.__init__ for kind in PLAIN]
    try:
        for kind in PLAIN:
            kind.__init__ = _on_meta(kind.__init__)
        yield
    finally:
        for kind, original in zip(PLAIN, originals):
            kind.__init__ = original


def _on_meta(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    def init_on_meta(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        if given.arguments.get("device") is None:
            given.arguments["device"] = torch.device("meta")
        original(*given.args, **given.kwargs)

    return init_on_meta


@torch.no_grad()
def initialise_shards(module: nn.Module, seed: int) -> None:
    """Fill every local shard with its table's initial values.

    The values depend on (seed, table, row block) alone: one rank or many, row-wise or column-wise,
    a table starts the same. An initialiser that looks at the whole shape (Xavier, say) is run once
    per shard instead, from a seed of its own.
    """
    for shard in local_shards(module):
        if getattr(shard.init_fn, "func", shard.init_fn) in _ELEMENTWISE:
            _initialise_by_blocks(shard, seed)
        else:
            with _seeded(
                shard.weight.device, seed, shard.key, shard.row_offset, shard.column_offset
            ):
                shard.init_fn(shard.weight)


def _initialise_by_blocks(shard: TableShard, seed: int) -> None:
    num_rows, num_columns = shard.table_shape
    rows_here, columns_here = shard.weight.shape
    columns = slice(shard.column_offset, shard.column_offset + columns_here)
    first, last = shard.row_offset, shard.row_offset + rows_here
    for block in range(first // _ROWS_PER_BLOCK, (last - 1) // _ROWS_PER_BLOCK + 1):
        start = block * _ROWS_PER_BLOCK
        stop = min(start + _ROWS_PER_BLOCK, num_rows)
        with _seeded(shard.weight.device, seed, shard.key, block):
            values = torch.empty(stop - start, num_columns, device=shard.weight.device)
            shard.init_fn(values)
        low, high = max(start, first), min(stop, last)
        shard.weight[low - first : high - first] = values[low - start : high - start, columns]


@contextmanager
def _seeded(device: torch.device, *key: object) -> Iterator[None]:
    """Run with torch's generators seeded by `key`, and put them back afterwards."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        seed_torch(int.from_bytes(digest, "big") >> 1)
        yield


@torch.no_grad()
def load_whole_tables(module: nn.Module, tables: Mapping[str, Tensor]) -> None:
    """Copy this rank's part of each whole table. `tables` has the keys of a plain state dict."""
    for shard in local_shards(module):
        table = tables.get(shard.key)
        if table is None:
            continue
        if tuple(table.shape) != shard.table_shape:
            raise Refused(
                f"Expected {shard.key} of shape {shard.table_shape}, found {tuple(table.shape)}. "
                "Give the model the table sizes that the weights were saved with."
            )
        shard.weight.copy_(shard.slice_of(table))


def whole_table(module: nn.Module, name: str) -> Tensor:
    """Gather a small sharded table from all ranks. It has all its noise once training has ended."""
    pieces = [
        (shard.row_offset, shard.column_offset, shard.table_shape, shard.weight.detach().cpu())
        for shard in local_shards(module)
        if shard.key.endswith(f".{name}.weight")
    ]
    gathered: list[Any] = [pieces]
    if dist.is_initialized() and dist.get_world_size() > 1:
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, pieces)
    found = [piece for rank in gathered for piece in rank]
    whole = torch.empty(found[0][2])
    for row, column, _, weight in found:
        whole[row : row + weight.shape[0], column : column + weight.shape[1]] = weight
    return whole

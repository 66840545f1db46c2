"""TorchRec's private attributes: everything that this package reads of them, in this one file.

TorchRec has no public way to its lookups, to the kernels behind them, or to the order in which
examples of several ranks arrive there. A new version may rename any of these, and a default in
place of a missing attribute could misorder examples without a word. So each is read by `required`,
which refuses to go on without it and names the installed versions, and `check_collection` reads
them all when tables are sharded, before the first step. FBGEMM's attributes are in `kernel.py`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from lightning_dpsparse.refused import Refused
from lightning_dpsparse.versions import installed_versions, show_supported, show_versions


@dataclass(frozen=True)
class TablePiece:
    """The part of a table that one kernel holds."""

    table: str
    """The table's own name, as its configuration has it."""
    name: str
    """Path of the table's weight in the module."""
    shard_offset: tuple[int, int]
    """First row and first column of the piece."""
    has_all_columns: bool


def required(owner: Any, attribute: str) -> Any:
    """A private attribute of an upstream object, which must be there."""
    try:
        return getattr(owner, attribute)
    except AttributeError as error:
        kind = owner if isinstance(owner, type) else type(owner)
        name = f"{kind.__module__}.{kind.__qualname__}"
        raise missing(f"an attribute {attribute!r} of {name}") from error


def missing(what: str) -> Refused:
    """The refusal of an upstream version that lacks something."""
    return Refused(
        f"Expected {what}, found none in {show_versions(installed_versions())}: private training "
        f"depends on it. Install versions that are supported: {show_supported()}."
    )


def check_collection(collection: nn.Module, *, is_pooled: bool) -> None:
    """Refuse a version of TorchRec in which something that is needed has another name."""
    path_of(collection)
    configs_of(collection, is_pooled=is_pooled)
    required(required(collection, "_env"), "process_group")
    for modules in kernel_modules(collection):
        for module in modules:
            for table in tables_of(module):
                shard_offset_of(table)
                has_all_columns(table)
    if is_pooled:
        is_weighted(collection)
    # Input distributions are made in the first forward pass. Until then, ask their class.
    required(collection, "_input_dists")
    if "stagger" not in inspect.signature(KJTAllToAll).parameters:
        raise missing("an argument 'stagger' of torchrec's KJTAllToAll")


def check_was_cut(collection: nn.Module) -> None:
    """Refuse a version of TorchRec that never called the method in which lookups are cut."""
    if not hasattr(collection, "kernels"):
        raise missing(f"a call of {type(collection).__name__}._create_lookups in torchrec")


def path_of(collection: nn.Module) -> str:
    """Path of the collection in its module."""
    return str(required(collection, "_module_fqn"))


def is_weighted(collection: nn.Module) -> bool:
    """Whether the ids of a pooled collection come with weights."""
    return bool(required(collection, "_is_weighted"))


def configs_of(collection: nn.Module, *, is_pooled: bool) -> list[BaseEmbeddingConfig]:
    """The tables of a collection, sharded or not."""
    found: list[BaseEmbeddingConfig] = required(
        collection, "_embedding_bag_configs" if is_pooled else "_embedding_configs"
    )
    return found


def kernel_modules(collection: nn.Module) -> list[list[Any]]:
    """The modules that hold the kernels of each of the collection's lookups."""
    return [list(required(lookup, "_emb_modules")) for lookup in required(collection, "_lookups")]


def tables_of(kernel_module: Any) -> list[Any]:
    """TorchRec's descriptions of the pieces of tables that one kernel holds."""
    return list(required(required(kernel_module, "config"), "embedding_tables"))


def shard_offset_of(table: Any) -> tuple[int, int]:
    """First row and first column of a table's piece."""
    metadata = required(table, "local_metadata")
    if metadata is None:
        return 0, 0
    first_row, first_column = metadata.shard_offsets
    return first_row, first_column


def has_all_columns(table: Any) -> bool:
    return bool(required(table, "local_cols") == required(table, "embedding_dim"))


def ranks_in_order(collection: nn.Module, lookup: int) -> list[int] | None:
    """The ranks whose examples follow one another in a kernel's bags; None means rank by rank.

    Two-level sharding interleaves the ranks of several hosts.
    """
    input_dist = required(collection, "_input_dists")[lookup]
    stagger = int(required(required(input_dist, "_dist"), "_stagger"))
    world = dist.get_world_size(required(required(collection, "_env"), "process_group"))
    ranks = [x + world // stagger * y for x in range(world // stagger) for y in range(stagger)]
    return None if ranks == list(range(world)) else ranks

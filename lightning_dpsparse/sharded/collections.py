"""The two kinds of table collections, and how they name their tables.

An `EmbeddingBagCollection` adds up the rows of a bag; an `EmbeddingCollection` hands them over one
by one, as sequences. Each has a sharded twin, whose tables are spread over ranks. All other files
of this package tell the kinds apart by the functions below.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from lightning_dpsparse.sharded.upstream import configs_of

PLAIN = (EmbeddingBagCollection, EmbeddingCollection)
SHARDED = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)
_SEQUENCES = (EmbeddingCollection, ShardedEmbeddingCollection)


def plain_collections(module: nn.Module) -> dict[str, Any]:
    """Every collection in `module` that is not sharded, by its path."""
    return {path: child for path, child in module.named_modules() if isinstance(child, PLAIN)}


def sharded_collections(module: nn.Module) -> dict[str, Any]:
    """Every sharded collection in `module`, by its path."""
    return {path: child for path, child in module.named_modules() if isinstance(child, SHARDED)}


def is_pooled(collection: nn.Module) -> bool:
    return not isinstance(collection, _SEQUENCES)


def table_configs(collection: Any) -> list[BaseEmbeddingConfig]:
    """The tables of a collection, sharded or not."""
    return configs_of(collection, is_pooled=is_pooled(collection))


def weight_of(collection: Any, table: str) -> Any:
    """The weight of a table in a collection that is not sharded."""
    tables = collection.embedding_bags if is_pooled(collection) else collection.embeddings
    return tables[table].weight


def weight_path(path: str, collection: nn.Module, table: str) -> str:
    """Where the weight of a table lies in the module's state dict."""
    return f"{path}.{'embedding_bags' if is_pooled(collection) else 'embeddings'}.{table}.weight"


def sharded_tables(module: nn.Module) -> Iterator[tuple[str, BaseEmbeddingConfig]]:
    """(path of its weight, table) for every table of the module's sharded collections."""
    for path, collection in sharded_collections(module).items():
        for config in table_configs(collection):
            yield weight_path(path, collection, config.name), config

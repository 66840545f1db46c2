"""What is public about a module's tables, and the features of a batch that are counted for them.

A mechanism may know the sizes of tables and the names of their features. The ids of a batch are
secret: they are counted here for a selection, which adds noise (`mechanisms/selection/`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_dpsparse.engine.step_inputs import Table
from lightning_dpsparse.sharded.collections import sharded_tables
from lightning_dpsparse.sharded.examples import leaves


def public_tables(module: nn.Module) -> list[Table]:
    """Path, number of rows and features of every sharded table of a module."""
    return [
        Table(path, config.num_embeddings, tuple(config.feature_names))
        for path, config in sharded_tables(module)
    ]


def features_of(batch: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """The ids of every feature in a batch, and how many of them each example has."""
    bags = [leaf for leaf in leaves(batch) if isinstance(leaf, KeyedJaggedTensor)]
    return {
        key: (jagged.values(), jagged.lengths())
        for kjt in bags
        for key, jagged in kjt.to_dict().items()
    }

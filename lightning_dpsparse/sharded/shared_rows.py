"""Ids whose rows were not selected read one row of their table that stands for all of them.

The mapping is part of the model: it holds in training, in evaluation, and in what is restored from
a checkpoint. So it is a hook on the collection of tables, and no part of a private step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.collections import (
    sharded_collections,
    table_configs,
    weight_path,
)

# F features, L lookups, R rows of all tables


def share_a_row(module: nn.Module, rows: Mapping[str, Tensor] | None, row: int | None) -> None:
    """Send all ids but these rows of each table (by the path of its weight) to one row.

    Without `rows`, or without `row`, every id reads its own row again.
    """
    for path, collection in sharded_collections(module).items():
        hooks = collection._forward_pre_hooks  # a copy of the collection has copies of them
        for key in [key for key, hook in hooks.items() if isinstance(hook, OneRowForOthers)]:
            del hooks[key]
        if rows is not None and row is not None:
            configs = table_configs(collection)
            selected = [rows[weight_path(path, collection, c.name)] for c in configs]
            collection.register_forward_pre_hook(OneRowForOthers(configs, selected, row))


def shares_a_row(collection: nn.Module) -> bool:
    """Whether some ids of the collection read a row that is not their own."""
    hooks = collection._forward_pre_hooks.values()
    return any(isinstance(hook, OneRowForOthers) for hook in hooks)


def check_one_table_each(module: nn.Module) -> None:
    """Refuse features that two tables read: an id may be selected in one and not in the other."""
    for collection in sharded_collections(module).values():
        features = [f for c in table_configs(collection) for f in c.feature_names]
        twice = sorted({feature for feature in features if features.count(feature) > 1})
        if twice:
            raise Refused(
                f"Expected every feature to be read by one table where unselected ids share a row, "
                f"found {twice} in several. Set unselected to 'frozen'."
            )


class OneRowForOthers:
    """Forward pre-hook of a collection: ids whose rows were not selected go to one row."""

    def __init__(
        self, configs: Sequence[BaseEmbeddingConfig], rows: Sequence[Tensor], row: int
    ) -> None:
        self._row = row
        self._start: dict[str, int] = {}
        start = 0
        for config in configs:
            self._start |= dict.fromkeys(config.feature_names, start)
            start += config.num_embeddings
        self._is_selected_R = torch.zeros(start, dtype=torch.bool)
        start = 0
        for config, chosen in zip(configs, rows):
            self._is_selected_R[chosen.cpu() + start] = True
            start += config.num_embeddings

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        features: KeyedJaggedTensor = args[0]
        ids_L = features.values()
        if self._is_selected_R.device != ids_L.device:
            self._is_selected_R = self._is_selected_R.to(ids_L.device)
        keys = features.keys()
        lengths_F = features.lengths().view(len(keys), -1).sum(1)
        starts = [self._start.get(key, -1) for key in keys]
        start_L = torch.repeat_interleave(
            torch.tensor(starts, device=ids_L.device), lengths_F, output_size=ids_L.numel()
        )
        is_read_L = start_L >= 0  # whether some table reads the id
        is_known_L = self._is_selected_R[(ids_L + start_L).where(is_read_L, 0)] | ~is_read_L
        mapped = KeyedJaggedTensor(
            keys=keys,
            values=ids_L.where(is_known_L, self._row),
            weights=features.weights_or_none(),
            lengths=features.lengths(),
            stride=features.stride(),
        )
        return (mapped, *args[1:])

"""Rows that were selected before training: counted over the data, and known to the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_dpsparse.engine.lookups import Layout
from lightning_dpsparse.engine.step_inputs import Table
from lightning_dpsparse.mechanisms.selection import Histogram
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.collections import (
    sharded_collections,
    sharded_tables,
    table_configs,
)
from lightning_dpsparse.sharded.examples import leaves

# B examples, F features, L lookups, R rows of all tables


def public_tables(module: nn.Module) -> list[Table]:
    """All sharded tables of a module, whole."""
    return [
        Table(path, config.num_embeddings, tuple(config.feature_names))
        for path, config in sharded_tables(module)
    ]


def rows_of_kernel(
    rows: Mapping[str, Tensor],
    layout: Layout,
    table_names: Sequence[str],
    shard_offsets: Sequence[tuple[int, int]],
    device: torch.device,
) -> Tensor:
    """Selected rows of whole tables, as sorted rows of one kernel with its tables numbered through.

    Every table of the kernel begins at a shard_offset of the whole one.
    """
    pieces = []
    for t, (name, (first, _)) in enumerate(zip(table_names, shard_offsets)):
        inside = (rows[name] >= first) & (rows[name] < first + layout.num_rows[t])
        pieces.append(rows[name][inside] - first + layout.first_row[t])
    return torch.cat(pieces).to(device)


def check_one_table_each(module: nn.Module) -> None:
    """An id that two tables read would have to be two: selected in one, and not in the other."""
    for collection in sharded_collections(module).values():
        features = [f for c in table_configs(collection) for f in c.feature_names]
        twice = sorted({feature for feature in features if features.count(feature) > 1})
        if twice:
            raise Refused(
                f"Expected every feature to be read by one table where unselected ids share a row, "
                f"found {twice} in several. Set unselected to 'frozen'."
            )


class OneRowForOthers:
    """Ids whose rows were not selected are sent to one row of their table."""

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

    def __call__(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        ids_L = features.values()
        if self._is_selected_R.device != ids_L.device:
            self._is_selected_R = self._is_selected_R.to(ids_L.device)
        keys = features.keys()
        lengths_F = features.lengths().view(len(keys), -1).sum(1)
        starts = [self._start.get(key, -1) for key in keys]
        start_L = torch.repeat_interleave(
            torch.tensor(starts, device=ids_L.device), lengths_F, output_size=ids_L.numel()
        )
        is_read_L = start_L >= 0  # by some table
        is_known_L = self._is_selected_R[(ids_L + start_L).where(is_read_L, 0)] | ~is_read_L
        return KeyedJaggedTensor(
            keys=keys,
            values=ids_L.where(is_known_L, self._row),
            weights=features.weights_or_none(),
            lengths=features.lengths(),
            stride=features.stride(),
        )


class IdCounter:
    """Counts, for every row of every table, the examples that read it.

    Guarantees: one example adds at most one to a row's count, and at most sum_f m_f over all rows
    of all tables. Rows that nobody reads have a count too: zero.
    """

    def __init__(self, tables: Sequence[Table], histogram: Histogram) -> None:
        self._tables, self._histogram = tables, histogram
        self.counts = {t.name: torch.zeros(t.num_rows, dtype=torch.int64) for t in tables}

    def add(self, batch: Any) -> None:
        """Count one batch of examples."""
        bags = [leaf for leaf in leaves(batch) if isinstance(leaf, KeyedJaggedTensor)]
        by_feature = {key: jagged for kjt in bags for key, jagged in kjt.to_dict().items()}
        for table in self._tables:
            # A model may add features of its own to the batch's, as negatives that it draws.
            found = [f for f in table.features if f in by_feature]
            if not found:
                raise Refused(
                    f"Expected one of the features {list(table.features)} of table {table.name!r} "
                    f"in the data, found {sorted(by_feature)}. Select by public frequencies."
                )
            keys = [self._distinct(by_feature[f], f, table.num_rows) for f in found]
            key = keys[0] if len(keys) == 1 else torch.cat(keys).unique()
            ids = key % table.num_rows
            self.counts[table.name].index_add_(0, ids, torch.ones_like(ids))

    def _distinct(self, bags: Any, feature: str, num_rows: int) -> Tensor:
        """example * num_rows + id for the first m_f distinct ids of every bag, smallest first."""
        lengths_B, most = bags.lengths(), self._histogram.most_ids(feature)
        ids_L = bags.values()
        if ids_L.numel() and not 0 <= int(ids_L.min()) <= int(ids_L.max()) < num_rows:
            raise Refused(
                f"Expected ids within their tables, found ids out of range for {feature!r} (0 to "
                f"{num_rows - 1}). Hash the feature into the table's rows, or give the table more "
                "rows."
            )
        example_L = torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B)
        key_L = example_L * num_rows + ids_L
        if bool((lengths_B <= 1).all()):
            return key_L
        key = key_L.unique()
        example = key // num_rows
        count_B = torch.bincount(example, minlength=len(lengths_B))
        position = torch.arange(len(key)) - (count_B.cumsum(0) - count_B)[example]
        return key[position < most]

    def totals(self, device: torch.device) -> dict[str, Tensor]:
        """Over all ranks."""
        totals = {}
        for name, count_R in self.counts.items():
            totals[name] = count_R.to(device)
            if dist.get_world_size() > 1:
                dist.all_reduce(totals[name])
        return totals

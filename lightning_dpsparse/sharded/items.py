"""Exact scores of all rows of a table that is spread over ranks and never put together.

To evaluate a retrieval model, every query must be compared with every item, and the items may be
too many for one rank. So queries travel to the rows, block by block: see `ItemTable`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from lightning_dpsparse.engine.state import finish
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.collections import (
    plain_collections,
    sharded_collections,
    table_configs,
    weight_of,
    weight_path,
)
from lightning_dpsparse.sharded.cut import PrivateLookup
from lightning_dpsparse.sharded.shards import TableShard, local_shards
from lightning_dpsparse.sharded.shared_rows import shares_a_row

# B queries of this rank, P after padding, W ranks, Q = W * P queries of all ranks, D row width,
# R rows of a block, k answers to a query, q queries that this rank answers: Q, or its own B

_MOST_NUMBERS = 1 << 20
"""Most numbers that a block of rows may hold, and that its scores may hold."""

_NORM_FLOOR = 1e-12  # as in F.normalize
_LAST = (1 << 32) - 1  # the highest row that a sort key can hold


@dataclass(frozen=True)
class _Queries:
    """The queries of all ranks."""

    all_QD: Tensor
    first: int
    """Position of the first query of this rank."""
    size: int
    """Number of queries of this rank."""
    adds_columns: bool
    """Whether the table is cut by columns, so that all ranks score a block together."""

    @property
    def mine(self) -> slice:
        return slice(self.first, self.first + self.size)

    @property
    def num_answered(self) -> int:
        """Number of queries that a rank answers: its own for all rows, or all for its own rows."""
        return self.size if self.adds_columns else len(self.all_QD)


class ItemTable:
    """One table of a module, sharded or not, to be searched as a whole.

    Every rank asks its own queries, as many as it has, and all ranks call the same methods in the
    same order. Queries travel, rows do not: each rank scores the rows that it holds, block by
    block. Where a table is cut by columns, a block's scores are added up over the ranks.

    Guarantees: what is read is fully noised. Rows that owe noise (LazyDP) pay before they are read.

    Args:
        module: Holds the table in an `EmbeddingBagCollection` or an `EmbeddingCollection`, or in
            its sharded twin.
        table: The table's name.
        normalize: Divide every row by its length, so that a score is query . row / |row|.
    """

    def __init__(self, module: nn.Module, table: str, *, normalize: bool = False) -> None:
        self._table, self._normalize = table, normalize
        found = {config.name: (path, child, config) for path, child, config in _tables(module)}
        if table not in found:
            raise Refused(
                f"Expected a table {table!r} in the module, found {sorted(found)}. Name one of "
                "them, and build the module first (configure_model)."
            )
        path, collection, config = found[table]
        self.num_rows, self._width = config.num_embeddings, config.embedding_dim
        key = weight_path(path, collection, table)
        self._collection: PrivateLookup | None = None
        self._world = 1
        if isinstance(collection, PrivateLookup):
            self._collection, self._world = collection, dist.get_world_size()
            self._shards = [shard for shard in local_shards(module) if shard.key == key]
        else:
            weight = weight_of(collection, table)
            shape = self.num_rows, self._width
            self._shards = [TableShard(key, 0, 0, shape, weight, config.init_fn)]

    @torch.no_grad()
    def top_k(self, query_BD: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Scores and rows (B, k) of the k highest query . row, best first.

        Guarantees: the result is exact. Rows of equal scores come lowest first. Scores are added up
        in float64 and only then rounded to float32, so that it does not matter how the table is
        cut: two orders of summation differ so little that they nearly always round alike.
        """
        if not 1 <= k <= self.num_rows:
            raise Refused(
                f"Expected k from 1 to the {self.num_rows:,} rows of table {self._table!r}, found "
                f"{k}. Ask for fewer rows."
            )
        queries = self._share(query_BD)
        best_qk = query_BD.new_empty(queries.num_answered, 0, dtype=torch.int64)
        for first_row, score_qR in self._blocks(queries):
            key_qk = _best(_sort_keys(score_qR, first_row), k)
            best_qk = _best(torch.cat([best_qk, key_qk], 1), k)
        nothing = torch.iinfo(torch.int64).min
        best_qk = nn.functional.pad(best_qk, (0, k - best_qk.shape[1]), value=nothing)
        best_WBk = self._from_all_ranks(best_qk, queries)
        return _scores_and_rows(_best(torch.cat(list(best_WBk), 1), k))

    @torch.no_grad()
    def log_sum_exp(self, query_BD: Tensor, scale: float) -> Tensor:
        """log sum_r exp(scale * query . row_r) over all rows, (B,).

        Guarantees: all rows count, in float64 until the last rounding, and nothing overflows.
        """
        queries = self._share(query_BD)
        total_q = queries.all_QD.new_full((queries.num_answered,), -torch.inf)
        for _, score_qR in self._blocks(queries):
            total_q = torch.logaddexp(total_q, (scale * score_qR).logsumexp(1))
        total_WB = self._from_all_ranks(total_q, queries)
        return total_WB.logsumexp(0).to(query_BD.dtype)

    def _share(self, query_BD: Tensor) -> _Queries:
        """Have the table pay what it owes, and gather every rank's queries on every rank."""
        if query_BD.ndim != 2 or query_BD.shape[1] != self._width:
            raise Refused(
                f"Expected queries as wide as table {self._table!r}, (B, {self._width}), found "
                f"shape {tuple(query_BD.shape)}. Give a row for each query."
            )
        self._make_readable()
        query_BD, size = query_BD.double(), len(query_BD)
        adds_columns = any(shard.weight.shape[1] < self._width for shard in self._shards)
        if self._world == 1:
            return _Queries(query_BD, 0, size, adds_columns)
        agreed = torch.tensor([max(1, size), adds_columns], device=query_BD.device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)  # a rank may have no piece of the table
        padded, adds_columns = agreed.tolist()
        query_PD = nn.functional.pad(query_BD, (0, 0, 0, padded - size))
        all_QD = query_BD.new_empty(self._world * padded, self._width)
        dist.all_gather_into_tensor(all_QD, query_PD)
        return _Queries(all_QD, dist.get_rank() * padded, size, bool(adds_columns))

    def _make_readable(self) -> None:
        collection = self._collection
        if collection is None:
            return
        if shares_a_row(collection):
            raise Refused(
                f"Expected every id of table {self._table!r} to read a row of its own, found that "
                "ids outside a selection share one, so that they cannot be told apart. Set "
                "unselected to 'frozen'."
            )
        finish(
            [
                state
                for kernel, state in collection.states.items()
                if any(piece.table == self._table for piece in kernel.pieces)
            ]
        )

    def _blocks(self, queries: _Queries) -> Iterator[tuple[int, Tensor]]:
        """(first row, scores_qR) of one block of rows after the other.

        If the table is cut by columns, these are all rows, with this rank's queries. Otherwise they
        are the rows of this rank, with all queries.
        """
        query_QD = queries.all_QD
        most = max(1, _MOST_NUMBERS // (len(query_QD) + self._width))
        mine = [(s.row_offset, s.row_offset + len(s.weight)) for s in self._shards]
        for begin, end in [(0, self.num_rows)] if queries.adds_columns else mine:
            for first in range(begin, end, most):
                num_rows = min(most, end - first)
                # A line of scores for every query, and a last line with the rows' squared lengths.
                sums = query_QD.new_zeros(len(query_QD) + 1, num_rows)
                for shard in self._shards:
                    _add_products(shard, first, query_QD, sums)
                if queries.adds_columns:
                    if self._world > 1:
                        dist.all_reduce(sums)
                    score_qR = sums[queries.mine]
                else:
                    score_qR = sums[:-1]
                if self._normalize:
                    score_qR = score_qR / sums[-1].sqrt().clamp_min(_NORM_FLOOR)
                yield first, score_qR

    def _from_all_ranks(self, part_q: Tensor, queries: _Queries) -> Tensor:
        """What each rank found for this rank's queries, rank by rank."""
        if queries.adds_columns or self._world == 1:
            return part_q[None]
        part_WP = part_q.unflatten(0, (self._world, -1)).contiguous()
        found_WP = torch.empty_like(part_WP)
        dist.all_to_all_single(found_WP, part_WP)
        return found_WP[:, : queries.size]


def _tables(module: nn.Module) -> Iterator[tuple[str, Any, BaseEmbeddingConfig]]:
    """(path of the collection, collection, table) for every table, sharded or not."""
    for path, child in (plain_collections(module) | sharded_collections(module)).items():
        for config in table_configs(child):
            yield path, child, config


def _add_products(shard: TableShard, first: int, query_QD: Tensor, sums: Tensor) -> None:
    """Add what a shard contributes to the scores and squared lengths of rows from `first` on."""
    start = shard.row_offset
    low, high = max(first, start), min(first + sums.shape[1], start + len(shard.weight))
    if low >= high:
        return
    row_RD = shard.weight[low - start : high - start].double()
    column = shard.column_offset
    block = sums[:, low - first : high - first]
    block[:-1] += query_QD[:, column : column + row_RD.shape[1]] @ row_RD.t()
    block[-1] += row_RD.square().sum(1)


def _best(key_qn: Tensor, k: int) -> Tensor:
    return key_qn.topk(min(k, key_qn.shape[1])).values


def _sort_keys(score_qR: Tensor, first_row: int) -> Tensor:
    """Integers that sort by score, and rows of equal scores lowest first: topk leaves ties open.

    The bits of a float32 make an integer that grows with the number, once those of negative numbers
    are flipped. They become the upper 32 bits. The lower 32 bits are smaller for higher rows.
    """
    bits_qR = (score_qR.float() + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    order_qR = torch.where(bits_qR < 0, bits_qR ^ 0x7FFFFFFF, bits_qR).long()
    row_R = torch.arange(first_row, first_row + score_qR.shape[1], device=score_qR.device)
    return (order_qR << 32) + (_LAST - row_R)


def _scores_and_rows(key_Bk: Tensor) -> tuple[Tensor, Tensor]:
    order_Bk = (key_Bk >> 32).int()
    bits_Bk = torch.where(order_Bk < 0, order_Bk ^ 0x7FFFFFFF, order_Bk)
    return bits_Bk.view(torch.float32), _LAST - (key_Bk & _LAST)

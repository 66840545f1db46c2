"""A sharded table answers as the whole one would, whatever its placement, and owes nothing then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from lightning_dpsparse import LazyDP, Placement, TablePlacement
from lightning_dpsparse.sharded import items
from lightning_dpsparse.sharded.collections import weight_of
from lightning_dpsparse.sharded.items import ItemTable
from lightning_dpsparse.sharded.shards import TableShard, load_whole_tables, local_shards
from lightning_dpsparse.sharded.shared_rows import share_a_row
from tests.support.naive_step import Batches, plan
from tests.support.plain_training import SGD
from tests.support.ranks import Ranks
from tests.support.tiny_model import (
    SEQUENCES,
    Recording,
    assemble,
    loader,
    make_trainer,
    paths,
    snapshot,
    width_of,
)

ROWS, WIDTH, K = 37, 8, 9
KEY, SEQUENCE_KEY = "ebc.embedding_bags.item.weight", "ebc.embeddings.item.weight"

PLACEMENTS = {
    "table_wise": Placement(default="table_wise"),
    "on_rank_1": Placement(tables={"item": TablePlacement(kind="table_wise", ranks=[1])}),
    "row_wise": Placement(default="row_wise"),
    "table_row_wise": Placement(tables={"item": "table_row_wise"}),
    "column_wise": Placement(tables={"item": TablePlacement(kind="column_wise", shards=2)}),
    "columns_on_one_rank": Placement(
        tables={"item": TablePlacement(kind="column_wise", ranks=[1, 1])}
    ),
}
SIZES = {"even": [3, 3], "uneven": [5, 2], "empty": [0, 4], "nobody": [0, 0]}


class Tables(LightningModule):
    def configure_model(self) -> None:
        self.ebc = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=name, num_embeddings=ROWS, embedding_dim=WIDTH, feature_names=[name]
                )
                for name in ("item", "other")
            ]
        )

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


class Sequences(Tables):
    def configure_model(self) -> None:
        self.ebc = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name=name, num_embeddings=ROWS, embedding_dim=WIDTH, feature_names=[name]
                )
                for name in ("item", "other")
            ]
        )


def sharded(
    world_size: int, placement: Placement, table: Tensor, make: type[Tables] = Tables
) -> Tables:
    """Runs inside a rank."""
    module = make()
    trainer = make_trainer(world_size, placement)
    trainer.validate(module, loader(world_size, world_size, world_size), verbose=False)
    load_whole_tables(module, {KEY: table, SEQUENCE_KEY: table})
    return module


def ask(
    world_size: int,
    placement: Placement,
    table: Tensor,
    queries: list[Tensor],
    *,
    normalize: bool = False,
    make: type[Tables] = Tables,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs inside a rank: scores, rows and log sums of its own queries, by blocks of few rows."""
    module = sharded(world_size, placement, table, make)
    searched = ItemTable(module, "item", normalize=normalize)
    query_BD, most = queries[torch.distributed.get_rank()], items._MOST_NUMBERS
    try:
        items._MOST_NUMBERS = 100
        return *searched.top_k(query_BD, K), searched.log_sum_exp(query_BD, 0.5)
    finally:
        items._MOST_NUMBERS = most


def naive(table: Tensor, query_BD: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """One query after the other, all rows sorted."""
    scores, rows, sums = [], [], []
    for query in query_BD.double():
        score = table.double() @ query
        order = sorted(range(len(table)), key=lambda row: (-float(score[row].float()), row))[:k]
        scores.append(score[order])
        rows.append(torch.tensor(order))
        sums.append((scale * score).exp().sum().log())
    if not rows:
        return torch.zeros(0, k), torch.zeros(0, k), torch.zeros(0)
    return torch.stack(scores), torch.stack(rows), torch.stack(sums)


def assert_naive(
    results: list[Any], table: Tensor, queries: list[Tensor], scale: float = 0.5
) -> None:
    for (scores, rows, sums), query_BD in zip(results, queries, strict=True):
        expected_scores, expected_rows, expected_sums = naive(table, query_BD, K, scale)
        assert rows.tolist() == expected_rows.tolist()
        assert scores.shape == expected_scores.shape
        torch.testing.assert_close(scores.double(), expected_scores.double(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(sums.double(), expected_sums.double(), rtol=1e-6, atol=1e-6)


def with_ties(*shape: int, seed: int) -> Tensor:
    """Small whole numbers: scores are exact, and most of them come up several times."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def without_ties(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_queries(draw: Any, sizes: list[int]) -> list[Tensor]:
    return [draw(size, WIDTH, seed=1 + rank) for rank, size in enumerate(sizes)]


DRAWS = pytest.mark.parametrize("draw", [with_ties, without_ties])


@DRAWS
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", PLACEMENTS)
def test_two_ranks_answer_as_the_whole_table(
    two_ranks: Ranks, name: str, sizes: str, draw: Any
) -> None:
    table, queries = draw(ROWS, WIDTH, seed=0), make_queries(draw, SIZES[sizes])
    assert_naive(two_ranks.run(ask, 2, PLACEMENTS[name], table, queries), table, queries)


@DRAWS
@pytest.mark.parametrize("size", [4, 0])
def test_one_rank_answers_as_the_whole_table(one_rank: Ranks, size: int, draw: Any) -> None:
    table, queries = draw(ROWS, WIDTH, seed=0), make_queries(draw, [size])
    for placement in (
        Placement(),
        Placement(tables={"item": TablePlacement(kind="column_wise", ranks=[0, 0])}),
    ):
        assert_naive(one_rank.run(ask, 1, placement, table, queries), table, queries)


@pytest.mark.parametrize("name", ["on_rank_1", "row_wise", "column_wise"])
def test_a_table_of_sequences_answers_as_the_whole_one(two_ranks: Ranks, name: str) -> None:
    table, queries = with_ties(ROWS, WIDTH, seed=0), make_queries(with_ties, SIZES["uneven"])
    results = two_ranks.run(ask, 2, PLACEMENTS[name], table, queries, make=Sequences)
    assert_naive(results, table, queries)


def piece(table: Tensor, row: int, column: int) -> Tensor:
    """Twenty rows or the rest, four columns."""
    return table[row : row + 20, column : column + 4]


def ask_a_grid(table: Tensor, queries: list[Tensor]) -> Any:
    """Runs inside a rank: each holds two corners, as four ranks on two hosts would hold one."""
    module = sharded(2, Placement(default="row_wise"), table)
    searched, rank = ItemTable(module, "item"), torch.distributed.get_rank()
    shard_offsets = [(0, 0), (20, 4)] if rank == 0 else [(0, 4), (20, 0)]
    searched._shards = [
        TableShard(KEY, row, column, (ROWS, WIDTH), piece(table, row, column), torch.zero_)
        for row, column in shard_offsets
    ]
    return *searched.top_k(queries[rank], K), searched.log_sum_exp(queries[rank], 0.5)


def test_a_grid_of_pieces_answers_as_the_whole_table(two_ranks: Ranks) -> None:
    table, queries = with_ties(ROWS, WIDTH, seed=0), make_queries(with_ties, [2, 3])
    assert_naive(two_ranks.run(ask_a_grid, table, queries), table, queries)


@pytest.mark.parametrize("name", ["row_wise", "column_wise"])
def test_rows_are_scaled_to_length_one_where_asked(two_ranks: Ranks, name: str) -> None:
    """A row's length takes all of its columns."""
    table, queries = without_ties(ROWS, WIDTH, seed=0), make_queries(without_ties, [3, 2])
    results = two_ranks.run(ask, 2, PLACEMENTS[name], table, queries, normalize=True)
    assert_naive(results, torch.nn.functional.normalize(table.double(), dim=1), queries)


@DRAWS
@pytest.mark.parametrize("make", [Tables, Sequences])
def test_a_plain_collection_answers_without_a_process_group(draw: Any, make: type[Tables]) -> None:
    table, query_BD = draw(ROWS, WIDTH, seed=0), draw(5, WIDTH, seed=1)
    module = make()
    module.configure_model()
    with torch.no_grad():
        weight_of(module.ebc, "item").copy_(table)
    searched = ItemTable(module, "item")
    result = *searched.top_k(query_BD, K), searched.log_sum_exp(query_BD, 0.5)
    assert_naive([result], table, [query_BD])
    assert not any(tensor.requires_grad for tensor in result)
    assert torch.equal(searched.top_k(query_BD, ROWS)[1].sort().values[0], torch.arange(ROWS))


def test_scores_that_vanish_tie_whatever_their_sign() -> None:
    """1e-60 and -1e-60 are zero and minus zero in float32."""
    module = Tables()
    module.configure_model()
    with torch.no_grad():
        module.ebc.embedding_bags["item"].weight.fill_(1e-30)[::2] *= -1
    scores, rows = ItemTable(module, "item").top_k(torch.full((1, WIDTH), 1e-30), 4)
    assert rows.tolist() == [[0, 1, 2, 3]]
    assert not scores.any()


def test_a_large_scale_does_not_overflow() -> None:
    module = Tables()
    module.configure_model()
    table, query_BD = with_ties(ROWS, WIDTH, seed=0), with_ties(5, WIDTH, seed=1)
    with torch.no_grad():
        module.ebc.embedding_bags["item"].weight.copy_(table)
    found = ItemTable(module, "item").log_sum_exp(query_BD, 1e4)
    torch.testing.assert_close(found, torch.logsumexp(1e4 * query_BD @ table.t(), 1))
    assert (found > 1e4).all()


def test_what_cannot_be_answered_is_refused() -> None:
    module = Tables()
    module.configure_model()
    searched = ItemTable(module, "item")
    with pytest.raises(ValueError, match="k from 1 to the 37 rows"):
        searched.top_k(torch.zeros(2, WIDTH), ROWS + 1)
    with pytest.raises(ValueError, match=r"\(B, 8\), found shape \(2, 7\)"):
        searched.log_sum_exp(torch.zeros(2, 7), 1.0)
    with pytest.raises(ValueError, match=r"table 'thing' in the module, found \['item', 'other'"):
        ItemTable(module, "thing")


def ask_with_shared_rows(placement: Placement) -> None:
    module = sharded(1, placement, with_ties(ROWS, WIDTH, seed=0))
    names = [f"ebc.embedding_bags.{name}.weight" for name in ("item", "other")]
    share_a_row(module, dict.fromkeys(names, torch.arange(5)), 0)
    ItemTable(module, "item").top_k(torch.zeros(1, WIDTH), 1)


def test_ids_that_share_a_row_cannot_be_ranked(one_rank: Ranks) -> None:
    with pytest.raises(ValueError, match="unselected to 'frozen'"):
        one_rank.run(ask_with_shared_rows, Placement())


class Curious(Callback):
    """Searches a table after the last step of all, and keeps what lay in memory before."""

    def __init__(self, query_BD: Tensor, last: int) -> None:
        self.query_BD, self.last = query_BD, last
        self.found: Any = None
        self.before: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step < self.last:
            return
        mine = [shard for shard in local_shards(module) if ".t1." in shard.key]
        self.before = [shard.weight.clone() for shard in mine]
        searched = ItemTable(module, "t1")
        self.found = (
            *searched.top_k(self.query_BD, K),
            searched.log_sum_exp(self.query_BD, 0.5),
        )
        self.moved = [not torch.equal(s.weight, b) for s, b in zip(mine, self.before)]


def owe_and_ask(
    world_size: int, placement: Placement, sequences: tuple[str, ...] = ()
) -> dict[str, Any]:
    torch.manual_seed(0)
    sizes = [[2, 1], [0, 0], [1, 0], [0, 2]]
    rank = torch.distributed.get_rank()
    width = width_of("t1", sequences)
    curious = Curious(without_ties(2 + rank, width, seed=rank), len(sizes))
    noisy = plan(noise=2.0, mechanism=LazyDP(chunk_rows=16))
    trainer = make_trainer(world_size, placement, SGD, privacy=noisy, callbacks=[curious])
    module = Recording(sequences=sequences)
    trainer.fit(module, Batches(sizes, rank if world_size > 1 else None))
    return {
        "query": curious.query_BD,
        "found": curious.found,
        "moved": curious.moved,
        "end": snapshot(module),  # the run has paid what was left
    }


@pytest.mark.parametrize(
    ("kind", "sequences"),
    [("table_wise", ()), ("row_wise", ()), ("column_wise", ()), ("row_wise", SEQUENCES)],
)
def test_rows_have_paid_their_noise_before_they_are_searched(
    two_ranks: Ranks, kind: Any, sequences: tuple[str, ...]
) -> None:
    results = two_ranks.run(owe_and_ask, 2, Placement(tables={"t1": kind}), sequences)
    table = assemble([result["end"] for result in results])[paths(sequences)["t1"]]
    assert any(moved for result in results for moved in result["moved"])  # something was owed
    queries = [result["query"] for result in results]
    assert_naive([result["found"] for result in results], table, queries)

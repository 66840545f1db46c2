"""The planner's plan, the user's overrides, and the table that is printed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from lightning_dpsparse import Placement, TablePlacement
from lightning_dpsparse.sharded.placement import describe, make_plan, make_sharders
from tests.support.ranks import Ranks


def plan(
    placement: Placement, ranks_per_host: int
) -> tuple[dict[str, tuple[str, list[int], Any]], str]:
    """sharding type, ranks and shard sizes by table, and the printed table."""
    sizes = {"huge": 1_000_000, "large": 3000, "small": 10, "tiny": 3}
    module = nn.Module()
    module.ebc = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=n, num_embeddings=rows, embedding_dim=16, feature_names=[f"f_{n}"]
            )
            for n, rows in sizes.items()
        ],
    )
    found = make_plan(module, placement, make_sharders({}), torch.device("cpu"), ranks_per_host)
    tables = {
        name: (
            sharding.sharding_type,
            sharding.ranks,
            [shard.shard_sizes for shard in sharding.sharding_spec.shards],
        )
        for name, sharding in found.plan["ebc"].items()
    }
    assert all(s.compute_kernel == "fused" for s in found.plan["ebc"].values())
    return tables, describe(module, found)


def test_one_rank_keeps_tables_whole(one_rank: Ranks) -> None:
    tables, _ = one_rank.run(plan, Placement(), 1)[0]
    assert {kind for kind, _, _ in tables.values()} == {"table_wise"}


def test_the_planner_cuts_only_tables_beyond_a_ranks_share(two_ranks: Ranks) -> None:
    (tables, _), (again, _) = two_ranks.run(plan, Placement(), 2)
    assert tables == again
    assert tables["huge"][0] == "row_wise"
    assert {tables[name][0] for name in ("large", "small", "tiny")} == {"table_wise"}


def test_overrides_win(two_ranks: Ranks) -> None:
    placement = Placement(
        default="table_wise",
        tables={
            "huge": TablePlacement(kind="column_wise", ranks=[1, 0]),
            "large": "row_wise",
            "small": TablePlacement(kind="table_wise", ranks=[1]),
            "tiny": "table_row_wise",
        },
    )
    tables, _ = two_ranks.run(plan, placement, 2)[0]
    assert tables == {
        "huge": ("column_wise", [1, 0], [[1_000_000, 8], [1_000_000, 8]]),
        "large": ("row_wise", [0, 1], [[1500, 16], [1500, 16]]),
        "small": ("table_wise", [1], [[10, 16]]),
        "tiny": ("table_row_wise", [0, 1], [[2, 16], [1, 16]]),
    }


def test_grid_cuts_columns_over_hosts_and_rows_within(two_ranks: Ranks) -> None:
    """Two hosts of one rank each: two column pieces of whole height."""
    tables, _ = two_ranks.run(plan, Placement(tables={"huge": "grid"}), 1)[0]
    assert tables["huge"] == ("grid_shard", [0, 1], [[1_000_000, 8], [1_000_000, 8]])


def test_column_pieces_can_be_counted(two_ranks: Ranks) -> None:
    cut = TablePlacement(kind="column_wise", shards=4)
    tables, _ = two_ranks.run(plan, Placement(tables={"large": cut}), 2)[0]
    assert tables["large"][2] == [[3000, 4]] * 4


def test_the_plan_is_printed_for_people(two_ranks: Ranks) -> None:
    _, text = two_ranks.run(plan, Placement(default="row_wise"), 2)[0]
    lines = text.splitlines()
    assert lines[0].split() == [
        "table",
        "rows",
        "width",
        "features",
        "placement",
        "ranks",
        "MB",
        "per",
        "rank",
    ]
    assert lines[2].split() == ["huge", "1,000,000", "16", "f_huge", "row_wise", "0,", "1", "30.5"]
    assert len(lines) == 6

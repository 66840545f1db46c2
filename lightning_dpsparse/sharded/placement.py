"""Where the tables go: TorchRec's planner decides, and the user has the last word.

A table can lie on one rank as a whole, or be cut by rows or by columns over several ranks. With a
`Placement` the user says how, for all tables or for some of them. `make_plan` has the planner
decide the rest, among kinds that fused kernels can train. `build.py` carries the plan out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import KernelConfig, TopologyFactory, TrainerConfig
from torchrec.distributed.sharding_plan import column_wise, table_wise
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from lightning_dpsparse.checks import check_choice, check_mapping, check_whole, check_whole_list
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.collections import plain_collections, table_configs
from lightning_dpsparse.sharded.cut import ShardedSequences, ShardedTables

PlacementKind = Literal[
    "auto", "table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid"
]

_TORCHREC_NAME: dict[str, str] = {
    "table_wise": ShardingType.TABLE_WISE.value,
    "row_wise": ShardingType.ROW_WISE.value,
    "column_wise": ShardingType.COLUMN_WISE.value,
    "table_row_wise": ShardingType.TABLE_ROW_WISE.value,
    "table_column_wise": ShardingType.TABLE_COLUMN_WISE.value,
    "grid": ShardingType.GRID_SHARD.value,
}
SPLITS_ROWS = {
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.GRID_SHARD.value,
}
_OF_SEQUENCES = ("auto", "table_wise", "row_wise", "column_wise")
_SPLITS_COLUMNS = {"column_wise", "table_column_wise", "grid"}

# The width of a row must be a multiple of four floats in FBGEMM's kernels.
COLUMN_MULTIPLE = 4


@dataclass(frozen=True, kw_only=True)
class TablePlacement:
    """How one table is cut, and on which ranks its pieces lie."""

    kind: PlacementKind = "auto"
    """How the table is cut. `auto` leaves it to the planner."""

    ranks: list[int] | None = None
    """Rank of a table_wise table, or ranks of a column_wise table's pieces. By default the planner
    picks them."""

    shards: int | None = None
    """Number of column pieces into which a column_wise, table_column_wise or grid table is cut."""

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, get_args(PlacementKind))
        if self.ranks is not None:
            check_whole_list(
                "ranks", self.ranks, 0, remedy="Name ranks from 0 on, or leave it out."
            )
        if self.ranks is not None and not self.ranks:
            raise Refused("Expected ranks, found an empty list. Name one, or leave ranks out.")
        if self.shards is None:
            return
        check_whole("shards", self.shards, remedy="Or leave it out.")
        if self.kind not in _SPLITS_COLUMNS or len(self.ranks or [0] * self.shards) != self.shards:
            raise Refused(
                f"Expected shards with one of {sorted(_SPLITS_COLUMNS)}, and as many as there are "
                f"ranks, found {self.shards} with {self.kind} and ranks {self.ranks}. Leave shards "
                "out."
            )


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the tables go. By default TorchRec's planner decides."""

    default: PlacementKind = "auto"
    """How tables are cut that `tables` does not name."""

    tables: dict[str, PlacementKind | TablePlacement] = field(default_factory=dict)
    """How single tables are cut, by name: a kind, or a kind with ranks or a number of pieces."""

    def __post_init__(self) -> None:
        check_choice("default", self.default, get_args(PlacementKind))
        check_mapping("tables", self.tables)
        for table, choice in self.tables.items():
            if not isinstance(choice, TablePlacement):
                check_choice(f"tables[{table!r}]", choice, get_args(PlacementKind))

    def of(self, table: str) -> TablePlacement:
        choice = self.tables.get(table, self.default)
        return choice if isinstance(choice, TablePlacement) else TablePlacement(kind=choice)


class FusedSharder(EmbeddingBagCollectionSharder):
    """TorchRec's sharder with fused kernels only, and with row-wise kinds on CPU too.

    It never leaves a table data_parallel: replicated tables would bypass the fused update.
    """

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedTables:
        return ShardedTables(
            module=module,
            table_name_to_parameter_sharding=params,
            env=env,
            fused_params=self.fused_params,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
        )

    @property
    def sharded_module_type(self) -> type[ShardedTables]:
        return ShardedTables

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(_TORCHREC_NAME.values())

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [EmbeddingComputeKernel.FUSED.value]


class FusedSequenceSharder(EmbeddingCollectionSharder):
    """TorchRec's sharder of sequences, with fused kernels only. Sequences are cut in fewer ways."""

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedSequences:
        return ShardedSequences(
            module=module,
            table_name_to_parameter_sharding=params,
            env=env,
            fused_params=self.fused_params,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
        )

    @property
    def sharded_module_type(self) -> type[ShardedSequences]:
        return ShardedSequences

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [_TORCHREC_NAME[kind] for kind in _OF_SEQUENCES[1:]]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [EmbeddingComputeKernel.FUSED.value]


Sharder = FusedSharder | FusedSequenceSharder


def make_sharders(fused_params: dict[str, Any]) -> list[Sharder]:
    """One sharder for each kind of collection."""
    return [FusedSharder(fused_params), FusedSequenceSharder(fused_params)]


def make_plan(
    module: nn.Module,
    placement: Placement,
    sharders: list[Sharder],
    device: torch.device,
    local_world_size: int,
) -> ShardingPlan:
    """Decide where every table of `module` goes. Rank 0 decides for all."""
    world_size = dist.get_world_size()
    configs = _table_configs(module)
    _check_names(placement, configs)
    constraints = {
        name: _constraint(placement.of(name), config, configs, world_size, local_world_size)
        for name, config in configs.items()
    }
    topology = TopologyFactory.create_topology(
        TrainerConfig(world_size=world_size, local_world_size=local_world_size),
        kernel_config=KernelConfig(compute_device=device.type),
    )
    planner = EmbeddingShardingPlanner(
        topology=topology,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(0.1),
    )
    plan = planner.collective_plan(module, sharders, dist.group.WORLD)
    for tables in plan.plan.values():
        for name in tables:
            pinned = placement.of(name).ranks
            if pinned is not None:
                tables[name] = _pin(
                    configs[name],
                    placement.of(name),
                    sharders[not isinstance(configs[name], EmbeddingBagConfig)],
                    device,
                    local_world_size,
                    world_size,
                )
    return plan


def describe(module: nn.Module, plan: ShardingPlan) -> str:
    """The plan as a text table that people can read."""
    configs = _table_configs(module)
    rows = [("table", "rows", "width", "features", "placement", "ranks", "MB per rank")]
    for tables in plan.plan.values():
        for name, sharding in tables.items():
            config = configs[name]
            largest = max(
                shard.shard_sizes[0] * shard.shard_sizes[1]
                for shard in sharding.sharding_spec.shards
            )
            rows.append(
                (
                    name,
                    f"{config.num_embeddings:,}",
                    str(config.embedding_dim),
                    _shorten(", ".join(config.feature_names), 24),
                    sharding.sharding_type,
                    _shorten(", ".join(map(str, sharding.ranks or [])), 16),
                    f"{largest * 4 / 2**20:,.1f}",
                )
            )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _table_configs(module: nn.Module) -> dict[str, BaseEmbeddingConfig]:
    configs: dict[str, BaseEmbeddingConfig] = {}
    for path, collection in plain_collections(module).items():
        for config in table_configs(collection):
            if config.name in configs:
                raise Refused(
                    f"Expected every table to have a name of its own, found {config.name!r} "
                    f"twice (again in {path!r}). Rename one of them."
                )
            configs[config.name] = config
    return configs


def is_mean(config: BaseEmbeddingConfig) -> bool:
    """Whether the table averages its bags. Sequences have no pooling."""
    return isinstance(config, EmbeddingBagConfig) and config.pooling is PoolingType.MEAN


def _check_names(placement: Placement, configs: Mapping[str, BaseEmbeddingConfig]) -> None:
    unknown = sorted(set(placement.tables) - set(configs))
    if unknown:
        raise Refused(
            f"Expected placement.tables to name tables of the model, found {unknown}. "
            f"The model has {sorted(configs)}."
        )


def _constraint(
    choice: TablePlacement,
    config: BaseEmbeddingConfig,
    configs: Mapping[str, BaseEmbeddingConfig],
    world_size: int,
    local_world_size: int,
) -> ParameterConstraints:
    """What the planner may do with one table."""
    if not isinstance(config, EmbeddingBagConfig) and choice.kind not in _OF_SEQUENCES:
        raise Refused(
            f"Expected table {config.name!r} of an EmbeddingCollection to be placed by one of "
            f"{list(_OF_SEQUENCES)}, found {choice.kind!r}, which TorchRec has for bags only. Use "
            "row_wise or column_wise to cut it."
        )
    if choice.ranks is not None and choice.kind not in ("table_wise", "column_wise"):
        raise Refused(
            f"Expected ranks with table_wise or column_wise only, found {choice.kind} for table "
            f"{config.name!r}. Leave ranks out: the planner picks them."
        )
    if choice.ranks is not None and not set(choice.ranks) <= set(range(world_size)):
        raise Refused(
            f"Expected ranks from 0 to {world_size - 1} for table {config.name!r}, found "
            f"{choice.ranks}. Name these, or use more devices."
        )
    if choice.kind == "table_wise" and choice.ranks is not None and len(choice.ranks) != 1:
        raise Refused(
            f"Expected one rank for table_wise table {config.name!r}, found {choice.ranks}. "
            "Use column_wise or row_wise to cut a table."
        )
    if choice.kind == "auto":
        return ParameterConstraints(sharding_types=[_auto_kind(config, configs, world_size)])
    min_partition = None
    if choice.kind in _SPLITS_COLUMNS:
        hosts = world_size // local_world_size
        wanted = len(choice.ranks) if choice.ranks is not None else choice.shards
        most = hosts if choice.kind == "grid" else world_size
        min_partition = _column_width(config, wanted, most)
    return ParameterConstraints(
        sharding_types=[_TORCHREC_NAME[choice.kind]], min_partition=min_partition
    )


def _auto_kind(
    config: BaseEmbeddingConfig, configs: Mapping[str, BaseEmbeddingConfig], world_size: int
) -> str:
    """How an `auto` table is cut: by rows if it exceeds a rank's fair share, or else not at all.

    The planner spreads the tables that stay whole. If it were free, it would cut a table of three
    rows, or leave one whole that takes most of the memory. All tables stay whole if one of them is
    MEAN-pooled: TorchRec mixes up divisors when row-wise tables stand beside other kinds.
    """
    size = config.num_embeddings * config.embedding_dim
    total = sum(c.num_embeddings * c.embedding_dim for c in configs.values())
    no_mean = not any(is_mean(c) for c in configs.values())
    if world_size > 1 and size * world_size > total and no_mean:
        return ShardingType.ROW_WISE.value
    return ShardingType.TABLE_WISE.value


def _column_width(config: BaseEmbeddingConfig, shards: int | None, most: int) -> int:
    """Number of columns per piece. Without `shards`, as many pieces are made as `most` allows."""
    width = config.embedding_dim
    fits = [n for n in range(1, most + 1) if width % n == 0 and (width // n) % COLUMN_MULTIPLE == 0]
    if shards is None:
        return width // max(fits)
    if width % shards or (width // shards) % COLUMN_MULTIPLE:
        raise Refused(
            f"Expected table {config.name!r} (width {width}) to be cut into pieces of a multiple "
            f"of {COLUMN_MULTIPLE} columns, found {shards} pieces. Choose from {fits}."
        )
    return width // shards


def _pin(
    config: BaseEmbeddingConfig,
    choice: TablePlacement,
    sharder: Sharder,
    device: torch.device,
    local_world_size: int,
    world_size: int,
) -> ParameterSharding:
    """The sharding of a table whose ranks the user has named."""
    assert choice.ranks is not None
    kernel = EmbeddingComputeKernel.FUSED.value
    generate = (
        table_wise(rank=choice.ranks[0], compute_kernel=kernel)
        if choice.kind == "table_wise"
        else column_wise(ranks=choice.ranks, compute_kernel=kernel)
    )
    weight = torch.empty(config.num_embeddings, config.embedding_dim, device="meta")
    return generate(nn.Parameter(weight), local_world_size, world_size, device.type, sharder)

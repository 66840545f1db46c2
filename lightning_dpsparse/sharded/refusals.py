"""Set-ups that TorchRec or FBGEMM accept and then compute wrongly. Each was reproduced."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from lightning_dpsparse.sharded.placement import COLUMN_MULTIPLE, SPLITS_ROWS
from lightning_dpsparse.sharded.seam import ShardedTables


def check_tables(module: nn.Module) -> None:
    """Refuse tables that cannot be trained right, before anything is planned."""
    collections = [
        (path, child)
        for path, child in module.named_modules()
        if isinstance(child, EmbeddingBagCollection)
    ]
    for path, child in module.named_modules():
        if isinstance(child, EmbeddingCollection):
            raise ValueError(
                f"Expected pooled tables (EmbeddingBagCollection), found an EmbeddingCollection at "
                f"{path!r}, which this version does not shard. Pool its features, or use "
                "nn.Embedding for a small replicated table."
            )
    if not collections:
        raise ValueError(
            "Expected an EmbeddingBagCollection in the module, found none. Build it in "
            "configure_model(), or use Lightning's DDPStrategy for a model without tables."
        )
    for path, collection in collections:
        for config in collection.embedding_bag_configs():
            _check_table(config, path, is_weighted=collection.is_weighted())


def _check_table(config: EmbeddingBagConfig, path: str, *, is_weighted: bool) -> None:
    where = f"table {config.name!r} of {path!r}"
    if config.data_type is not DataType.FP32:
        raise ValueError(
            f"Expected float32 weights in {where}, found {config.data_type.name}: FBGEMM rounds "
            "half precision stochastically. Set data_type to FP32."
        )
    if config.embedding_dim % COLUMN_MULTIPLE:
        raise ValueError(
            f"Expected embedding_dim to be a multiple of {COLUMN_MULTIPLE} in {where}, found "
            f"{config.embedding_dim}: FBGEMM's kernels need it. Round it up."
        )
    if config.pooling is PoolingType.MEAN and is_weighted:
        raise ValueError(
            f"Expected SUM pooling in {where}, found MEAN on a weighted collection: FBGEMM's CPU "
            "backward disagrees with its forward. Divide the weights by the bag length instead."
        )


def check_wrappers(module: nn.Module) -> None:
    """Refuse tables that something else wrapped or sharded, with settings of its own."""
    for path, child in module.named_modules():
        if isinstance(child, (DistributedDataParallel, DistributedModelParallel)):
            raise ValueError(
                f"Expected bare layers, found {type(child).__name__} at {path!r}: the strategy "
                "shards tables and adds up gradients itself. Leave the wrapper out."
            )
        if isinstance(child, ShardedEmbeddingBagCollection) and not isinstance(
            child, ShardedTables
        ):
            raise ValueError(
                f"Expected tables that the strategy shards, found {path!r} sharded before, with an "
                "optimizer that may clip or round by itself. Hand over the EmbeddingBagCollection."
            )


def check_plan(module: nn.Module, plan: ShardingPlan) -> None:
    """Refuse placements that upstream computes wrongly."""
    modules = dict(module.named_modules())
    for path, tables in plan.plan.items():
        kinds = {name: sharding.sharding_type for name, sharding in tables.items()}
        for config in modules[path].embedding_bag_configs():
            kind = kinds[config.name]
            if kind == ShardingType.DATA_PARALLEL.value:
                raise ValueError(
                    f"Expected table {config.name!r} to be sharded, found data_parallel: its "
                    "copies would drift apart. Use table_wise."
                )
            if config.pooling is not PoolingType.MEAN or kind not in SPLITS_ROWS:
                continue
            if kind == ShardingType.GRID_SHARD.value:
                raise ValueError(
                    f"Expected SUM pooling in grid table {config.name!r}, found MEAN, which "
                    "TorchRec computes as SUM. Use table_wise or column_wise for it."
                )
            others = sorted(set(kinds.values()) - {kind})
            if others:
                raise ValueError(
                    f"Expected every table of {path!r} to be {kind} when MEAN-pooled table "
                    f"{config.name!r} is, found {others} beside it: TorchRec would divide those "
                    "tables too. Use table_wise for it, or an EmbeddingBagCollection of its own."
                )

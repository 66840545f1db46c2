"""Refuses set-ups that TorchRec or FBGEMM accept and then compute wrongly. Each was reproduced.

`check_tables` and `check_wrappers` look at the module, before anything is planned. `check_plan`
looks at the plan, before tables are sharded, and `check_backend` at the name of what ranks talk
by. Settings of the fused optimizer are checked in
`fused.py`, and those of placements in `placement.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding import get_ec_index_dedup
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ParameterSharding, ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType

from lightning_dpsparse.checks import shown
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.collections import (
    SHARDED,
    is_pooled,
    plain_collections,
    table_configs,
)
from lightning_dpsparse.sharded.cut import PrivateLookup
from lightning_dpsparse.sharded.placement import COLUMN_MULTIPLE, SPLITS_ROWS, is_mean


def check_backend(name: object) -> None:
    """Refuse a backend of process groups that torch does not know; None is what fits the device."""
    if name is None:
        return
    # One for all devices, or one for each: "cpu:gloo,cuda:nccl".
    parts = name.split(",") if isinstance(name, str) else [""]
    known = [backend for backend in dist.Backend.backend_list if backend != "undefined"]
    if not all(part.rpartition(":")[2] in known for part in parts):
        raise Refused(
            f"Expected process_group_backend to be one of {known}, found {shown(name)}. Leave it "
            "out: gloo is for CPU, and nccl for CUDA."
        )


def check_tables(module: nn.Module) -> None:
    """Refuse tables that cannot be trained right, before anything is planned."""
    collections = plain_collections(module)
    if not collections:
        raise Refused(
            "Expected an EmbeddingBagCollection or an EmbeddingCollection in the module, found "
            "none. Build it in configure_model(), or use Lightning's DDPStrategy for a model "
            "without tables."
        )
    for path, collection in collections.items():
        if not is_pooled(collection) and get_ec_index_dedup():
            raise Refused(
                f"Expected every lookup of the EmbeddingCollection at {path!r} to be made, found "
                "TorchRec's index deduplication switched on: a row that several examples read "
                "would be read once, for all of them. Call set_ec_index_dedup(False)."
            )
        is_weighted = is_pooled(collection) and collection.is_weighted()
        _check_parameters(module, path, collection)
        for config in table_configs(collection):
            _check_table(config, path, is_weighted=is_weighted)


def _check_parameters(module: nn.Module, path: str, collection: nn.Module) -> None:
    """Refuse settings of tables' weights that sharding would silently drop."""
    inside = {id(parameter): name for name, parameter in collection.named_parameters()}
    for name, parameter in collection.named_parameters():
        if not parameter.requires_grad:
            raise Refused(
                f"Expected tables that learn in {path!r}, found requires_grad=False for {name!r}: "
                "the fused optimizer would train it all the same. Put a table that is fixed into "
                "nn.EmbeddingBag.from_pretrained."
            )
        if getattr(parameter, "_in_backward_optimizers", None) or hasattr(
            parameter, "_optimizer_classes"
        ):
            raise Refused(
                f"Expected the strategy's fused_optimizer to train {path!r}, found "
                f"apply_optimizer_in_backward on {name!r}, whose settings would be ignored. Set "
                "them in FusedOptimizer."
            )
    prefix = f"{path}." if path else ""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in inside and name != prefix + inside[id(parameter)]:
            raise Refused(
                f"Expected tables of {path!r} to share their weights with nobody, found that "
                f"{name!r} is tied to {inside[id(parameter)]!r}: sharding would part them. Give "
                "each a weight of its own."
            )


def _check_table(config: BaseEmbeddingConfig, path: str, *, is_weighted: bool) -> None:
    where = f"table {config.name!r} of {path!r}"
    if config.data_type is not DataType.FP32:
        raise Refused(
            f"Expected float32 weights in {where}, found {config.data_type.name}: FBGEMM rounds "
            "half precision stochastically. Set data_type to FP32."
        )
    if config.embedding_dim % COLUMN_MULTIPLE:
        raise Refused(
            f"Expected embedding_dim to be a multiple of {COLUMN_MULTIPLE} in {where}, found "
            f"{config.embedding_dim}: FBGEMM's kernels need it. Round it up."
        )
    if is_mean(config) and is_weighted:
        raise Refused(
            f"Expected SUM pooling in {where}, found MEAN on a weighted collection: FBGEMM's CPU "
            "backward disagrees with its forward. Divide the weights by the bag length instead."
        )


def check_wrappers(module: nn.Module) -> None:
    """Refuse tables that something else wrapped or sharded, with settings of its own."""
    for path, child in module.named_modules():
        if isinstance(child, (DistributedDataParallel, DistributedModelParallel)):
            raise Refused(
                f"Expected bare layers, found {type(child).__name__} at {path!r}: the strategy "
                "shards tables and adds up gradients itself. Leave the wrapper out."
            )
        if isinstance(child, SHARDED) and not isinstance(child, PrivateLookup):
            raise Refused(
                f"Expected tables that the strategy shards, found {path!r} sharded before, with an "
                "optimizer that may clip or round by itself. Hand over the plain collection."
            )


def check_plan(module: nn.Module, plan: ShardingPlan) -> None:
    """Refuse placements that upstream computes wrongly."""
    modules = dict(module.named_modules())
    for path, tables in plan.plan.items():
        kinds = {name: sharding.sharding_type for name, sharding in tables.items()}
        if not is_pooled(modules[path]):
            _check_pieces(path, tables)
        for config in table_configs(modules[path]):
            kind = kinds[config.name]
            if kind == ShardingType.DATA_PARALLEL.value:
                raise Refused(
                    f"Expected table {config.name!r} to be sharded, found data_parallel: its "
                    "copies would drift apart. Use table_wise."
                )
            if not is_mean(config) or kind not in SPLITS_ROWS:
                continue
            if kind == ShardingType.GRID_SHARD.value:
                raise Refused(
                    f"Expected SUM pooling in grid table {config.name!r}, found MEAN, which "
                    "TorchRec computes as SUM. Use table_wise or column_wise for it."
                )
            others = sorted(set(kinds.values()) - {kind})
            if others:
                raise Refused(
                    f"Expected every table of {path!r} to be {kind} when MEAN-pooled table "
                    f"{config.name!r} is, found {others} beside it: TorchRec would divide those "
                    "tables too. Use table_wise for it, or an EmbeddingBagCollection of its own."
                )


def _check_pieces(path: str, tables: Mapping[str, ParameterSharding]) -> None:
    """Refuse pieces of several widths: TorchRec takes the first width for that of all pieces."""
    widths = {
        name: shard.shard_sizes[1]
        for name, sharding in tables.items()
        if sharding.sharding_type == ShardingType.COLUMN_WISE.value
        for shard in sharding.sharding_spec.shards
    }
    if len(set(widths.values())) > 1:
        raise Refused(
            f"Expected the column_wise tables of the EmbeddingCollection at {path!r} to be cut "
            f"into pieces of one width, found {widths}. Give them the same number of shards."
        )

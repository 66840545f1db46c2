"""Shards a module's tables in place, and keeps the dense layers of all ranks equal.

Tables are cut into pieces that lie on different ranks (`placement.py`). Set-ups that would train
wrongly are refused first (`refusals.py`). Dense layers are on every rank: all ranks start from rank
0's values, and their gradients are added up.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed import comm_ops
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedModule, ShardingEnv

from lightning_dpsparse.sharded.collections import (
    plain_collections,
    sharded_collections,
    table_configs,
)
from lightning_dpsparse.sharded.fused import FusedOptimizer
from lightning_dpsparse.sharded.ids import IdCheck
from lightning_dpsparse.sharded.placement import Placement, describe, make_plan, make_sharders
from lightning_dpsparse.sharded.refusals import check_plan, check_tables
from lightning_dpsparse.sharded.shards import initialise_shards, load_whole_tables
from lightning_dpsparse.sharded.upstream import check_was_cut


def divide_gradients_by_world_size(enabled: bool) -> None:
    """Set TorchRec's switch, which is on by default. Here losses are scaled instead."""
    comm_ops.set_gradient_division(enabled)


def shard_tables(
    module: nn.Module,
    placement: Placement,
    optimizer: FusedOptimizer,
    device: torch.device,
    local_world_size: int,
) -> str:
    """Replace every collection of tables in `module` by its sharded twin.

    Tables that already hold values (built outside configure_model) keep them. Returns the plan as
    text.
    """
    check_tables(module)
    sharders = make_sharders(optimizer.fused_params())
    plan = make_plan(module, placement, sharders, device, local_world_size)
    check_plan(module, plan)
    text = describe(module, plan)
    existing = _existing_tables(module)
    DistributedModelParallel(
        module,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=plan,
        sharders=sharders,
        init_data_parallel=False,
        init_parameters=False,
    )
    for collection in sharded_collections(module).values():
        check_was_cut(collection)
    initialise_shards(module, _common_seed())
    load_whole_tables(module, existing)
    for collection in sharded_collections(module).values():
        collection.register_forward_pre_hook(IdCheck(table_configs(collection)))
    return text


def _existing_tables(module: nn.Module) -> dict[str, Tensor]:
    return {
        f"{path}.{name}": weight.detach()
        for path, child in plain_collections(module).items()
        for name, weight in child.state_dict().items()
        if weight.device.type != "meta"
    }


def _common_seed() -> int:
    """Rank 0's seed, so that ranks agree even if the user set no seed."""
    seed = [torch.initial_seed()]
    dist.broadcast_object_list(seed, src=0)
    return seed[0]


def move_dense_to(module: nn.Module, device: torch.device) -> None:
    """Call `.to(device)` on everything in a module but its sharded collections."""
    if isinstance(module, ShardedModule):
        return
    if not any(isinstance(child, ShardedModule) for child in module.modules()):
        module.to(device)
        return
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.data.to(device)
    for name, buffer in list(module.named_buffers(recurse=False)):
        setattr(module, name, buffer.to(device))
    for child in module.children():
        move_dense_to(child, device)


@torch.no_grad()
def broadcast_dense(module: nn.Module) -> None:
    """Give every rank the dense parameters and buffers of rank 0."""
    if isinstance(module, ShardedModule) or dist.get_world_size() == 1:
        return
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        dist.broadcast(tensor.data, src=0)
    for child in module.children():
        broadcast_dense(child)


@torch.no_grad()
def sum_gradients(parameters: list[nn.Parameter]) -> None:
    """Add up the dense gradients of all ranks, in one all-reduce."""
    if dist.get_world_size() == 1 or not parameters:
        return
    for parameter in parameters:
        if parameter.grad is None:  # not used on this rank, but perhaps on another
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    pieces = flat.split([gradient.numel() for gradient in gradients])
    for gradient, piece in zip(gradients, pieces):
        gradient.copy_(piece.view_as(gradient))


def global_count(local_count: int, device: torch.device) -> Tensor:
    """The sum of `local_count` over ranks. It stays on the device: the host need not wait."""
    count = torch.tensor(float(local_count), device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(count)
    return count


def on_every_rank(value: object) -> list[object]:
    """What every rank gave as `value`, in the order of ranks."""
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values

"""What ranks tell each other: sums, rank 0's results, and which examples belong to one unit."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dpsparse.engine.step_inputs import Ranks
from lightning_dpsparse.refused import Refused

# B examples of all ranks after padding, P examples of one rank after padding, U units of this rank

T = TypeVar("T")


def join_restarted_group(backend: str, timeout: timedelta | None, device: torch.device) -> None:
    """Join the process group of a job that torchrun has started, for the first time or again.

    torchrun keeps one store for all attempts, and torch's own rendezvous finds the addresses of
    dead ranks in it when a job was started again: ranks then refuse each other, or wait for ever
    (torch 2.13; TORCH_DISABLE_SHARE_RDZV_TCP_STORE is its way out). So each attempt has names of
    its own in the store.
    """
    settings = os.environ
    if dist.is_initialized() or settings.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return
    patience = timeout or dist.default_pg_timeout
    port, world_size = int(settings["MASTER_PORT"]), int(settings["WORLD_SIZE"])
    store = dist.TCPStore(settings["MASTER_ADDR"], port, world_size, False, patience)
    attempt = settings.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"attempt {attempt}", store),
        rank=int(settings["RANK"]),
        world_size=world_size,
        timeout=patience,
        device_id=None if device.type == "cpu" else device,
    )


def sum_over_ranks(tensor: Tensor) -> None:
    """Add a tensor up over all ranks, in place."""
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor)


def largest_over_ranks(values: Sequence[float]) -> list[float]:
    """The largest of every value over all ranks. It does not wait for the device."""
    if dist.get_world_size() == 1:
        return list(values)
    largest = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=_host_group())
    found: list[float] = largest.tolist()
    return found


@cache
def _host_group_of(group: object) -> dist.ProcessGroup | None:
    """A group of all ranks that exchanges numbers of the host's memory."""
    return dist.new_group(backend="gloo") if dist.get_backend() != "gloo" else None


def _host_group() -> dist.ProcessGroup | None:
    """The default group, if it can; made once for every default group."""
    return _host_group_of(dist.group.WORLD)


def from_rank_zero(make: Callable[[], T]) -> T:
    """Return on every rank what rank 0 makes, or raise its error, so that no rank waits for it."""
    made: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            made[0] = make()
        except Exception as error:
            made[1] = error
    dist.broadcast_object_list(made, src=0)
    if made[1] is not None:
        raise made[1]
    result: T = made[0]
    return result


def on_all_ranks(act: Callable[[], T]) -> list[T]:
    """Let every rank act, and return what each has got. If one fails, all raise.

    So no rank goes on, or waits, where another has stopped. A rank that failed raises its own
    error, and the others say whose it was.
    """
    mine: tuple[Any, BaseException | None]
    try:
        mine = act(), None
    except Exception as error:
        mine = None, error
    answers: list[Any] = [None] * dist.get_world_size()
    told = mine[0], None if mine[1] is None else (isinstance(mine[1], Refused), str(mine[1]))
    dist.all_gather_object(answers, told)
    if mine[1] is not None:
        raise mine[1]
    for rank, (_, failure) in enumerate(answers):
        if failure is not None:
            is_refusal, words = failure
            raise Refused(words) if is_refusal else RuntimeError(f"Rank {rank} failed: {words}")
    return [answer for answer, _ in answers]


def first_of_units(unit_sizes: Sequence[int], loss_n: Tensor, ranks: Ranks) -> Tensor | None:
    """The first example of every example's unit, for all ranks; None if each example is a unit.

    `unit_sizes` is how many examples each unit has in this rank's batch, in order.
    """
    sizes = torch.tensor(unit_sizes, dtype=torch.int64)
    if sizes.sum() != loss_n.numel():
        raise Refused(
            "Expected unit sizes that add up to the losses of this rank, found others. Give "
            "the number of examples of each user, in the order of the batch."
        )
    all_B = torch.arange(ranks.num_examples, device=loss_n.device)
    # A padding example is a unit of its own. Padding makes the ranks' pieces equal in size.
    first_of_unit_P = all_B.view(dist.get_world_size(), -1)[dist.get_rank()].clone()
    first_U = ranks.first_example + sizes.cumsum(0) - sizes
    first_of_unit_P[: loss_n.numel()] = first_U.repeat_interleave(sizes).to(loss_n.device)
    first_of_unit_B = torch.empty_like(all_B)
    dist.all_gather_into_tensor(first_of_unit_B, first_of_unit_P)
    return None if torch.equal(first_of_unit_B, all_B) else first_of_unit_B

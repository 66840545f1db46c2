"""The ids of a batch that is too large for memory, listed before its first part is clipped.

A mechanism that chooses the rows of a step by who reads them (AdaFEST) must see the whole batch.
It needs ids only, and no gradients. So all parts are taken through the model once more, without
gradients, and the ids are noted where they arrive: at the kernels that hold the rows. That works
for models that make ids of their own, too, and costs one forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dpsparse.engine.lookups import joined
from lightning_dpsparse.engine.mechanism import BatchReads
from lightning_dpsparse.engine.state import Reading
from lightning_dpsparse.engine.step import StepConfig
from lightning_dpsparse.engine.step_inputs import Ranks
from lightning_dpsparse.sharded.cut import PrivateLookup, all_reads
from lightning_dpsparse.sharded.kernel import Kernel
from lightning_dpsparse.sharded.kernel_read import KernelRead

# B examples of all ranks


@dataclass(frozen=True)
class Parts:
    """A batch in several parts, which can be taken through the model before the step itself."""

    forward: Sequence[Callable[[], Tensor]]
    """For each part, a function that takes it through the model and returns one loss per example of
    this rank."""
    without_a_trace: Callable[[], AbstractContextManager[None]]
    """A context in which taking parts through the model logs nothing, counts nothing, and draws the
    random numbers that the step itself will draw."""


@torch.no_grad()
def list_ids(
    parts: Parts,
    collections: Sequence[PrivateLookup],
    config: StepConfig,
    sum_over_ranks: Callable[[Tensor], None],
    step: int,
) -> BatchReads:
    """What every kernel reads for the whole batch, on all ranks together."""
    kept = [(c.reading, c.reads, c.padded_size, c.local_size) for c in collections]
    by_kernel: dict[Kernel, list[KernelRead]] = {}
    num_examples, device = 0, torch.device("cpu")
    try:
        with parts.without_a_trace():
            for forward in parts.forward:
                for collection in collections:
                    collection.reading, collection.reads = Reading.IDS, []
                    collection.padded_size = 0
                loss_n = forward()
                device = loss_n.device
                for collection in collections:
                    if not collection.padded_size:
                        collection.read_empty_batch(loss_n.numel(), device)
                for read in all_reads(collections):
                    by_kernel.setdefault(read.kernel, []).append(_shifted(read, num_examples))
                num_examples += dist.get_world_size() * collections[0].padded_size
    finally:
        for collection, (reading, reads, padded_size, local_size) in zip(collections, kept):
            collection.reading, collection.reads = reading, reads
            collection.padded_size, collection.local_size = padded_size, local_size
    ranks = Ranks(num_examples, 0, sum_over_ranks, dist.get_rank(), dist.get_world_size())
    return BatchReads(
        [_joined(reads) for reads in by_kernel.values()],
        [],
        None,
        ranks,
        config.noise,
        config.noise_multiplier,
        config.expected_batch,
        step,
        device,
    )


def _shifted(read: KernelRead, first: int) -> KernelRead:
    """The same read, with its examples numbered from `first` on."""
    order_B = read.order_B
    if order_B is None:
        order_B = torch.arange(read.bags.num_examples, device=read.bags.offsets.device)
    return replace(read, order_B=order_B + first)


def _joined(parts: Sequence[KernelRead]) -> KernelRead:
    """What one kernel reads for all parts."""
    orders = [part.order_B for part in parts if part.order_B is not None]
    return replace(parts[0], bags=joined([part.bags for part in parts]), order_B=torch.cat(orders))

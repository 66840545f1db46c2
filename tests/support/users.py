"""Users of several examples: private training on ranks, and a naive loop over users in float64."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_dpsparse import Placement
from tests.support.naive_step import EXPECTED, Batches, flat
from tests.support.plain_training import SGD, update
from tests.support.ranks import Ranks
from tests.support.reference import Reference
from tests.support.tiny_model import Bags, Recording, assemble, collate, make_trainer, snapshot


def leaders_of(sizes: list[int]) -> Tensor:
    """The first example of every example's user."""
    starts = [sum(sizes[:u]) for u in range(len(sizes))]
    return torch.tensor([start for start, size in zip(starts, sizes) for _ in range(size)]).long()


Units = list[list[list[int]]]
"""Examples of each user, by step and rank."""

UNITS: dict[str, Units] = {
    "even": [[[2, 2], [1, 3]], [[4], [1, 1, 2]], [[1, 1, 1, 1], [4]]],
    "uneven": [[[3, 1, 1], [1]], [[], [2, 2]], [[6, 1], [1, 2]]],
    "empty": [[[], []], [[2, 1], []], [[], []]],
}


class Users(Recording):
    """Says before every step whose its examples are. In step `poisoned` the last one overflows."""

    def __init__(self, units: list[list[int]], poisoned: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units, self.poisoned = units, poisoned

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        private = self.trainer.strategy._run.stepper  # type: ignore[attr-defined]
        private.start(batch_idx, self.units[batch_idx])
        loss = super().training_step(batch, batch_idx)
        if batch_idx == self.poisoned and self.global_rank == self.trainer.world_size - 1:
            loss = loss * torch.tensor([1.0] * (len(loss) - 1) + [math.nan])
        return loss


def sizes_of(units: Units) -> list[list[int]]:
    return [[sum(rank) for rank in step] for step in units]


def train(
    world_size: int,
    units: Units,
    placement: Placement,
    privacy: Any,
    *,
    hosts: int = 1,
    poisoned: int | None = None,
    most: int | None = None,
    sequences: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Private training on every rank; runs inside a rank. A lone rank gets all users."""
    torch.manual_seed(0)
    rank = torch.distributed.get_rank() if world_size > 1 else None
    mine = [list(chain.from_iterable(step)) if rank is None else step[rank] for step in units]
    module = Users(mine, poisoned, sequences=sequences)
    trainer = make_trainer(
        world_size, placement, SGD, hosts=hosts, privacy=privacy, max_physical_batch=most
    )
    trainer.fit(module, Batches(sizes_of(units), rank))
    return {"start": module.start, "end": snapshot(module)}


def run_users(ranks: Ranks, *args: Any, **kwargs: Any) -> tuple[dict[str, Tensor], ...]:
    results = ranks.run(train, ranks.world_size, *args, **kwargs)
    return assemble([r["start"] for r in results]), assemble([r["end"] for r in results])


def naive_users(
    start: dict[str, Tensor], units: Units, *, factors: Any = flat, poisoned: int | None = None
) -> dict[str, Tensor]:
    """Gradients of a user's examples by autograd, added up, and clipped to 0.5 user by user."""
    model = Reference(start, mean=False).double()
    names = [name for name, _ in model.named_parameters()]
    dense = torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)
    examples, position = Bags(100), 0
    for step, ranks in enumerate(units):
        users = list(chain.from_iterable(ranks))
        total = [torch.zeros_like(p) for p in model.parameters()]
        for index, size in enumerate(users):
            summed = [torch.zeros_like(p) for p in model.parameters()]
            for i in range(position, position + size):
                batch = collate([examples[i]])
                batch.dense_features = batch.dense_features.double()
                loss = F.binary_cross_entropy_with_logits(model(batch), batch.labels.double())
                each = torch.autograd.grad(loss, list(model.parameters()))
                summed = [s + g for s, g in zip(summed, each)]
            position += size
            if step != poisoned or index < len(users) - 1:
                scales = factors(names, summed, 0.5)
                total = [t + f * s for t, f, s in zip(total, scales, summed)]
        for parameter, gradient in zip(model.parameters(), total):
            parameter.grad = gradient / EXPECTED
        dense.step()
        with torch.no_grad():
            for bag in model.bags.values():
                update(bag.weight, torch.empty(0), SGD, 1.0)
    return model.weights()

"""Users clipped as one, on real ranks, against a naive loop over users in float64."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_dpsparse import Placement
from lightning_dpsparse.engine.clipping import AutomaticClipping, GroupClipping
from tests.plugin.test_training import PLACEMENTS, SGD, assert_close, update
from tests.support.naive_step import EXPECTED, Batches, automatic, flat, grouped, naive, plan, run
from tests.support.ranks import Ranks
from tests.support.reference import Reference
from tests.support.tiny_model import (
    SEQUENCES,
    Bags,
    Recording,
    assemble,
    collate,
    make_trainer,
    name_of,
    snapshot,
)

Units = list[list[list[int]]]
"""Examples of each user, by step and rank."""

UNITS: dict[str, Units] = {
    "even": [[[2, 2], [1, 3]], [[4], [1, 1, 2]], [[1, 1, 1, 1], [4]]],
    "uneven": [[[3, 1, 1], [1]], [[], [2, 2]], [[6, 1], [1, 2]]],
    "empty": [[[], []], [[2, 1], []], [[], []]],
}
GROUPS = GroupClipping({"*.t[01].weight": 3.0, "*": 4.0})


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


@pytest.mark.parametrize("name", UNITS)
def test_one_rank_is_the_naive_step_over_users(one_rank: Ranks, name: str) -> None:
    start, end = run_users(one_rank, UNITS[name], Placement(), plan())
    assert_close(end, naive_users(start, UNITS[name]), 1e-6)


@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize("placement", ["table_wise", "row_wise", "mixed"])
def test_two_ranks_are_the_naive_step_over_users(
    two_ranks: Ranks, placement: str, name: str
) -> None:
    start, end = run_users(two_ranks, UNITS[name], PLACEMENTS[placement], plan())
    assert_close(end, naive_users(start, UNITS[name]), 1e-6)


@pytest.mark.parametrize(
    ("kind", "sequences"), [("table_row_wise", ()), ("row_wise", SEQUENCES)], ids=name_of
)
def test_four_ranks_on_two_hosts_are_the_naive_step_over_users(
    four_ranks: Ranks, kind: Any, sequences: tuple[str, ...]
) -> None:
    """Two-level kinds interleave the hosts' examples on a shard: ranks 0, 2, 1, 3."""
    units = [[[2, 1], [], [2], [1]], [[], [], [], [1, 4]], [[2], [1, 1], [2], [2]]]
    settings: dict[str, Any] = {"hosts": 2, "sequences": sequences}
    start, end = run_users(four_ranks, units, Placement(default=kind), plan(), **settings)
    assert_close(end, naive_users(start, units), 1e-6)


@pytest.mark.parametrize(
    ("clipping", "factors"), [(AutomaticClipping(), automatic), (GROUPS, grouped)]
)
def test_other_clipping_is_the_naive_step_over_users(
    two_ranks: Ranks, clipping: Any, factors: Any
) -> None:
    units = UNITS["uneven"]
    start, end = run_users(two_ranks, units, PLACEMENTS["mixed"], plan(clipping=clipping))
    assert_close(end, naive_users(start, units, factors=factors), 2e-6)


@pytest.mark.parametrize("placement", ["table_wise", "row_wise"])
def test_an_example_that_overflows_takes_its_user_along(two_ranks: Ranks, placement: str) -> None:
    units = UNITS["even"]
    start, end = run_users(two_ranks, units, PLACEMENTS[placement], plan(), poisoned=1)
    assert_close(end, naive_users(start, units, poisoned=1), 1e-6)


def test_users_of_one_example_are_examples_to_the_last_bit(two_ranks: Ranks) -> None:
    sizes = [[5, 1], [0, 4], [7, 3]]
    ones = [[[1] * size for size in step] for step in sizes]
    _, found = run_users(two_ranks, ones, PLACEMENTS["mixed"], plan())
    _, expected = run(two_ranks, sizes, PLACEMENTS["mixed"], SGD, plan())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)


def test_clipping_users_is_not_clipping_examples(one_rank: Ranks) -> None:
    """The tests above would pass on per-example clipping if both gave the same."""
    start, end = run_users(one_rank, UNITS["even"], Placement(), plan())
    with pytest.raises(AssertionError):
        assert_close(end, naive(start, sizes_of(UNITS["even"]), SGD, 0.5), 1e-4)


def train_on_four_examples(sizes: list[int]) -> None:
    trainer = make_trainer(1, Placement(), SGD, privacy=plan())
    trainer.fit(Users([sizes]), Batches([[4]], None))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([2, 0, 2], "Expected at least one example of every user, found none"),
        ([2, 1], "add up to the losses of this rank"),
        ([], "add up to the losses of this rank"),
        ([4, 1], "add up to the losses of this rank"),
    ],
    ids=str,
)
def test_users_must_cover_the_batch(one_rank: Ranks, sizes: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        one_rank.run(train_on_four_examples, sizes)


def test_users_are_not_cut_into_parts(one_rank: Ranks) -> None:
    with pytest.raises(ValueError, match="a user's examples must be clipped together"):
        run_users(one_rank, UNITS["even"], Placement(), plan(), most=3)

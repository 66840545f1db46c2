"""The private step equals a naive one: a loop over examples, float64, plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_dpsparse import DPSGD, EANA, FusedOptimizer, Placement, PrivacyPlan
from tests.plugin.test_training import PLACEMENTS, ROWWISE, SGD, assert_close, update
from tests.ranks import Ranks
from tests.small import Bags, Recording, Reference, assemble, collate, make_trainer, snapshot

# eps keeps Adagrad from blowing rounding up to a full step where gradients cancel in float32.
ADAGRAD = FusedOptimizer(kind="adagrad", learning_rate=0.3, eps=1e-3)
EXPECTED = 10
SIZES = {
    "even": [[4, 4], [4, 4], [4, 4]],
    "uneven": [[5, 1], [0, 4], [7, 3]],
    "empty": [[0, 0], [3, 0], [0, 0]],
}


class Batches:
    """A loader of given batches: step s has sizes[s][rank] examples on each rank."""

    def __init__(self, sizes: list[list[int]], rank: int | None) -> None:
        self.batches, start, examples = [], 0, Bags(100)
        for step in sizes:
            parts = [step[rank]] if rank is not None else step
            skip = sum(step[:rank]) if rank is not None else 0
            first = start + skip
            self.batches.append(collate([examples[i] for i in range(first, first + sum(parts))]))
            start += sum(step)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Poisoned(Recording):
    """One example of the second step has an infinite loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and self.global_rank == 0 and len(loss):
            loss = loss * torch.tensor([math.inf] + [1.0] * (len(loss) - 1))
        return loss


def train(
    world_size: int,
    sizes: list[list[int]],
    placement: Placement,
    optimizer: FusedOptimizer,
    plan: PrivacyPlan,
    hosts: int = 1,
    poisoned: bool = False,
    **kwargs: Any,
) -> dict[str, Any]:
    """Private training on every rank; runs inside a rank. A lone rank gets all examples."""
    torch.manual_seed(0)
    module = (Poisoned if poisoned else Recording)(**kwargs)
    rank = torch.distributed.get_rank() if world_size > 1 else None
    trainer = make_trainer(world_size, placement, optimizer, hosts=hosts, privacy=plan)
    trainer.fit(module, Batches(sizes, rank))
    return {"start": module.start, "end": snapshot(module)}


def naive(
    start: dict[str, Tensor],
    sizes: list[list[int]],
    optimizer: FusedOptimizer,
    clip_norm: float,
    *,
    mean: bool = False,
    poisoned: bool = False,
) -> dict[str, Tensor]:
    """Per-example gradients by autograd, clipped one by one, in float64."""
    model = Reference(start, mean=mean).double()
    dense = torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)
    state = {name: torch.zeros_like(bag.weight) for name, bag in model.bags.items()}
    examples, position = Bags(100), 0
    for step, parts in enumerate(sizes):
        total = [torch.zeros_like(p) for p in model.parameters()]
        for i in range(sum(parts)):
            batch = collate([examples[position + i]])
            batch.dense_features = batch.dense_features.double()
            if poisoned and step == 1 and i == 0 and parts[0]:
                continue
            loss = F.binary_cross_entropy_with_logits(model(batch), batch.labels.double())
            each = torch.autograd.grad(loss, list(model.parameters()))
            norm = torch.stack([g.square().sum() for g in each]).sum().sqrt()
            factor = min(1.0, clip_norm / norm.item())
            total = [t + factor * g for t, g in zip(total, each)]
        position += sum(parts)
        for parameter, gradient in zip(model.parameters(), total):
            parameter.grad = gradient / EXPECTED
        dense.step()
        with torch.no_grad():
            for name, bag in model.bags.items():
                update(bag.weight, state[name], optimizer, 1.0)
    return model.weights()


def plan(
    clip_norm: float = 0.5, noise: float = 0.0, mechanism: Any = None, **kwargs: Any
) -> PrivacyPlan:
    return PrivacyPlan(
        mechanism=mechanism or EANA(),
        clip_norm=clip_norm,
        noise_multiplier=noise,
        expected_batch_size=EXPECTED,
        fixed_key=5,
        **kwargs,
    )


def run(ranks: Ranks, *args: Any, **kwargs: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    results = ranks.run(train, ranks.world_size, *args, **kwargs)
    return assemble([r["start"] for r in results]), assemble([r["end"] for r in results])


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD, ROWWISE], ids=lambda o: o.kind)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("mean", [False, True])
def test_one_rank_is_the_naive_step(
    one_rank: Ranks, optimizer: Any, sizes: str, mean: bool
) -> None:
    start, end = run(one_rank, SIZES[sizes], Placement(), optimizer, plan(), mean=mean)
    expected = naive(start, SIZES[sizes], optimizer, 0.5, mean=mean)
    assert_close(end, expected, 1e-6 if optimizer is SGD else 1e-5)


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD], ids=lambda o: o.kind)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", PLACEMENTS)
def test_two_ranks_are_the_naive_step(
    two_ranks: Ranks, optimizer: Any, sizes: str, name: str
) -> None:
    start, end = run(two_ranks, SIZES[sizes], PLACEMENTS[name], optimizer, plan())
    expected = naive(start, SIZES[sizes], optimizer, 0.5)
    assert_close(end, expected, 1e-6 if optimizer is SGD else 1e-5)


@pytest.mark.parametrize("kind", ["grid", "table_row_wise"])
def test_two_hosts_are_the_naive_step(two_hosts: Ranks, kind: Any) -> None:
    placement = Placement(default=kind)
    start, end = run(two_hosts, SIZES["uneven"], placement, SGD, plan(), hosts=2)
    assert_close(end, naive(start, SIZES["uneven"], SGD, 0.5), 1e-6)


@pytest.mark.parametrize("name", ["table_wise", "row_wise"])
def test_an_example_that_overflows_counts_nothing(two_ranks: Ranks, name: str) -> None:
    start, end = run(two_ranks, SIZES["even"], PLACEMENTS[name], SGD, plan(), poisoned=True)
    assert_close(end, naive(start, SIZES["even"], SGD, 0.5, poisoned=True), 1e-6)


def test_clipping_matters_here(one_rank: Ranks) -> None:
    """The tests above would pass without clipping if nothing were clipped."""
    start, end = run(one_rank, SIZES["even"], Placement(), SGD, plan())
    unclipped = naive(start, SIZES["even"], SGD, math.inf)
    with pytest.raises(AssertionError):
        assert_close(end, unclipped, 1e-4)


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD, ROWWISE], ids=lambda o: o.kind)
def test_dpsgd_without_noise_is_the_naive_step(one_rank: Ranks, optimizer: Any) -> None:
    """All rows are updated, in chunks smaller than the tables: untouched ones must not move."""
    everything = plan(mechanism=DPSGD(chunk_rows=16))
    start, end = run(one_rank, SIZES["uneven"], Placement(), optimizer, everything)
    expected = naive(start, SIZES["uneven"], optimizer, 0.5)
    assert_close(end, expected, 1e-6 if optimizer is SGD else 1e-5)


@pytest.mark.parametrize("name", ["table_wise", "row_wise", "column_wise", "mixed"])
@pytest.mark.parametrize(
    "mechanism", [EANA(), DPSGD(chunk_rows=16)], ids=lambda m: type(m).__name__
)
def test_row_keyed_noise_is_the_same_on_one_rank_and_two(
    one_rank: Ranks, two_ranks: Ranks, name: str, mechanism: Any
) -> None:
    """Noise is drawn once for each row by its owner, and once for the job in dense layers."""
    noisy = plan(noise=1.0, mechanism=mechanism, noise_source="row_keyed")
    start, one = run(one_rank, SIZES["uneven"], Placement(), SGD, noisy)
    _, two = run(two_ranks, SIZES["uneven"], PLACEMENTS[name], SGD, noisy)
    assert_close(two, {key: one[key] for key in start}, 1e-6)
    quiet = naive(start, SIZES["uneven"], SGD, 0.5)
    assert all((one[key] - quiet[key]).abs().max() > 1e-3 for key in quiet)

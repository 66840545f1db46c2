"""The private step done naively: a loop over examples, float64, plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_dpsparse import EANA, FusedOptimizer, Placement, PrivacyPlan
from lightning_dpsparse.engine.rounding import price
from lightning_dpsparse.noise.keys import Stream
from lightning_dpsparse.noise.sources import RowNoise
from tests.support.plain_training import SGD, update
from tests.support.ranks import Ranks
from tests.support.reference import Reference
from tests.support.tiny_model import (
    TABLES,
    Bags,
    Head,
    Recording,
    assemble,
    collate,
    collate_weighted,
    make_trainer,
    snapshot,
)

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

    def __init__(self, sizes: list[list[int]], rank: int | None, weighted: bool = False) -> None:
        self.batches, start, examples = [], 0, Bags(300)
        put_together = collate_weighted if weighted else collate
        for step in sizes:
            parts = [step[rank]] if rank is not None else step
            skip = sum(step[:rank]) if rank is not None else 0
            first = start + skip
            self.batches.append(
                put_together([examples[i] for i in range(first, first + sum(parts))])
            )
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
    most: int | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Private training on every rank; runs inside a rank. A lone rank gets all examples."""
    torch.manual_seed(0)
    module = (Poisoned if poisoned else Recording)(**kwargs)
    rank = torch.distributed.get_rank() if world_size > 1 else None
    trainer = make_trainer(
        world_size, placement, optimizer, hosts=hosts, privacy=plan, max_physical_batch=most
    )
    trainer.fit(module, Batches(sizes, rank, module.weighted))
    return {"start": module.start, "end": snapshot(module)}


def flat(names: list[str], each: Any, clip_norm: float) -> list[float]:
    norm = math.sqrt(sum(float(g.square().sum()) for g in each))
    return [min(1.0, clip_norm / norm)] * len(names)


def automatic(names: list[str], each: Any, clip_norm: float) -> list[float]:
    norm = math.sqrt(sum(float(g.square().sum()) for g in each))
    return [clip_norm / (norm + 0.01)] * len(names)


def scaled(dense_scale: float) -> Callable[[list[str], Any, float], list[float]]:
    """One norm of all, in which dense layers are divided by `dense_scale`."""

    def factors(names: list[str], each: Any, clip_norm: float) -> list[float]:
        shares = [1.0 if name.startswith("bags.") else dense_scale for name in names]
        norm = math.sqrt(sum(float((g / s).square().sum()) for g, s in zip(each, shares)))
        return [min(1.0, clip_norm / norm)] * len(names)

    return factors


def grouped(names: list[str], each: Any, clip_norm: float) -> list[float]:
    """Tables t0 and t1 in one group of share 3, all else in another of share 4."""
    first = [name.startswith(("bags.t0", "bags.t1")) for name in names]
    result = {}
    for member, share in ((True, 0.6), (False, 0.8)):
        norm = math.sqrt(sum(float(g.square().sum()) for g, f in zip(each, first) if f is member))
        result[member] = min(1.0, share * clip_norm / norm)
    return [result[f] for f in first]


def add_replayed_noise(model: Reference, batch: Any, noisy: PrivacyPlan, step: int) -> None:
    """The draws that row-keyed noise must make, added to whole gradients."""
    source = RowNoise(noisy.make_key())
    stddev = noisy.noise_multiplier * noisy.clip_norm / EXPECTED
    bags = batch.sparse_features.to_dict() if batch.sparse_features.stride() else {}
    for name, _, _, features in TABLES:
        gradient = model.bags[name].weight.grad
        stream = Stream("gradient", model.paths[name], step)
        drawn = source.fill_(torch.empty(gradient.shape), stream, stddev)
        if isinstance(noisy.mechanism, EANA):
            read = torch.zeros(len(drawn), dtype=torch.bool)
            for feature in features if bags else []:
                read[bags[feature].values()] = True
            drawn[~read] = 0.0
        gradient += drawn
    dense = list(model.head.parameters())
    flat_noise = torch.empty(1, sum(p.numel() for p in dense))
    source.fill_(flat_noise, Stream("gradient", "dense layers", step), stddev)
    for parameter, piece in zip(dense, flat_noise[0].split([p.numel() for p in dense])):
        parameter.grad += piece.view_as(parameter) * noisy.dense_scale


def rounding_price(model: Reference, example: Any, noisy: PrivacyPlan | None) -> float:
    """What is taken off the clip norm where there is noise."""
    if noisy is None:
        return 0.0
    numbers = sum(p.numel() for p in model.head.parameters())
    bags = example.sparse_features.to_dict()
    for name, _, _, features in TABLES:
        lookups = sum(int(bags[feature].lengths().sum()) for feature in features)
        numbers += lookups * model.bags[name].weight.shape[1]
    sensitivity = noisy.clip_norm / EXPECTED
    return price(noisy.noise_multiplier * sensitivity, sensitivity, EXPECTED, numbers)


def naive(
    start: dict[str, Tensor],
    sizes: list[list[int]],
    optimizer: FusedOptimizer,
    clip_norm: float,
    *,
    mean: bool = False,
    weighted: bool = False,
    poisoned: bool = False,
    factors: Any = None,
    noisy: PrivacyPlan | None = None,
    dense_forms: Any = None,
    pieces: int = 1,
    head: Callable[[int], Any] = Head,
) -> dict[str, Tensor]:
    """Per-example gradients by autograd, clipped one by one, in float64.

    `dense_forms(model, step)` gives a naive form for some of the parameters, by name. Tables are in
    `pieces` by columns.
    """
    model = Reference(start, mean=mean, head=head).double()
    dense = torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)
    state = {name: torch.zeros_like(bag.weight) for name, bag in model.bags.items()}
    examples, position = Bags(100), 0
    names = [name for name, _ in model.named_parameters()]
    for step, parts in enumerate(sizes):
        forms = dense_forms(model, step) if dense_forms else {}
        total: list[Any] = [0.0] * len(names)
        for i in range(sum(parts)):
            batch = (collate_weighted if weighted else collate)([examples[position + i]])
            batch.dense_features = batch.dense_features.double()
            if poisoned and step == 1 and i == 0 and parts[0]:
                continue
            loss = F.binary_cross_entropy_with_logits(model(batch), batch.labels.double())
            each = torch.autograd.grad(loss, list(model.parameters()))
            each = [forms[n].of(g) if n in forms else g for n, g in zip(names, each)]
            bound = clip_norm * (1 - rounding_price(model, batch, noisy))
            total = [
                t + f * g for t, f, g in zip(total, (factors or flat)(names, each, bound), each)
            ]
        position += sum(parts)
        for (name, parameter), gradient in zip(model.named_parameters(), total):
            if sum(parts) and name in forms:
                gradient = forms[name].back(gradient)
            parameter.grad = torch.zeros_like(parameter) + gradient / EXPECTED
        if noisy is not None:
            batch = collate([examples[position - sum(parts) + i] for i in range(sum(parts))])
            add_replayed_noise(model, batch, noisy, step)
        dense.step()
        with torch.no_grad():
            for name, bag in model.bags.items():
                update(bag.weight, state[name], optimizer, 1.0, pieces)
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
        sampling="unamplified",  # loaders of the tests' own
        delta=1e-6,
        **kwargs,
    )


def tolerance_of(optimizer: FusedOptimizer) -> float:
    """What rounding may come to: Adagrad divides by small numbers."""
    return 1e-6 if optimizer is SGD else 1e-5


def run(ranks: Ranks, *args: Any, **kwargs: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    results = ranks.run(train, ranks.world_size, *args, **kwargs)
    return assemble([r["start"] for r in results]), assemble([r["end"] for r in results])

"""Exponential selection as a whole step: choose rows by score, clip over them, update only them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_dpsparse import ExponentialSelection, FusedOptimizer, Placement, PrivacyPlan
from tests.support.naive_step import ADAGRAD, EXPECTED, SIZES, plan, run
from tests.support.plain_training import PLACEMENTS, SGD, assert_close, update
from tests.support.private_runs import fit, ledger_of
from tests.support.ranks import Ranks
from tests.support.reference import Reference
from tests.support.tiny_model import BAGS_OR_SEQUENCES, Bags, collate, paths

K, DELTA, CLIP = 9, 0.05, 0.1
CHOICE = ExponentialSelection(num_rows=K, score_clip=DELTA)


def naive(
    start: dict[str, Tensor],
    sizes: list[list[int]],
    optimizer: FusedOptimizer,
    delta: float = DELTA,
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """A loop over examples in float64; also which rows each step chose."""
    model = Reference(start, mean=False).double()
    dense = torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)
    state = {name: torch.zeros_like(bag.weight) for name, bag in model.bags.items()}
    names = [name for name, _ in model.named_parameters()]
    examples, position, chosen = Bags(100), 0, []
    for parts in sizes:
        gradients = []
        for i in range(sum(parts)):
            batch = collate([examples[position + i]])
            batch.dense_features = batch.dense_features.double()
            loss = F.binary_cross_entropy_with_logits(model(batch), batch.labels.double())
            gradients.append(dict(zip(names, torch.autograd.grad(loss, list(model.parameters())))))
        position += sum(parts)
        keep = choose({n: p for n, p in model.named_parameters() if "bags" in n}, gradients, delta)
        chosen.append(keep)
        total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for each in gradients:
            masked = {n: g * keep[n][:, None] if n in keep else g for n, g in each.items()}
            norm = math.sqrt(sum(float(g.square().sum()) for g in masked.values()))
            for name, gradient in masked.items():
                total[name] += min(1.0, CLIP / norm) * gradient
        for name, parameter in model.named_parameters():
            parameter.grad = total[name] / EXPECTED
        dense.step()
        with torch.no_grad():
            for name, bag in model.bags.items():
                update(bag.weight, state[name], optimizer, 1.0)
    return model.weights(), chosen


def choose(
    tables: dict[str, Tensor], gradients: list[dict[str, Tensor]], delta: float
) -> dict[str, Tensor]:
    """The K rows of all tables with the largest scores."""
    score = {
        name: sum((g[name].norm(dim=1).clamp(max=delta) for g in gradients), torch.zeros(len(t)))
        for name, t in tables.items()
    }
    least = torch.cat(list(score.values())).topk(K).values[-1]
    return {name: (s >= least) & (s > 0) for name, s in score.items()}


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD], ids=lambda o: o.kind)
@pytest.mark.parametrize("sizes", SIZES)
def test_without_noise_one_rank_is_the_naive_step(
    one_rank: Ranks, optimizer: Any, sizes: str
) -> None:
    private = plan(CLIP, mechanism=CHOICE)
    start, end = run(one_rank, SIZES[sizes], Placement(), optimizer, private)
    expected, _ = naive(start, SIZES[sizes], optimizer)
    assert_close(end, expected, 1e-6 if optimizer is SGD else 1e-5)


@pytest.mark.parametrize("name", ["table_wise", "row_wise"])
@pytest.mark.parametrize("sizes", ["uneven", "empty"])
@BAGS_OR_SEQUENCES
def test_without_noise_two_ranks_are_the_naive_step(
    two_ranks: Ranks, name: str, sizes: str, sequences: tuple[str, ...]
) -> None:
    private, settings = plan(CLIP, mechanism=CHOICE), {"sequences": sequences}
    start, end = run(two_ranks, SIZES[sizes], PLACEMENTS[name], SGD, private, **settings)
    expected, _ = naive(start, SIZES[sizes], SGD)
    assert_close(end, expected, 1e-6)


def test_choice_and_bound_matter_here(one_rank: Ranks) -> None:
    """The tests above would prove little if all rows were chosen, or if no score were bounded."""
    start, _ = run(one_rank, SIZES["even"], Placement(), SGD, plan(CLIP, mechanism=CHOICE))
    bounded, chosen = naive(start, SIZES["even"], SGD)
    assert all(K <= sum(int(k.sum()) for k in keep.values()) < 2 * K for keep in chosen)
    free, _ = naive(start, SIZES["even"], SGD, math.inf)
    with pytest.raises(AssertionError):
        assert_close(bounded, free, 1e-4)


@pytest.mark.parametrize("world", [1, 2])
@BAGS_OR_SEQUENCES
def test_exactly_k_rows_move_with_noise(
    world: int, one_rank: Ranks, two_ranks: Ranks, sequences: tuple[str, ...]
) -> None:
    """Over all tables and ranks, though nobody may have read them; in empty steps too."""
    ranks = one_rank if world == 1 else two_ranks
    placement = Placement() if world == 1 else PLACEMENTS["row_wise"]
    for sizes in ([[4, 4]], [[0, 0]]):
        private = plan(CLIP, noise=1.0, mechanism=CHOICE)
        start, end = run(ranks, sizes, placement, SGD, private, sequences=sequences)
        tables = paths(sequences).values()
        assert sum(int((start[name] != end[name]).any(1).sum()) for name in tables) == K


def test_rows_that_are_cut_by_columns_are_refused(two_ranks: Ranks) -> None:
    """No rank sees a whole row's gradient, and so its norm."""
    private = plan(CLIP, mechanism=CHOICE)
    message = "Expected all columns of a row on one rank with ExponentialSelection, found"
    with pytest.raises(ValueError, match=message):
        run(two_ranks, SIZES["even"], PLACEMENTS["column_wise"], SGD, private)


def test_a_batch_is_not_cut_into_parts(one_rank: Ranks) -> None:
    private = plan(CLIP, mechanism=CHOICE)
    with pytest.raises(ValueError, match="ExponentialSelection chooses rows by all its gradients"):
        run(one_rank, SIZES["even"], Placement(), SGD, private, most=2)


def test_a_run_is_charged_for_choices_and_sums_on_one_sample(
    one_rank: Ranks, tmp_path: Any
) -> None:
    private = PrivacyPlan(mechanism=CHOICE, noise_multiplier=1.0, delta=1e-3)
    result = one_rank.run(fit, 1, private, tmp_path, max_steps=2)[0]
    (entry,) = ledger_of(result).entries
    assert entry.event.sampling_probability == 0.2
    choices, noisy_sum = entry.event.event.events
    assert choices.count == K
    assert choices.event.epsilon == pytest.approx(2.0 / math.sqrt(2.0 * K))  # sigma1 = sqrt(2)
    assert noisy_sum.event.noise_multiplier == pytest.approx(math.sqrt(2.0))
    assert entry.count == 2

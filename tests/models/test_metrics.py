"""Metrics against their definitions, on one rank and merged over two."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc

from lightning_dpsparse.models.metrics import click_metrics
from tests.support.ranks import Ranks


def scores(rate: float, size: int = 20_000) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logit = torch.randn(size, generator=generator) * 1.5 + torch.logit(torch.tensor(rate))
    return logit.sigmoid(), torch.bernoulli(logit.sigmoid(), generator=generator).long()


@pytest.mark.parametrize("rate", [0.5, 0.2, 0.003])
def test_binned_auroc_is_within_a_thousandth_of_the_exact_one(rate: float) -> None:
    p, y = scores(rate)
    metrics = click_metrics("")
    metrics.update(p, y)
    assert metrics.compute()["auroc"] == pytest.approx(binary_auroc(p, y).item(), abs=1e-3)


@pytest.mark.parametrize(
    ("scores", "auroc"),
    [([1.0, 1.0, 1.0, 1.0], 0.5), ([0.0, 0.0, 0.0, 0.0], 0.5), ([0.0, 1.0, 0.0, 1.0], 1.0)],
)
def test_auroc_of_extreme_scores_counts_ties_as_half(scores: list[float], auroc: float) -> None:
    metrics = click_metrics("")
    metrics.update(torch.tensor(scores), torch.tensor([0.0, 1.0, 0.0, 1.0]))
    assert metrics["auroc"].compute().item() == pytest.approx(auroc)


def test_memory_does_not_grow_with_the_epoch() -> None:
    metrics = click_metrics("")
    sizes = []
    for _ in range(3):
        metrics.update(*scores(0.2, 5000))
        states = [getattr(m, name) for m in metrics.values() for name in m._defaults]
        assert all(isinstance(state, Tensor) for state in states)
        sizes.append(sum(state.numel() for state in states if isinstance(state, Tensor)))
    assert len(set(sizes)) == 1


def test_loss_entropy_and_calibration_follow_their_definitions() -> None:
    p = torch.tensor([0.2, 0.9, 0.5, 0.4])
    y = torch.tensor([0, 1, 1, 0])
    metrics = click_metrics("val_")
    metrics.update(p[:3], y[:3])
    metrics.update(p[3:], y[3:])
    metrics.update(p[:0], y[:0])  # the empty batch
    found = metrics.compute()
    loss = -(torch.log(torch.tensor([0.8, 0.9, 0.5, 0.6]).double())).mean()
    assert found["val_log_loss"].item() == pytest.approx(loss.item(), rel=1e-6)
    assert found["val_normalized_entropy"].item() == pytest.approx(
        (loss / torch.log(torch.tensor(2.0))).item()
    )
    assert found["val_calibration"].item() == pytest.approx(2.0 / 2)


def merged() -> dict[str, float]:
    p, y = scores(0.2, 2001)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    metrics = click_metrics("")
    metrics.update(p[rank::world], y[rank::world])
    return {name: value.item() for name, value in metrics.compute().items()}


def test_two_ranks_measure_what_one_measures(one_rank: Ranks, two_ranks: Ranks) -> None:
    one = one_rank.run(merged)[0]
    for found in two_ranks.run(merged):
        assert found == pytest.approx(one, rel=1e-6)

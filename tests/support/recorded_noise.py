"""Runs whose weights move by noise alone, recorded after every step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_dpsparse import FusedOptimizer, Placement, PrivacyPlan
from tests.support.naive_step import Batches
from tests.support.tiny_model import Recording, make_trainer, snapshot


class EveryStep(Recording):
    """Remembers its weights after every step. It learns nothing: what moves is noise."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(lr=1.0, **kwargs)
        self.history: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * 0.0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def on_train_batch_end(self, *args: Any) -> None:
        self.history.append(snapshot(self))


def record_noise(
    world_size: int,
    placement: Placement,
    noisy: PrivacyPlan,
    steps: int,
    sequences: tuple[str, ...] = (),
    readers: list[int] | None = None,
) -> Any:
    """Runs inside a rank. The first `readers`, so many on each rank, read in every step."""
    torch.manual_seed(0)
    module = EveryStep(sequences=sequences)
    sgd = FusedOptimizer(kind="sgd", learning_rate=1.0)
    trainer = make_trainer(world_size, placement, sgd, privacy=noisy)
    batches = Batches([readers or [0] * world_size], torch.distributed.get_rank())
    batches.batches *= steps
    trainer.fit(module, batches)
    return [module.start, *module.history]


def assert_variance(draws: Tensor, stddev: float, key: str) -> None:
    """n draws of known variance: the mean square has standard error sqrt(2 / n)."""
    n = draws.numel()
    ratio = float(draws.square().mean()) / stddev**2
    assert abs(ratio - 1) < 5 * math.sqrt(2 / n), f"{key}: variance is {ratio:.3f} of right"
    assert abs(float(draws.mean())) / stddev < 5 / math.sqrt(n)

"""A click model with two tasks, its data, and the lines that a run must come to."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dpsparse import PrivacyPlan
from lightning_dpsparse.mechanisms.logit_calibration.histogram import (
    LogitHistogram,
    centres,
    noisy_counts,
)
from lightning_dpsparse.mechanisms.logit_calibration.platt import LogitMap, fit_line
from tests.support.calibration_runs import SIZE, Clicked, Clicking

# B examples, N examples of a data set, T tasks (2)


class ClickedAndBought(Clicked):
    """A second label that follows the second count the other way; three examples in ten lack it."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(size)
        random = np.random.default_rng(6)
        for i, (counts, bags, click) in enumerate(self.examples):
            logit = -1.2 * np.tanh(6 * (float(counts[1]) - 0.5)) + 0.6
            buy = torch.tensor([float(random.random() < 1 / (1 + np.exp(-logit)))])
            if random.random() < 0.3:
                buy.fill_(math.nan)
            self.examples[i] = (counts, bags, torch.stack([click, buy], dim=1))


class TwoHeads(nn.Module):
    """Two logits of one hidden layer, from two layers of one output, or from one of two."""

    def __init__(self, head: Any, *, is_wide: bool) -> None:
        super().__init__()
        self.hidden = head.hidden
        weight, bias = head.out.weight.detach(), head.out.bias.detach()
        if is_wide:
            self.wide = nn.Linear(12, 2)
        else:
            self.click, self.buy = nn.Linear(12, 1), nn.Linear(12, 1)
        with torch.no_grad():
            for task, (row, offset) in enumerate(self.rows()):
                sign = 1.0 - 2.0 * task  # the second task's logits begin as the first's, negated
                row.copy_(sign * weight[0])
                offset.copy_(sign * bias[0])

    def rows(self) -> list[tuple[Tensor, Tensor]]:
        """Weight and bias of each task."""
        if hasattr(self, "wide"):
            return [(self.wide.weight[t], self.wide.bias[t]) for t in range(2)]
        return [(one.weight[0], one.bias[0]) for one in (self.click, self.buy)]

    def forward(self, embedded: dict[str, Tensor], counts: Tensor) -> Tensor:
        x = torch.cat([embedded[name] for name in sorted(embedded)] + [counts], dim=1)
        x = torch.tanh(self.hidden(x))
        if hasattr(self, "wide"):
            return self.wide(x)
        return torch.cat([self.click(x), self.buy(x)], dim=1)


class Listed(Clicking):
    """Has a last layer for each of two tasks."""

    calibrated_layer: Any = None
    calibrated_layers: Any = ("head.click", "head.buy")
    num_calibration_tasks: Any = 2
    is_wide = False

    def configure_model(self) -> None:
        if self.ebc is None:
            super().configure_model()
            self.head: Any = TwoHeads(self.head, is_wide=self.is_wide)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        has_label_BT = batch.labels.isfinite()
        loss_BT = F.binary_cross_entropy_with_logits(
            self(batch), batch.labels.nan_to_num(0.0), reduction="none"
        )
        return torch.where(has_label_BT, loss_BT, 0.0).sum(1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


class Wide(Listed):
    """Has one last layer of two outputs."""

    calibrated_layer, calibrated_layers, is_wide = "head.wide", None, True


class Itself(Listed):
    """Puts slopes and biases into a place of its own."""

    calibrated_layers = None

    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "slopes"):
            self.register_buffer("slopes", torch.ones(2))
            self.register_buffer("biases", torch.zeros(2))

    def forward(self, batch: Any) -> Any:
        return self.slopes * super().forward(batch) + self.biases

    def apply_calibration(self, slopes: Tensor, biases: Tensor) -> None:
        assert slopes.shape == biases.shape == (2,)
        self.slopes.mul_(slopes)
        self.biases.mul_(slopes).add_(biases)


def labels_of(data: Any) -> Tensor:
    """(N, T), NaN where an example has no label."""
    return torch.cat([label for _, _, label in data.examples])


def counts_of(logits_NT: Tensor, labels_NT: Tensor, privacy: PrivacyPlan) -> Tensor:
    """Every task's counts, each counted as the only task, of the examples that have its label."""
    settings = privacy.calibration
    assert settings is not None
    found = []
    for task in range(logits_NT.shape[1]):
        has_label_N = ~labels_NT[:, task].isnan()
        histogram = LogitHistogram(settings, torch.device("cpu"))
        histogram.add(logits_NT[has_label_N, task], labels_NT[has_label_N, task])
        found.append(histogram.counts_SLK)
    return torch.cat(found)


def lines_for(
    logits_NT: Tensor, labels_NT: Tensor, privacy: PrivacyPlan, step: int, k: int = 1
) -> list[LogitMap]:
    """The lines that a run must find, each that of one task, with the noise of two."""
    settings = privacy.calibration
    assert settings is not None
    assert settings.noise_multiplier is not None
    stddev = settings.noise_multiplier * k * math.sqrt(2)
    counts = counts_of(logits_NT, labels_NT, privacy)
    source = privacy.make_source(privacy.make_key())
    noisy = noisy_counts(counts, stddev, source, step).numpy()
    points = centres(settings).numpy()
    return [fit_line(noisy[task : task + 1], points, stddev) for task in range(2)]

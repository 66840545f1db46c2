"""Runs that calibrate a small click model, and the line that they must come to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dpsparse import LogitCalibration, PrivacyPlan
from lightning_dpsparse.accounting import events
from lightning_dpsparse.mechanisms.logit_calibration.histogram import (
    LogitHistogram,
    centres,
    noisy_counts,
)
from lightning_dpsparse.mechanisms.logit_calibration.platt import LogitMap, fit_line
from tests.support.private_runs import Marked, Watching, fit, ledger_of, strict_collate
from tests.support.tiny_model import collate

SIZE, BATCH = 3000, 600  # epochs of five steps
CHEAP = LogitCalibration(noise_multiplier=2.0, bins=32, largest_logit=4.0)


class Clicked(Marked):
    """Clicks that follow the second count, more steeply than the model below says."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(size)
        random = np.random.default_rng(5)
        for i, (counts, _, label) in enumerate(self.examples):
            counts[0] = float(i) / size  # who is who, on a scale that the model can take
            logit = 2.4 * np.tanh(6 * (float(counts[1]) - 0.5)) - 1.0
            label.fill_(float(random.random() < 1 / (1 + np.exp(-logit))))


class Clicking(Watching):
    """Begins with logits of 2 tanh(6 (second count - 0.5)), or nearly."""

    calibrated_layer = "head.out"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.validated: list[Tensor] = []

    def configure_model(self) -> None:
        if self.ebc is not None:
            return
        super().configure_model()
        with torch.no_grad():
            hidden, out = self.head.hidden, self.head.out
            hidden.weight[0].zero_()
            hidden.weight[0, -2], hidden.bias[0] = 6.0, -3.0
            out.weight[0].mul_(0.1)
            out.weight[0, 0] = 2.0

    def logits_and_labels(self, batch: Any) -> tuple[Tensor, Tensor]:
        return self(batch), batch.labels

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.head.out.weight.detach().clone())


def plan(**settings: Any) -> PrivacyPlan:
    base = {"noise_multiplier": 1.0, "delta": 1e-5, "calibration": CHEAP}
    return PrivacyPlan(**(base | settings))


QUERY, STEP = events.gaussian(2.0), events.poisson_gaussian(BATCH / SIZE, 1.0)
REPLAYED = {"fixed_key": 4}
BEFORE = plan(**REPLAYED, calibration=None)  # the same run, without the query


def charges(result: dict[str, Any]) -> list[tuple[Any, int]]:
    """Events and how often they were charged, in order."""
    return [(e.event, e.count) for e in ledger_of(result).entries]


def clicks_loader(world: int, data: Any = None, **settings: Any) -> DataLoader[Any]:
    return DataLoader(
        Clicked() if data is None else data,
        batch_size=BATCH // world,
        collate_fn=strict_collate,
        **settings,
    )


def calibrated(world: int, privacy: PrivacyPlan, folder: Path, **settings: Any) -> dict[str, Any]:
    """Runs inside a rank. `logits` are those of the model at the end, of all examples."""
    module = settings.pop("module", None) or Clicking()
    data = settings.pop("data", Clicked)
    data = data() if isinstance(data, type) else data  # thousands of tensors go through no pipe
    settings.setdefault("loader", clicks_loader(world, data))
    result = fit(world, privacy, folder, module=module, **settings)
    run = module.trainer.strategy.private_run  # type: ignore[attr-defined]
    module.eval()
    with torch.no_grad():
        logits = module(collate(data.examples))
    return result | {
        "found": run.calibration.kept(),
        "logits": logits,
        "validated": module.validated,
    }


def line_for(
    logits_N: Tensor, privacy: PrivacyPlan, step: int, k: int = 1, data: Any = None
) -> LogitMap:
    """The line that a run must find, from one list of all examples' logits."""
    settings = privacy.calibration
    assert settings is not None
    histogram = LogitHistogram(settings, torch.device("cpu"))
    labels_N = torch.cat([label for _, _, label in (data or Clicked()).examples])
    histogram.add(logits_N, labels_N)
    source = privacy.make_source(privacy.make_key())
    noisy = noisy_counts(histogram.counts_SLK, settings.stddev(k), source, step)
    return fit_line(noisy.numpy(), centres(settings).numpy(), settings.stddev(k))

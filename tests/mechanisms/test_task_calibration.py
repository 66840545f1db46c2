"""Counts of logits by task: how far a unit moves them, and the line of each task."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_dpsparse.accounting.events import gaussian
from lightning_dpsparse.mechanisms.logit_calibration import LogitCalibration
from lightning_dpsparse.mechanisms.logit_calibration.histogram import (
    LogitHistogram,
    centres,
    noisy_counts,
)
from lightning_dpsparse.mechanisms.logit_calibration.platt import fit_line, fit_tasks
from lightning_dpsparse.noise.keys import RunKey
from lightning_dpsparse.noise.sources import FastNoise
from tests.support.odd_logits import CPU, FEW, LABELS, LOGITS

TASKS = 3

EXAMPLES = st.lists(
    st.lists(st.tuples(LOGITS, LABELS), min_size=TASKS, max_size=TASKS), max_size=12
)


def counted(examples: list[Any]) -> Tensor:
    """`examples` have a pair of a logit and a label for every task."""
    histogram = LogitHistogram(FEW, CPU, num_tasks=TASKS)
    pairs = torch.tensor(examples, dtype=torch.float64).view(-1, TASKS, 2)
    histogram.add_tasks(pairs[..., 0], pairs[..., 1])
    return histogram.counts_SLK


@settings(max_examples=200, deadline=None)
@given(EXAMPLES)
def test_every_task_is_counted_as_if_it_were_alone(examples: list[Any]) -> None:
    together = counted(examples)
    assert together.shape == (TASKS, 2, FEW.bins)
    for task in range(TASKS):
        alone = LogitHistogram(FEW, CPU)
        for logit, label in (example[task] for example in examples):
            if math.isfinite(label):  # the others have no label of this task
                alone.add(torch.tensor([logit]), torch.tensor([label]))
        assert torch.equal(together[task : task + 1], alone.counts_SLK)


@settings(max_examples=200, deadline=None)
@given(EXAMPLES, EXAMPLES.filter(len))
def test_a_unit_of_k_examples_moves_all_counts_by_at_most_k_times_the_root_of_the_tasks(
    others: list[Any], unit: list[Any]
) -> None:
    """Noise of sigma k sqrt(T) is therefore a Gaussian of noise multiplier sigma."""
    moved = float((counted(others + unit) - counted(others)).double().norm())
    sensitivity = len(unit) * math.sqrt(TASKS)
    assert moved <= sensitivity * (1 + 1e-12)
    assert FEW.stddev(len(unit), TASKS) == pytest.approx(2.0 * sensitivity)
    assert FEW.event() == gaussian(2.0)  # whatever the number of tasks


def test_the_worst_unit_moves_the_counts_as_far_as_the_noise_is_made_for() -> None:
    unit = [[(0.2, 1.0), (-1.5, 0.0), (2.5, 1.0)]] * 5
    moved = float((counted(unit) - counted([])).double().norm())
    assert moved == pytest.approx(5 * math.sqrt(TASKS))
    assert FEW.stddev(5, TASKS) / 2.0 == pytest.approx(moved)


def test_an_example_without_a_label_of_a_task_is_not_counted_there() -> None:
    counts = counted([[(0.2, math.nan), (0.2, 0.0), (0.2, math.nan)]])
    assert counts.sum((1, 2)).tolist() == [0, 1, 0]


@pytest.mark.parametrize("num_tasks", [1, 2, 5])
def test_one_task_has_the_noise_that_it_has_alone(num_tasks: int) -> None:
    assert FEW.stddev(3) == FEW.stddev(3, 1) == 6.0
    assert FEW.stddev(3, num_tasks) ** 2 == pytest.approx(36.0 * num_tasks)


@pytest.mark.parametrize("fit_slope", [True, False])
def test_each_line_is_that_of_one_task_with_the_same_noise(fit_slope: bool) -> None:
    chosen, stddev = LogitCalibration(noise_multiplier=1.0), 15.0
    random = np.random.default_rng(4)
    truth = [(1.4, 0.6), (0.7, -1.0), (1.0, 0.2)]
    logits_NT = random.normal(-0.5, 1.5, (60_000, TASKS))
    chance = [1 / (1 + np.exp(-(a * logits_NT[:, t] + b))) for t, (a, b) in enumerate(truth)]
    labels_NT = (random.random((60_000, TASKS)) < np.stack(chance, 1)).astype(float)
    labels_NT[random.random((60_000, TASKS)) < 0.3] = math.nan
    logits, labels = torch.tensor(logits_NT), torch.tensor(labels_NT)
    together = LogitHistogram(chosen, CPU, num_tasks=TASKS)
    together.add_tasks(logits, labels)
    noisy = noisy_counts(together.counts_SLK, stddev, FastNoise(RunKey.fixed(1)), 0)
    noise, points = noisy - together.counts_SLK, centres(chosen).numpy()
    found = fit_tasks(noisy.numpy(), points, stddev, fit_slope=fit_slope)
    assert len(found) == TASKS
    for task, (slope, bias) in enumerate(truth):
        alone, has_label = LogitHistogram(chosen, CPU), labels[:, task].isfinite()
        alone.add(logits[has_label, task], labels[has_label, task])
        counts = (alone.counts_SLK + noise[task : task + 1]).numpy()
        assert found[task] == fit_line(counts, points, stddev, fit_slope=fit_slope)
        if fit_slope:  # 40,000 labels: standard errors are near 0.02
            assert found[task].slope == pytest.approx(slope, abs=0.1)
            assert found[task].bias == pytest.approx(bias, abs=0.1)

"""Counts of logits, their noise and the line that is fitted to them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.stats import chi2
from torch import Tensor

from lightning_dpsparse.accounting.calibration import epsilon_of
from lightning_dpsparse.accounting.events import gaussian
from lightning_dpsparse.mechanisms.logit_calibration import LogitCalibration
from lightning_dpsparse.mechanisms.logit_calibration.histogram import (
    LogitHistogram,
    centres,
    noisy_counts,
)
from lightning_dpsparse.mechanisms.logit_calibration.platt import SLOPES, LogitMap, fit_line
from lightning_dpsparse.noise.grid import grid_of
from lightning_dpsparse.noise.keys import RunKey
from lightning_dpsparse.noise.keystream import hidden_share
from lightning_dpsparse.noise.sources import FastNoise, NoiseSource, RowNoise, SecureNoise
from tests.support.odd_logits import CPU, FEW, LABELS, LOGITS

SLICES = 3

EXAMPLES = st.lists(st.tuples(LOGITS, LABELS, st.integers(-1, 4)), max_size=12)


def counted(examples: list[tuple[float, float, int]]) -> Tensor:
    histogram = LogitHistogram(FEW, CPU, SLICES)
    if examples:
        logits, labels, slices = zip(*examples)
        histogram.add(torch.tensor(logits), torch.tensor(labels), torch.tensor(slices))
    return histogram.counts_SLK


def counted_one_by_one(examples: list[tuple[float, float, int]]) -> Tensor:
    counts = torch.zeros(SLICES, 2, FEW.bins, dtype=torch.int64)
    for logit, label, slice_ in examples:
        if not (math.isfinite(logit) and math.isfinite(label)):
            continue
        k = min(max(math.floor(logit + 3.0), 0), FEW.bins - 1)  # bins of width one
        counts[min(max(slice_, 0), SLICES - 1), int(label >= 0.5), k] += 1
    return counts


# ---- counts --------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(EXAMPLES)
def test_every_example_is_counted_once_by_logit_label_and_slice(examples: list[Any]) -> None:
    assert torch.equal(counted(examples), counted_one_by_one(examples))


@settings(max_examples=200, deadline=None)
@given(EXAMPLES, EXAMPLES.filter(len))
def test_a_unit_of_k_examples_moves_the_counts_by_at_most_k(
    others: list[Any], unit: list[Any]
) -> None:
    """Noise of sigma k is therefore a Gaussian of noise multiplier sigma."""
    moved = (counted(others + unit) - counted(others)).double().norm()
    assert moved <= len(unit)
    assert FEW.stddev(len(unit)) == 2.0 * len(unit)
    assert FEW.event() == gaussian(2.0)


def test_the_worst_unit_moves_one_count_by_k() -> None:
    moved = (counted([(0.2, 1.0, 1)] * 5) - counted([])).double().norm()
    assert moved == 5.0


# ---- noise ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FastNoise, SecureNoise, RowNoise])
@pytest.mark.parametrize("stddev", [0.7, 50.0, 4000.0])
def test_every_count_gets_its_noise_on_the_grid(kind: type[NoiseSource], stddev: float) -> None:
    """Counts that are zero, too. 20,000 draws: the test finds a deviation of 3% nearly always,
    and is wrong once in a million."""
    counts = torch.zeros(5, 2, 2000, dtype=torch.int64)
    counts[2] = 7
    source = kind(RunKey.fixed(3))  # type: ignore[call-arg]
    noisy = noisy_counts(counts, stddev, source, release=9)
    noise = noisy - counts
    n = noise.numel()
    low, high = chi2.ppf([5e-7, 1 - 5e-7], n) * stddev**2
    assert low < float(noise.square().sum()) < high
    assert abs(float(noise.mean())) < 5 * stddev / math.sqrt(n)
    assert (noise != 0).double().mean() > 0.99
    spacing = grid_of(stddev)
    assert spacing <= 1
    assert torch.equal(noisy / spacing, (noisy / spacing).round())  # counts and noise alike
    again = noisy_counts(torch.zeros_like(counts), stddev, source, release=9)
    assert torch.equal(again, noise)  # the same draws whatever the counts are
    other = noisy_counts(torch.zeros_like(counts), stddev, source, release=10)
    correlation = np.corrcoef(other.flatten().numpy(), again.flatten().numpy())[0, 1]
    assert abs(correlation) < 5 / math.sqrt(n)


@pytest.mark.parametrize("stddev", [0.7, 1.0, 0.99996, 63.99])
def test_the_gaussian_part_of_the_noise_is_all_of_what_is_charged(stddev: float) -> None:
    """A draw has a small part that is not Gaussian (`noise/keystream.py`): it does not count. It is
    largest just above a power of two, to which the noise may be raised."""
    asked = []

    class Asked(SecureNoise):
        def fill_(self, out: Tensor, stream: Any, stddev: float = 1.0, *rest: Any) -> Tensor:
            asked.append(stddev)
            return super().fill_(out, stream, stddev)

    noisy_counts(torch.zeros(1, 2, 3, dtype=torch.int64), stddev, Asked(RunKey()), 0)
    (drawn,) = asked
    assert stddev * (1 - 1e-12) <= drawn * hidden_share(drawn) <= stddev * (1 + 4e-4)


def test_without_noise_counts_stay_as_they_are() -> None:
    counts = torch.arange(12).view(1, 2, 6)
    assert torch.equal(noisy_counts(counts, 0.0, FastNoise(RunKey()), 0), counts.double())


# ---- the line ------------------------------------------------------------------------------------


def clicks(
    size: int, slope: float, bias: float, spread: float = 1.5, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Logits of a model whose clicks follow slope * logit + bias."""
    random = np.random.default_rng(seed)
    logits = random.normal(-1.0, spread, size)
    chance = 1 / (1 + np.exp(-(slope * logits + bias)))
    return torch.tensor(logits), torch.tensor((random.random(size) < chance).astype(float))


def fitted(
    logits: Tensor, labels: Tensor, stddev: float = 0.0, key: int = 0, **settings: Any
) -> LogitMap:
    chosen = LogitCalibration(noise_multiplier=1.0, **settings)
    histogram = LogitHistogram(chosen, CPU)
    histogram.add(logits, labels)
    noisy = noisy_counts(histogram.counts_SLK, stddev, FastNoise(RunKey.fixed(key)), 0)
    return fit_line(noisy.numpy(), centres(chosen).numpy(), stddev, fit_slope=chosen.fit_slope)


def naive_platt(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    x, y = logits.numpy(), labels.numpy()

    def loss(line: Any) -> float:
        z = line[0] * x + line[1]
        return float((np.logaddexp(0, z) - y * z).mean())

    found = minimize(
        loss, [1.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-7, "fatol": 1e-13}
    )
    return float(found.x[0]), float(found.x[1])


@pytest.mark.parametrize(("slope", "bias"), [(1.3, 0.8), (0.6, -0.5), (1.0, 0.0)])
def test_many_bins_without_noise_are_the_naive_fit(slope: float, bias: float) -> None:
    """Bins of 24 / 2048: a logit is off by at most 0.006, and the line by the mean of that."""
    logits, labels = clicks(20_000, slope, bias)
    found = fitted(logits, labels, bins=2048)
    assert (found.slope, found.bias) == pytest.approx(naive_platt(logits, labels), abs=2e-3)


def test_logits_in_the_middle_of_bins_are_fitted_exactly() -> None:
    logits, labels = clicks(5_000, 1.3, 0.8)
    middle = centres(LogitCalibration())
    logits = middle[(logits[:, None] - middle).abs().argmin(1)]
    found = fitted(logits, labels)
    assert (found.slope, found.bias) == pytest.approx(naive_platt(logits, labels), abs=1e-5)


def test_the_default_bins_calibrate_to_a_part_in_a_thousand() -> None:
    """Predicted over real clicks, on the very data, after a model that is far off. With noise of
    7.5, about 40 counts of 1 in 400,000 clicks: not more than that."""
    logits, labels = clicks(2_000_000, 0.7, 1.2)
    for stddev, most in ((0.0, 1e-3), (7.5, 1.5e-3)):
        found = fitted(logits, labels, stddev)
        predicted = torch.sigmoid(found.slope * logits + found.bias).sum()
        assert float(predicted / labels.sum()) == pytest.approx(1.0, abs=most)
        assert found.slope == pytest.approx(0.7, abs=0.01)


def test_noise_leaves_the_line_right_on_average() -> None:
    """64 keys: the mean is off by at most an eighth of the spread, four times that is allowed."""
    logits, labels = clicks(20_000, 1.2, 0.5)
    exact = fitted(logits, labels)
    found = [fitted(logits, labels, 20.0, key) for key in range(64)]
    slopes, biases = np.array([(one.slope, one.bias) for one in found]).T
    assert slopes.std() > 0.005  # there is noise
    assert abs(slopes.mean() - exact.slope) < slopes.std() / 2
    assert abs(biases.mean() - exact.bias) < biases.std() / 2


def test_little_data_fits_the_bias_alone_and_less_changes_nothing() -> None:
    logits, labels = clicks(3_000, 1.5, 1.0)
    for key in range(6):
        found = fitted(logits, labels, 20.0, key)
        assert found.slope == 1.0
        assert 0.3 < found.bias < 1.2
        assert fitted(logits, labels, 80.0, key).is_identity
    assert fitted(logits[:100], labels[:100], 30.0).is_identity
    assert fitted(logits[:0], labels[:0]).is_identity
    assert fitted(logits[:0], labels[:0], 30.0).is_identity


def test_the_bias_alone_is_fitted_if_asked() -> None:
    logits, labels = clicks(20_000, 1.3, 0.8)
    found = fitted(logits, labels, fit_slope=False)
    assert found.slope == 1.0
    predicted = torch.sigmoid(logits + found.bias).sum()
    assert float(predicted / labels.sum()) == pytest.approx(1.0, abs=2e-3)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_label_alone_changes_nothing(label: float) -> None:
    """No finite bias fits it."""
    logits, _ = clicks(5_000, 1.0, 0.0)
    assert fitted(logits, torch.full_like(logits, label)).is_identity


def test_a_slope_stays_within_its_bounds() -> None:
    logits, labels = clicks(50_000, 8.0, 0.0)
    assert fitted(logits, labels).slope == SLOPES[1]
    assert fitted(logits, 1 - labels).slope == SLOPES[0]


def test_slices_have_biases_of_their_own() -> None:
    """Slices that differ in their bias by two, and one that is too small."""
    chosen = LogitCalibration(noise_multiplier=1.0)
    histogram = LogitHistogram(chosen, CPU, 3)
    parts = [clicks(50_000, 1.0, 1.0, seed=1), clicks(50_000, 1.0, -1.0, seed=2)]
    parts.append(clicks(20, 1.0, 3.0, seed=3))
    for number, (logits, labels) in enumerate(parts):
        histogram.add(logits, labels, torch.full_like(labels, number))
    noisy = noisy_counts(histogram.counts_SLK, 5.0, FastNoise(RunKey.fixed(1)), 0)
    found = fit_line(noisy.numpy(), centres(chosen).numpy(), 5.0)
    for number, (logits, labels) in enumerate(parts[:2]):
        moved = found.slope * logits + found.bias + found.slice_biases[number]
        assert float(torch.sigmoid(moved).sum() / labels.sum()) == pytest.approx(1.0, abs=0.01)
    assert found.slice_biases[2] == 0.0
    assert found.slice_biases[0] - found.slice_biases[1] == pytest.approx(2.0, abs=0.2)


# ---- the price -----------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_the_default_takes_one_percent_of_the_budget(epsilon: float) -> None:
    """A hundred such queries together cost epsilon."""
    chosen = LogitCalibration().resolve(epsilon, 1e-7)
    together = epsilon_of([(chosen.event(), 100)], 1e-7)
    assert 0.97 * epsilon < together <= epsilon


def test_noise_that_is_set_stays() -> None:
    assert LogitCalibration(noise_multiplier=3.0).resolve(1.0, 1e-7).noise_multiplier == 3.0
    assert LogitCalibration().resolve(None, 1e-7).noise_multiplier == 50.0

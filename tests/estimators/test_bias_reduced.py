"""The random level: expectations by enumeration, and what every realisation costs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from lightning_dpsparse.accounting.calibration import epsilon_of
from lightning_dpsparse.accounting.events import composed, gaussian, poisson, poisson_gaussian
from lightning_dpsparse.estimators.bias_reduced import (
    Levels,
    bias_reduced_mean,
    draw_levels,
    draw_samples,
    estimate_on,
    event_of_bias_reduced,
)
from lightning_dpsparse.estimators.mean import noisy_mean
from lightning_dpsparse.estimators.projection import projected_mean
from lightning_dpsparse.estimators.rows import Array, as_rows
from tests.support.estimator_examples import matrices

VECTORS = as_rows(np.array([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8], [-0.9, 0.0]]))
BOUNDS: dict[str, Any] = {"clip_norm": 1.0, "max_nonzeros": 1, "noise_multiplier": 0.0}
NOBODY = np.zeros(4, bool)


def projected(drawn_N: Array, exponent: int) -> Array:
    return projected_mean(VECTORS[drawn_N], divisor=2.0**exponent, **BOUNDS)


def expected_mean(levels: Levels, exponent: int) -> Array:
    """m_j: over all Poisson samples."""
    rate, total_D = levels.rate(exponent), np.zeros(2)
    for drawn in itertools.product([False, True], repeat=4):
        chance = rate ** sum(drawn) * (1 - rate) ** (4 - sum(drawn))
        total_D += chance * projected(np.array(drawn), exponent)
    return total_D


@pytest.mark.parametrize("first", [0, 1])
def test_its_expectation_is_that_of_the_largest_batch(first: int) -> None:
    levels, source = Levels(num_examples=4, first=first, last=1), np.random.default_rng(0)
    expected_D = np.zeros(2)
    for level, p in zip(range(first, 2), levels.chances()):
        rate = levels.rate(level + 1)
        chances = (1 - rate, rate / 2, rate / 2)
        for parts in itertools.product([0, 1, 2], repeat=4):
            chance, part_N = np.prod([chances[part] for part in parts]), np.array(parts)
            expected_D += p * chance * estimate_on(
                VECTORS, part_N == 1, part_N == 2, NOBODY, level, levels, **BOUNDS, noise=source
            )  # fmt: skip
    expected_D += expected_mean(levels, first)  # the small batch is drawn apart
    np.testing.assert_allclose(expected_D, expected_mean(levels, 2), atol=1e-12)
    assert np.abs(expected_mean(levels, first) - expected_mean(levels, 2)).max() > 0.02  # a bias


def test_the_samples_are_those_of_the_enumeration() -> None:
    """By the mean of many: 1,500 estimates of standard deviation below 1.5 are right to 0.16."""
    levels, source = Levels(num_examples=4, last=1, steps=1500), np.random.default_rng(1)
    drawn = source.choice(2, size=1500, p=levels.chances())
    found_D = np.mean(
        [bias_reduced_mean(VECTORS, k, levels, **BOUNDS, noise=source) for k in drawn], axis=0
    )
    np.testing.assert_allclose(found_D, expected_mean(levels, 2), atol=4 * 1.5 / 1500**0.5)


def test_samples_have_the_rates_that_the_event_assumes() -> None:
    n = 1 << 16
    levels, source = Levels(num_examples=n, first=10, last=14), np.random.default_rng(6)
    for level in range(10, 15):
        one_N, other_N, small_N = draw_samples(n, level, levels, source)
        assert not (one_N & other_N).any()
        # Poisson counts: six standard deviations are a chance of 1e-9.
        for count, expected in (
            (one_N.sum(), 2**level),
            (other_N.sum(), 2**level),
            (small_N.sum(), 2**10),
            ((small_N & one_N).sum(), 2**10 * 2**level / n),
        ):
            assert abs(count - expected) < 6 * expected**0.5


@given(vectors_ND=matrices(), seed=st.integers(0, 100))
def test_removing_one_example_moves_batch_and_halves_by_what_the_pair_assumes(
    vectors_ND: Array, seed: int
) -> None:
    source, n = np.random.default_rng(seed), vectors_ND.shape[0]
    in_batch_N, coin_N = source.random(n) < 0.7, source.random(n) < 0.5

    def sums(kept_N: Array) -> Array:
        masks = (in_batch_N, in_batch_N & coin_N, in_batch_N & ~coin_N)
        quiet: dict[str, Any] = {"divisor": 1.0, "clip_norm": 0.7, "noise_multiplier": 0.0}
        return np.concatenate([noisy_mean(vectors_ND[mask & kept_N], **quiet) for mask in masks])

    everyone_N = np.ones(n, bool)
    for i in range(n):
        moved = np.linalg.norm(sums(everyone_N) - sums(np.arange(n) != i))
        assert moved <= 0.7 * 2**0.5 * (1 + 1e-9)


def test_noise_has_the_scale_that_the_event_assumes() -> None:
    d, sigma, level = 100_000, 2.0, 1
    levels = Levels(num_examples=8, first=1, last=2)
    found_D = bias_reduced_mean(
        np.zeros((1, d)),
        level,
        levels,
        clip_norm=1.0,
        max_nonzeros=10**14,  # a ball too large to matter
        noise_multiplier=sigma,
        noise=np.random.default_rng(2),
    )
    # (batch of 4 - (half of 2 + half of 2) / 2) / p + small of 2, with p = 2/3
    variance = sigma**2 * ((1 / 16 + 2 * (1 / 2) ** 2 / 4) / (2 / 3) ** 2 + 1 / 4)
    assert chi2.ppf(1e-6, d) < np.sum(found_D**2) / variance < chi2.ppf(1 - 1e-6, d)


def test_the_event_is_every_step_and_every_cap() -> None:
    levels = Levels(num_examples=64, first=3, last=5, steps=10)
    pair = gaussian(2.0 / 2**0.5)
    caps = levels.caps()
    assert event_of_bias_reduced(2.0, levels) == composed(
        [
            (poisson_gaussian(1 / 8, 2.0), 10),
            (poisson(1 / 4, pair), caps[0]),
            (poisson(1 / 2, pair), caps[1]),
            (pair, caps[2]),  # everyone
        ]
    )


@given(seed=st.integers(0, 10_000), steps=st.integers(1, 30), last=st.integers(0, 5))
def test_no_realisation_takes_more_than_what_is_charged(seed: int, steps: int, last: int) -> None:
    levels = Levels(num_examples=64, last=last, steps=steps, stops_early=0.5)
    drawn = draw_levels(levels, np.random.default_rng(seed))
    caps = levels.caps()
    counts = [drawn.count(level) for level in range(last + 1)]
    assert 1 <= len(drawn) <= steps
    assert all(count <= cap for count, cap in zip(counts, caps))
    assert len(drawn) == steps or any(count == cap for count, cap in zip(counts, caps))


def test_a_realisation_costs_less_than_the_charge() -> None:
    levels = Levels(num_examples=64, first=3, last=5, steps=10)
    whole = epsilon_of([(event_of_bias_reduced(4.0, levels), 1)], 1e-5, 1e-3)
    drawn = draw_levels(levels, np.random.default_rng(3))
    parts = [(poisson_gaussian(1 / 8, 4.0), len(drawn))]
    parts += [
        (poisson(2.0 ** (k + 1) / 64, gaussian(4.0 / 2**0.5)) if k < 5 else gaussian(8**0.5), 1)
        for k in drawn
    ]
    assert epsilon_of(parts, 1e-5, 1e-3) < whole


def test_runs_seldom_stop_early() -> None:
    levels, source = Levels(num_examples=1 << 12, last=10, steps=50), np.random.default_rng(4)
    early = np.mean([len(draw_levels(levels, source)) < 50 for _ in range(500)])
    # At most 0.1, which 500 runs exceed by 0.05 with a chance of 1e-4; but the last draw may be
    # the one that reaches a cap, and then nothing is lost.
    assert early < 0.15


def test_refusals() -> None:
    with pytest.raises(ValueError, match="Lower the levels"):
        Levels(num_examples=10, last=3)
    with pytest.raises(ValueError, match="stops_early"):
        Levels(num_examples=10, last=1, steps=0)

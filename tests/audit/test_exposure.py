"""Exposure by rank and by fit, against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm, skewnorm

from lightning_dpsparse.audit.exposure import exposure_by_fit, exposure_by_rank
from lightning_dpsparse.audit.secret_sharer import exposures


def test_by_rank_is_the_definition() -> None:
    draws = np.random.default_rng(0)
    canaries, references = draws.normal(size=40), draws.normal(size=200)
    found = exposure_by_rank(canaries, references)
    for canary, exposure in zip(canaries, found):
        rank = 1 + sum(reference < canary for reference in references)
        assert exposure == pytest.approx(math.log2(201) - math.log2(rank))


def test_ties_do_not_count_as_memory() -> None:
    """A model that gives every example one loss remembers nothing: one bit, not log2(R)."""
    found = exposure_by_rank(np.zeros(3), np.zeros(1023))
    assert found == pytest.approx([math.log2(1024 / 512.5)] * 3)


def test_by_fit_is_minus_log_of_the_fitted_probability() -> None:
    references = np.random.default_rng(1).normal(5.0, 2.0, size=400_000)
    canaries = np.array([5.0, 1.0, -9.0])
    exact = -norm.logcdf((canaries - 5.0) / 2.0) / math.log(2)
    # The tail at 7 sigma moves by 7 * 7 * the relative error of sigma (0.0011), and the skewness.
    assert exposure_by_fit(canaries, references) == pytest.approx(exact, rel=0.03)


def test_the_fit_finds_a_skew_normal() -> None:
    """Three moments of 400,000 draws: the skewness is known to 0.004."""
    references = skewnorm.rvs(4.0, 1.0, 3.0, size=400_000, random_state=2)
    canaries = np.array([0.5, 1.0, 2.0, 4.0])
    exact = -skewnorm.logcdf(canaries, 4.0, 1.0, 3.0) / math.log(2)
    assert exposure_by_fit(canaries, references) == pytest.approx(exact, rel=0.05, abs=0.02)


def test_a_heavier_skew_than_the_family_has_is_no_error() -> None:
    references = np.random.default_rng(3).exponential(size=5000)
    assert np.isfinite(exposure_by_fit(np.array([0.01, 1.0]), references)).all()
    assert exposure_by_fit(np.array([1.0]), np.ones(10)).tolist() == [1.0]


def test_canaries_are_grouped_by_repeats() -> None:
    references = np.arange(1.0, 8.0)
    found = exposures(np.array([1, 1, 5]), np.array([9.0, 9.0, 0.0]), references)
    assert [(e.repeats, e.canaries, e.interpolation) for e in found] == [(1, 2, 0.0), (5, 1, 3.0)]
    assert (found[0].low, found[0].high) == (0.0, 0.0)

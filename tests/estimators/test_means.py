"""Plain and projected means: what one example moves, what the noise is, what it costs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from scipy.stats import chi2, norm

from lightning_dpsparse.accounting.calibration import epsilon_of
from lightning_dpsparse.accounting.events import composed
from lightning_dpsparse.estimators.calibration import noise_multiplier_for, spent_epsilon
from lightning_dpsparse.estimators.mean import Kind, event_of_mean, noisy_mean
from lightning_dpsparse.estimators.projection import event_of_projection, projected_mean
from lightning_dpsparse.estimators.rows import Array
from tests.support.estimator_examples import matrices, sparse_rows

KINDS: list[Kind] = ["gaussian", "laplace"]
QUIET: dict[str, Any] = {"divisor": 1.0, "noise_multiplier": 0.0}


@pytest.mark.parametrize("kind", KINDS)
@given(vectors_ND=matrices())
def test_removing_one_example_moves_the_sum_by_at_most_the_clip(
    kind: Kind, vectors_ND: Array
) -> None:
    sum_D = noisy_mean(vectors_ND, clip_norm=0.7, kind=kind, **QUIET)
    for i in range(vectors_ND.shape[0]):
        without_D = noisy_mean(np.delete(vectors_ND, i, 0), clip_norm=0.7, kind=kind, **QUIET)
        moved = np.linalg.norm(sum_D - without_D, 2 if kind == "gaussian" else 1)
        assert moved <= 0.7 * (1 + 1e-9)


def test_without_noise_and_clip_it_is_the_mean() -> None:
    vectors_ND = sparse_rows(50, 10, 3, seed=0)
    mean_D = vectors_ND.toarray().mean(0)
    for kind in KINDS:
        plain_D = noisy_mean(vectors_ND, divisor=50, clip_norm=2.0, noise_multiplier=0.0, kind=kind)
        np.testing.assert_allclose(plain_D, mean_D, atol=1e-15)
        # The mean of sparse vectors is in the ball already.
        projected_D = projected_mean(
            vectors_ND, divisor=50, clip_norm=1.0, max_nonzeros=3, noise_multiplier=0.0, kind=kind
        )
        np.testing.assert_allclose(projected_D, mean_D, atol=1e-12)


def test_the_divisor_is_what_was_given_and_not_the_number_of_rows() -> None:
    mean_D = noisy_mean(np.eye(3), divisor=10.0, clip_norm=1.0, noise_multiplier=0.0)
    np.testing.assert_allclose(mean_D, 0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_noise_has_the_scale_that_the_event_assumes(kind: Kind) -> None:
    d = 200_000
    vectors_ND, scale = np.zeros((1, d)), 3.0 * 0.5 / 7.0
    noisy_D = noisy_mean(
        vectors_ND,
        divisor=7.0,
        clip_norm=0.5,
        noise_multiplier=3.0,
        kind=kind,
        noise=np.random.default_rng(5),
    )
    if kind == "gaussian":  # the sum of squares is chi-square with d degrees
        statistic = float(np.sum((noisy_D / scale) ** 2))
        assert chi2.ppf(1e-6, d) < statistic < chi2.ppf(1 - 1e-6, d)
    else:  # |x| / b is Exp(1), and twice their sum is chi-square with 2 d degrees
        statistic = float(2 * np.sum(np.abs(noisy_D) / scale))
        assert chi2.ppf(1e-6, 2 * d) < statistic < chi2.ppf(1 - 1e-6, 2 * d)


def test_two_releases_never_share_noise() -> None:
    release = [
        noisy_mean(np.zeros((1, 3)), divisor=1, clip_norm=1, noise_multiplier=1) for _ in range(2)
    ]
    assert (release[0] != release[1]).all()


def test_projection_beats_the_plain_mechanism_on_wide_sparse_data() -> None:
    vectors_ND = sparse_rows(200, 20_000, 4, seed=1, active=8)
    mean_D = np.asarray(vectors_ND.toarray().mean(0))
    errors = []
    for kind in KINDS:
        settings: dict[str, Any] = {
            "divisor": 200,
            "noise_multiplier": 4.0,
            "kind": kind,
            "noise": np.random.default_rng(2),
        }
        clip_norm = 1.0 if kind == "gaussian" else 2.0
        plain_D = noisy_mean(vectors_ND, clip_norm=clip_norm, **settings)
        projected_D = projected_mean(vectors_ND, clip_norm=1.0, max_nonzeros=4, **settings)
        errors.append([np.linalg.norm(found - mean_D) for found in (plain_D, projected_D)])
        assert np.abs(projected_D).sum() <= 2.0 * (1 + 1e-9)
    for plain, projected in errors:  # 0.02 sqrt(20000) = 2.8 and more; no mean is longer than 1
        assert plain > 2.5
        assert projected < 1.0


def test_gaussian_calibration_is_the_exact_one_and_not_the_textbook_one() -> None:
    for epsilon, delta in [(1.0, 1e-6), (12.0, 1e-6)]:
        s = noise_multiplier_for(event_of_projection, epsilon, delta)
        exact = norm.cdf(0.5 / s - epsilon * s) - math.exp(epsilon) * norm.cdf(
            -0.5 / s - epsilon * s
        )
        assert 0.99 * delta < exact <= delta
        textbook = math.sqrt(2 * math.log(1.25 / delta)) / epsilon
        assert (s < textbook) == (epsilon < 12)  # which is loose, and then unsafe


def test_laplace_is_pure_and_sums_over_steps_and_shrinks_by_sampling() -> None:
    once = event_of_projection(4.0, kind="laplace")
    assert spent_epsilon(once, 0.0) == 0.25
    assert epsilon_of([(once, 1)], 1e-12) == pytest.approx(0.25, abs=1e-3)  # privacy losses agree
    assert spent_epsilon(composed([(once, 8)]), 0.0) == 2.0
    sampled = event_of_mean(4.0, kind="laplace", rate=0.1)
    assert spent_epsilon(sampled, 0.0) == pytest.approx(math.log(0.9 + 0.1 * math.exp(0.25)))
    assert epsilon_of([(sampled, 1)], 1e-12) == pytest.approx(spent_epsilon(sampled, 0.0), abs=1e-3)
    assert noise_multiplier_for(lambda b: composed([(event_of_mean(b, kind="laplace"), 8)]), 2.0, 0)
    assert spent_epsilon(event_of_mean(4.0), 0.0) == math.inf  # a Gaussian is never pure


def test_no_noise_is_not_private() -> None:
    for kind in KINDS:
        assert epsilon_of([(event_of_mean(0.0, kind=kind, rate=0.1), 1)], 1e-6) == math.inf


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"divisor": 0.0}, "Expected divisor > 0"),
        ({"clip_norm": -1.0}, "Expected clip_norm > 0"),
        ({"noise_multiplier": -1.0}, "Expected noise_multiplier >= 0"),
    ],
)
def test_refusals(bad: dict[str, float], message: str) -> None:
    good = {"divisor": 1.0, "clip_norm": 1.0, "noise_multiplier": 1.0}
    with pytest.raises(ValueError, match=message):
        noisy_mean(np.eye(2), **{**good, **bad})
    with pytest.raises(ValueError, match="noise_multiplier >= 0"):
        event_of_mean(math.nan)
    with pytest.raises(ValueError, match="Expected epsilon > 0"):
        noise_multiplier_for(event_of_mean, -1.0, 1e-6)

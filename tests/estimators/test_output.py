"""Perturbed minima: how far one example moves them, and how exactly they are found."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from lightning_dpsparse.accounting.events import gaussian
from lightning_dpsparse.estimators.objective import Loss, LossName
from lightning_dpsparse.estimators.output import (
    event_of_output,
    gradient_error,
    l1_sensitivity,
    l2_sensitivity,
    minimise,
    perturbed_minimiser,
    regularisation_for,
)
from lightning_dpsparse.estimators.rows import Array
from tests.support.estimator_examples import sparse_rows

N, D, S = 6, 8, 2


def minimum(loss: Loss, rows_ND: Any, labels_N: Array, penalty: float, n: int = N) -> Array:
    def objective(x_D: Array) -> tuple[float, Array]:
        scores_N = rows_ND @ x_D
        value = loss.values(scores_N, labels_N).sum() / n + penalty / 2 * (x_D @ x_D)
        return value, rows_ND.T @ loss.slopes(scores_N, labels_N) / n + penalty * x_D

    return minimise(
        objective,
        rows_ND.shape[1],
        smoothness=loss.max_curvature,
        regularisation=penalty,
        tolerance=1e-7,
    )


@pytest.mark.parametrize("name", ["logistic", "squared"])
@given(
    seed=st.integers(0, 1000),
    penalty=st.sampled_from([0.01, 0.1, 1.0]),
    labels=st.lists(st.sampled_from([0.0, 1.0]), min_size=N, max_size=N),
)
@settings(max_examples=25, deadline=None)
def test_removing_one_example_moves_the_minimum_by_at_most_the_sensitivity(
    name: LossName, seed: int, penalty: float, labels: list[float]
) -> None:
    loss = Loss(name, 0.8)
    rows_ND, labels_N = sparse_rows(N, D, S, seed), np.array(labels)
    bounds: dict[str, Any] = {
        "lipschitz": loss.max_slope,
        "regularisation": penalty,
        "num_examples": N,
        "tolerance": 1e-7,
    }
    l2 = l2_sensitivity(**bounds)
    l1 = l1_sensitivity(**bounds, smoothness=loss.max_curvature, max_nonzeros=S, num_columns=D)
    whole_D = minimum(loss, rows_ND, labels_N, penalty)
    kept_N = np.arange(N) != seed % N
    moved_D = whole_D - minimum(loss, rows_ND[kept_N], labels_N[kept_N], penalty)
    assert np.linalg.norm(moved_D) <= l2
    assert np.abs(moved_D).sum() <= l1


def test_in_l1_an_example_moves_columns_that_it_does_not_have() -> None:
    """A hub that 30 rows share with a leaf each: moving the hub moves all leaves.

    So the l1 sensitivity is more than that of one gradient, sqrt(s) L / (lambda n).
    """
    leaves, penalty, loss = 30, 1e-3, Loss("squared", 0.8)
    n = leaves + 1
    hub = (1 / n) ** 0.5
    rows_ND = np.eye(n) * (1 - hub**2) ** 0.5
    rows_ND[:, 0], rows_ND[0, 0] = hub, 1.0
    labels_N = np.zeros(n)
    labels_N[0] = 100.0
    moved_D = minimum(loss, rows_ND, labels_N, penalty, n) - minimum(
        loss, rows_ND[1:], labels_N[1:], penalty, n
    )
    bound = l1_sensitivity(
        lipschitz=0.8,
        regularisation=penalty,
        num_examples=n,
        tolerance=1e-7,
        smoothness=1.0,
        max_nonzeros=2,
        num_columns=n,
    )
    assert 2**0.5 * 0.8 / (penalty * n) * 1.5 < np.abs(moved_D).sum() <= bound


def test_the_solver_meets_its_tolerance_where_quasi_newton_gives_up() -> None:
    def objective(x_D: Array) -> tuple[float, Array]:
        # A value that never moves ends L-BFGS at once; the gradient steps go on.
        return 0.0, np.array([1.0, 0.01]) * x_D - 1.0

    x_D = minimise(objective, 2, smoothness=0.99, regularisation=0.01, tolerance=1e-6)
    np.testing.assert_allclose(x_D, [1.0, 100.0], rtol=1e-5)


@pytest.mark.parametrize("penalty", [1e-3, 1.0])
def test_float64_changes_a_gradient_by_no_more_than_is_priced(penalty: float) -> None:
    """Against fractions. Rows that all point one way, so that sums are as long as can be."""
    n, s, loss = 3_000, 3, Loss("squared", 0.8)
    rows_ND = np.abs(np.random.default_rng(0).normal(size=(n, s)))
    rows_ND /= np.linalg.norm(rows_ND, axis=1, keepdims=True)
    x_D, labels_N = np.full(s, 0.1 / penalty), np.full(n, 1e6)
    gradient_D = rows_ND.T @ loss.slopes(rows_ND @ x_D, labels_N) / n + penalty * x_D
    slope = -Fraction(loss.max_residual)  # of every example
    exact = [
        slope * sum(map(Fraction, column_N.tolist())) / n + Fraction(penalty) * Fraction(float(x))
        for column_N, x in zip(rows_ND.T, x_D)
    ]
    errors = [float(Fraction(float(g)) - e) for g, e in zip(gradient_D, exact)]
    bound = gradient_error(
        lipschitz=0.8, regularisation=penalty, num_examples=n, smoothness=1.0, max_nonzeros=s
    )
    assert 0 < np.linalg.norm(errors) <= bound
    assert bound < 1e-3 * 0.8 / n / 100  # a hundredth of the solver's tolerance


def test_sums_over_blocks_keep_the_price_small_for_many_examples() -> None:
    for n in (10**4, 10**6, 10**8):
        bound = gradient_error(
            lipschitz=1.0, regularisation=0.1, num_examples=n, smoothness=0.25, max_nonzeros=64
        )
        assert 2.0 * bound < 0.004 / n  # over L / n: what it adds to the sensitivity


@pytest.mark.parametrize("name", ["logistic", "squared"])
def test_slopes_are_derivatives_and_bounded(name: LossName) -> None:
    loss, scores_N = Loss(name, 0.5), np.linspace(-5.0, 5.0, 101)
    for label in (0.0, 1.0):
        labels_N, h = np.full(101, label), 1e-6
        numeric_N = (loss.values(scores_N + h, labels_N) - loss.values(scores_N - h, labels_N)) / (
            2 * h
        )
        slopes_N = loss.slopes(scores_N, labels_N)
        np.testing.assert_allclose(slopes_N, numeric_N, atol=1e-5)
        assert np.abs(slopes_N).max() <= loss.max_slope
        assert np.diff(slopes_N).max() / 0.1 <= loss.max_curvature * (1 + 1e-9)


def test_noise_has_the_scale_that_the_event_assumes() -> None:
    d = 100_000
    found_D = perturbed_minimiser(
        np.zeros(d),
        sensitivity=0.5,
        radius=math.inf,
        noise_multiplier=3.0,
        noise=np.random.default_rng(0),
    )
    assert chi2.ppf(1e-6, d) < np.sum((found_D / 1.5) ** 2) < chi2.ppf(1 - 1e-6, d)
    assert event_of_output(3.0) == gaussian(3.0)


def test_the_release_is_in_the_feasible_set_and_exact_without_noise() -> None:
    point_D = np.array([0.3, -0.4])
    kept_D = perturbed_minimiser(point_D, sensitivity=1.0, radius=1.0, noise_multiplier=0.0)
    np.testing.assert_array_equal(kept_D, point_D)
    noisy_D = perturbed_minimiser(point_D, sensitivity=1.0, radius=1.0, noise_multiplier=9.0)
    assert np.linalg.norm(noisy_D) <= 1 + 1e-9


def test_the_default_penalty_falls_as_the_poster_says() -> None:
    public: dict[str, Any] = {
        "lipschitz": 1.0,
        "radius": 1.0,
        "num_columns": 1000,
        "max_nonzeros": 4,
        "epsilon": 1.0,
        "smoothness": 1.0,
    }
    for delta, slope in ((1e-6, 1 / 2), (0.0, 1 / 3)):
        few, many = (
            regularisation_for(num_examples=n, delta=delta, **public) for n in (10**6, 10**8)
        )
        assert few / many == pytest.approx(100**slope)

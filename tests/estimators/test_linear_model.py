"""The linear model: it learns, by every estimator and loss, and refuses what it cannot do."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from lightning_dpsparse.estimators import fitting
from lightning_dpsparse.estimators.linear_model import DPLinearModel
from lightning_dpsparse.estimators.release import laplace
from lightning_dpsparse.estimators.rows import Array
from tests.support.estimator_examples import auc, clicks

TRAIN, D, S = 8_000, 120, 6
X, Y = clicks(TRAIN + 4_000, D, S, seed=0)
BEST: dict[str, dict[str, Any]] = {
    "gaussian": {"learning_rate": 8.0, "steps": 30},
    "projection": {"learning_rate": 8.0, "steps": 30},
    "sketch": {"learning_rate": 8.0, "steps": 5},
    "output": {"radius": 60.0},
    "bias_reduced": {"learning_rate": 1.0, "steps": 30},
}


def fit(estimator: str, rows: int = TRAIN, **settings: Any) -> DPLinearModel:
    model = DPLinearModel(
        estimator=estimator,  # type: ignore[arg-type]
        max_nonzeros=S,
        **{**BEST[estimator], **settings},
    )
    return model.fit(X[:rows], Y[:rows], noise=np.random.default_rng(1))


def quality(model: DPLinearModel) -> float:
    return auc(Y[TRAIN:], model.decision_function(X[TRAIN:]))


@pytest.fixture(scope="module")
def public() -> float:
    """The quality of plain gradient descent."""
    weights_D = np.zeros(D)
    for _ in range(300):
        slopes_N = 1.0 / (1.0 + np.exp(-(X[:TRAIN] @ weights_D))) - Y[:TRAIN]
        weights_D -= 8.0 * (X[:TRAIN].T @ slopes_N) / TRAIN
    return auc(Y[TRAIN:], X[TRAIN:] @ weights_D)


@pytest.mark.parametrize(
    ("estimator", "least"),
    [("gaussian", 0.85), ("projection", 0.85), ("output", 0.8), ("bias_reduced", 0.6)],
)
def test_it_learns_at_epsilon_three(estimator: str, least: float) -> None:
    model = fit(estimator, epsilon=3.0)
    assert quality(model) > least
    labels_N = model.predict(X[TRAIN:])
    assert np.mean(labels_N == Y[TRAIN:]) > least - 0.12
    chances_N2 = model.predict_proba(X[TRAIN:])
    np.testing.assert_allclose(chances_N2.sum(1), 1.0)
    assert ((chances_N2[:, 1] > 0.5) == labels_N).all()


@pytest.mark.parametrize(
    ("estimator", "gap"), [("gaussian", 0.01), ("output", 0.01), ("bias_reduced", 0.05)]
)
def test_with_a_huge_budget_it_is_nearly_as_good_as_without_privacy(
    estimator: str, gap: float, public: float
) -> None:
    assert quality(fit(estimator, epsilon=1000.0)) > public - gap


@pytest.mark.filterwarnings("ignore:delta=0.001 is more than a tenth")
def test_a_sketch_has_the_size_for_the_noise_of_one_step() -> None:
    budget: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-3}
    model = fit("sketch", rows=24, steps=1, **budget)
    # n sqrt(s ln(d / s)) / sigma = 41.6 with the intercept's column. A vertex of the linear program
    # has no more non-zeros than that, and hardly fewer.
    assert 24 * (7 * math.log(121 / 7)) ** 0.5 / model.noise_multiplier_ == pytest.approx(
        41.6, 0.01
    )
    assert 38 <= np.count_nonzero(np.append(model.coef_, model.intercept_)) <= 42
    # 104 rows: 180 measurements for all the budget in one step, of 121 columns
    with pytest.raises(ValueError, match="all 121: nothing would be sketched"):
        fit("sketch", rows=104, steps=1, **budget)
    assert fit("sketch", rows=104, steps=6, **budget).n_iter_ == 6  # 74 for a sixth of it
    sampled = fit("sketch", rows=104, steps=1, sampling_rate=0.1, **budget)  # 55 for 10 rows
    assert 50 <= np.count_nonzero(np.append(sampled.coef_, sampled.intercept_)) <= 55


def test_pure_dp_by_laplace_noise() -> None:
    model = fit("projection", epsilon=3.0, delta=0.0, steps=6)
    assert (model.delta_, model.noise_multiplier_) == (0.0, pytest.approx(2.0, abs=2e-4))
    assert quality(model) > 0.7
    output = fit("output", epsilon=100.0, delta=0.0)
    assert output.noise_multiplier_ == pytest.approx(0.01, abs=2e-4)
    assert quality(output) > 0.6


def test_it_learns_from_samples() -> None:
    assert quality(fit("gaussian", epsilon=3.0, sampling_rate=0.25, steps=10)) > 0.8


def test_squared_loss_predicts_scores() -> None:
    source = np.random.default_rng(3)
    weights_D = source.normal(0.0, 1.0, D)
    targets_N = X @ weights_D
    model = DPLinearModel(
        loss="squared",
        max_nonzeros=S,
        epsilon=1000.0,
        learning_rate=20.0,
        steps=60,
        fit_intercept=False,
    ).fit(X[:TRAIN], targets_N[:TRAIN])
    left_N = model.predict(X[TRAIN:]) - targets_N[TRAIN:]
    assert np.var(left_N) < 0.1 * np.var(targets_N)
    assert model.intercept_ == 0.0
    with pytest.raises(AttributeError, match='Expected loss="logistic"'):
        model.predict_proba(X)


def test_the_noise_of_output_is_for_the_largest_move_of_one_example() -> None:
    """An example at every bound moves the minimum by sqrt(2) max_residual / (lambda n)."""
    model = DPLinearModel(
        loss="squared",
        estimator="output",
        delta=1e-5,
        feature_norm=1.0,
        max_residual=0.5,
        regularisation=2.0,
        radius=1e6,
        num_examples=10,
    )
    row_1D = np.array([[30.0, 40.0, 0.0]])  # clipped to norm 1, and the intercept's column is 1
    weights = []
    for label in (np.nan, 100.0):  # absent, and with a residual beyond its bound
        model.fit(row_1D, [label], noise=np.random.default_rng(0))
        weights.append(np.append(model.coef_, model.intercept_))
    largest = 2**0.5 * 0.5 / (2.0 * 10)
    noise_D = weights[0] / np.random.default_rng(0).normal(size=4)
    np.testing.assert_allclose(noise_D, model.noise_multiplier_ * largest, rtol=3e-3)
    assert (noise_D >= model.noise_multiplier_ * largest).all()
    np.testing.assert_allclose(weights[1] - weights[0], largest * row_and_one(0.6, 0.8), rtol=3e-3)


def test_the_noise_of_output_is_also_for_what_float64_hides_of_a_gradient() -> None:
    """With a billion examples that is hundredths of what one example moves."""
    n, penalty = 10**9, 2.0
    model = DPLinearModel(
        estimator="output", regularisation=penalty, radius=1e6, num_examples=n, fit_intercept=False
    ).fit(np.ones((1, 3)), [np.nan], noise=np.random.default_rng(0))
    noise_D = model.coef_ / np.random.default_rng(0).normal(size=3)
    # Sums over blocks of 2^16: 2 x 2^-52 (2^16 + n / 2^16) of the Lipschitz constant, and the
    # solver's tolerance is a thousandth of 1 / n, twice.
    hidden = 2.0**-51 * (2**16 + n / 2**16)
    largest = (1.002 / n + hidden) / penalty
    assert hidden * n > 0.03
    np.testing.assert_allclose(noise_D, model.noise_multiplier_ * largest, rtol=1e-3)


def test_gradients_are_the_same_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fit("output", rows=200, epsilon=100.0, delta=0.0)
    monkeypatch.setattr(fitting, "BLOCK", 64)
    np.testing.assert_allclose(
        fit("output", rows=200, epsilon=100.0, delta=0.0).coef_, whole.coef_, atol=1e-4
    )
    assert np.abs(whole.coef_).max() > 0.01


def test_laplace_noise_of_output_is_for_the_largest_move_in_l1() -> None:
    """With an empty data set the release is nothing but noise, of a scale that is known."""
    n, penalty, s = 10, 2.0, 3
    model = DPLinearModel(
        loss="squared",
        estimator="output",
        delta=0.0,
        max_nonzeros=s,
        feature_norm=3.0,
        max_residual=0.5,
        regularisation=penalty,
        radius=1e6,
        num_examples=n,
    ).fit(np.ones((1, 3)), [np.nan], noise=np.random.default_rng(0))
    # A row has norm sqrt(10) and 4 non-zeros, with the intercept's. sqrt(s) L / (lambda n) is one
    # gradient's part, sqrt(2) H / lambda times that all others', and the solver's tolerance is
    # 1e-3 L / (n sqrt(d)), for both solutions.
    lipschitz, smoothness = 0.5 * 10**0.5, 10.0
    one = lipschitz / (penalty * n)
    largest = one * (2.0 * (1.0 + 2**0.5 * smoothness / penalty) + 2e-3)
    noise_D = np.append(model.coef_, model.intercept_) / laplace(np.random.default_rng(0), 4)
    np.testing.assert_allclose(noise_D, model.noise_multiplier_ * largest, rtol=1e-6)


def test_a_sampled_step_is_the_mean_gradient_of_its_sample() -> None:
    """With next to no noise, and the first numbers of the generator are the sample's."""
    budget: dict[str, Any] = {"delta": 0.0, "epsilon": 400.0, "steps": 1, "learning_rate": 1.0}
    model = fit("projection", rows=400, sampling_rate=0.25, fit_intercept=False, **budget)
    drawn_N = np.random.default_rng(1).random(400) < 0.25
    expected_D = X[:400][drawn_N].T @ (Y[:400][drawn_N] - 0.5) / (0.25 * 400)
    # Laplace noise of scale 1/400 x sqrt(6) / 100: largest of 120 columns below 10 scales
    np.testing.assert_allclose(model.coef_, expected_D, atol=10 * 6**0.5 / 400 / 100)
    assert np.abs(expected_D).max() > 0.005


def test_rows_are_limited_and_then_clipped() -> None:
    model = DPLinearModel(estimator="output", delta=0.0, max_nonzeros=1, feature_norm=0.5)
    model.fit(X[:10], Y[:10])
    model.coef_, model.intercept_ = np.ones(D), 0.0
    # One non-zero of the 120 is left; its value where it is short, and the norm where it is not.
    assert model.decision_function(np.full((1, D), 0.25)).tolist() == [0.25]
    assert model.decision_function(np.full((1, D), 2.0)).tolist() == [0.5]


def row_and_one(*row: float) -> Array:
    """The direction of a row of two columns, an empty one, and the intercept's."""
    return np.array([*row, 0.0, 1.0]) / 2**0.5


def test_noise_comes_from_the_operating_system_unless_given() -> None:
    first, second = (fit("output", rows=200, epsilon=1.0, delta=0.0) for _ in range(2))
    np.testing.assert_array_equal(first.coef_, second.coef_)  # the tests' own generator
    free = DPLinearModel(estimator="output", max_nonzeros=S, delta=0.0, **BEST["output"])
    assert (free.fit(X[:200], Y[:200]).coef_ != first.coef_).any()


def test_examples_that_are_not_finite_count_as_absent() -> None:
    rows_ND, labels_N = X[:50].toarray(), Y[:50].copy()
    rows_ND[3, 2], rows_ND[4, 0], labels_N[5] = np.nan, np.inf, np.nan
    model = DPLinearModel(
        estimator="projection", delta=0.0, max_nonzeros=S, steps=2, num_examples=50
    )
    dirty = copy.deepcopy(model).fit(rows_ND, labels_N, noise=np.random.default_rng(0))
    good_N = ~np.isin(np.arange(50), [3, 4, 5])
    clean = model.fit(X[:50][good_N], Y[:50][good_N], noise=np.random.default_rng(0))
    np.testing.assert_allclose(dirty.coef_, clean.coef_, atol=1e-15)
    assert dirty.intercept_ == pytest.approx(clean.intercept_)


def test_a_million_columns() -> None:
    source = np.random.default_rng(4)
    shape, nonzeros = (300, 1_000_000), 300 * 100  # more in a row than are kept
    places = (np.repeat(np.arange(300), 100), source.integers(0, shape[1], nonzeros))
    wide = sparse.csr_matrix((np.ones(nonzeros), places), shape)
    labels_N = source.integers(0, 2, 300)
    for estimator in ("projection", "output"):
        model = DPLinearModel(estimator=estimator, delta=0.0, steps=2)  # type: ignore[arg-type]
        model.fit(wide, labels_N)
        assert model.coef_.shape == (1_000_000,)
        assert np.isfinite(model.decision_function(wide)).all()
    with pytest.raises(ValueError, match="Expected a sketch of at most"):
        DPLinearModel(estimator="sketch", steps=2).fit(wide, labels_N)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"loss": "hinge"}, "Expected loss to be one of"),
        ({"estimator": "magic"}, "Expected estimator to be one of"),
        ({"epsilon": 0.0}, "Expected epsilon > 0"),
        ({"epsilon": math.inf}, "Expected epsilon > 0"),
        ({"delta": 1.0}, "Expected 0 <= delta < 1"),
        ({"delta": 0.0}, "Expected delta > 0"),
        ({"feature_norm": math.nan}, "Expected feature_norm > 0"),
        ({"regularisation": -1.0}, "Expected regularisation >= 0"),
        ({"estimator": "output", "regularisation": 0.0}, "Expected regularisation > 0"),
        ({"sampling_rate": 0.0}, "Expected 0 < sampling_rate"),
        ({"estimator": "output", "sampling_rate": 0.5}, "samples by itself"),
        ({"num_examples": 3}, "which is public"),
    ],
)
def test_refusals(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DPLinearModel(**bad).fit(X[:10], Y[:10])


@pytest.mark.parametrize(
    ("labels_N", "message"),
    [
        (Y[:9], "Expected a label for each row"),
        (Y[:10, None], "Expected a label for each row"),
    ],
)
def test_labels_are_checked(labels_N: Array, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DPLinearModel().fit(X[:10], labels_N)


def test_only_a_fitted_model_predicts_and_only_for_its_columns() -> None:
    with pytest.raises(AttributeError, match="Call fit"):
        DPLinearModel().predict(X)
    with pytest.raises(ValueError, match="Expected 120 columns, found 5"):
        fit("output", rows=100, delta=0.0).predict(np.zeros((1, 5)))
    with pytest.raises(ValueError, match="Expected two examples or more"):
        fit("bias_reduced", rows=1)

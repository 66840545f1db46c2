"""What the linear model says that it spent, and what it never says."""

from __future__ import annotations

import copy
import math
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import sparse

from lightning_dpsparse.accounting.events import (
    composed,
    gaussian,
    not_private,
    poisson_gaussian,
)
from lightning_dpsparse.estimators.bias_reduced import Levels, event_of_bias_reduced
from lightning_dpsparse.estimators.calibration import spent_epsilon
from lightning_dpsparse.estimators.linear_model import DPLinearModel, EstimatorName
from lightning_dpsparse.estimators.rows import Array
from tests.support.estimator_examples import VALUES, clicks, matrices

X, Y = clicks(64, 120, 6, seed=0)


def model(estimator: EstimatorName, **settings: Any) -> DPLinearModel:
    return DPLinearModel(estimator=estimator, max_nonzeros=6, **settings)


def test_sampled_steps_are_charged_as_poisson_samples() -> None:
    fitted = model("gaussian", sampling_rate=0.25, steps=10, epsilon=1.0).fit(X, Y)
    assert fitted.event_ == composed([(poisson_gaussian(0.25, fitted.noise_multiplier_), 10)])
    assert 0.99 < fitted.epsilon_ <= 1.0
    assert fitted.delta_ == 1e-3  # 1 / (10 n), rounded down
    assert fitted.epsilon_ == spent_epsilon(fitted.event_, fitted.delta_)


def test_steps_on_random_levels_are_charged_with_every_level_at_its_cap() -> None:
    fitted = model("bias_reduced", steps=3, epsilon=1.0).fit(X, Y)
    levels = Levels(num_examples=64, first=2, last=5, steps=3)
    assert fitted.event_ == event_of_bias_reduced(fitted.noise_multiplier_, levels)
    assert 0.99 < fitted.epsilon_ <= 1.0


@pytest.mark.parametrize("num_examples", [None, 1000])
@pytest.mark.parametrize("estimator", get_args(EstimatorName))
def test_every_estimator_refuses_a_delta_that_protects_nobody(
    estimator: EstimatorName, num_examples: int | None
) -> None:
    """By the public number of examples, given or not. Warnings are errors in this suite."""
    n = num_examples or 64
    for delta in (1.0 / n, 0.5):
        with pytest.raises(ValueError, match=rf"Expected delta below 1 / {n:,} "):
            model(estimator, delta=delta, num_examples=num_examples).fit(X, Y)
    with pytest.raises(UserWarning, match=rf"more than a tenth of 1 / {n:,}: .* is 50%"):
        model(estimator, delta=0.5 / n, num_examples=num_examples).fit(X, Y)


def test_a_large_delta_is_warned_of_and_used() -> None:
    with pytest.warns(UserWarning, match="more than a tenth") as caught:
        fitted = model("output", delta=0.005, epsilon=1.0).fit(X, Y)
    assert fitted.delta_ == 0.005
    assert caught[0].filename == __file__  # who called fit
    model("output", delta=0.0015, epsilon=1.0).fit(X, Y)  # a tenth of 1 / 64, and no word


def test_the_minimum_is_charged_once() -> None:
    fitted = model("output", epsilon=1.0).fit(X, Y)
    assert fitted.event_ == gaussian(fitted.noise_multiplier_)
    assert 0.99 < fitted.epsilon_ <= 1.0


def test_laplace_steps_are_charged_without_a_delta() -> None:
    fitted = model("projection", delta=0.0, steps=6).fit(X, Y)
    assert fitted.epsilon_ == pytest.approx(6 / fitted.noise_multiplier_)
    assert 2.99 < fitted.epsilon_ <= 3.0


@pytest.mark.parametrize(
    ("estimator", "settings"),
    [
        ("gaussian", {"steps": 1, "epsilon": 1.0}),
        ("projection", {"steps": 2, "delta": 0.0}),
        ("sketch", {"steps": 1, "epsilon": 1.0}),
        ("output", {"delta": 0.0}),
        ("bias_reduced", {"steps": 1, "epsilon": 1.0}),
    ],
)
def test_noise_that_the_caller_knows_is_not_private(
    estimator: EstimatorName, settings: dict[str, Any]
) -> None:
    fitted = model(estimator, **settings).fit(X, Y, noise=np.random.default_rng(0))
    assert fitted.noise_multiplier_ > 0
    assert fitted.event_ == not_private()
    assert fitted.epsilon_ == math.inf


@given(vectors_ND=matrices(), data=st.data())
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("loss", ["logistic", "squared"])
@pytest.mark.parametrize("estimator", ["projection", "output"])
def test_no_example_whatever_makes_it_raise_or_warn(
    estimator: EstimatorName, loss: Any, vectors_ND: Array, data: st.DataObject
) -> None:
    """Warnings are errors in this suite."""
    labels_N = data.draw(arrays.arrays(np.float64, vectors_ND.shape[0], elements=VALUES))
    fitted = model(estimator, loss=loss, steps=2, delta=0.0).fit(vectors_ND, labels_N)
    assert np.isfinite(fitted.coef_).all()


def test_labels_beyond_zero_and_one_are_clipped_without_a_word() -> None:
    def weights(labels_N: Array) -> Array:
        quick = model("projection", delta=0.0, steps=2, epsilon=1000.0)
        return quick.fit(X, labels_N, noise=np.random.default_rng(0)).coef_

    np.testing.assert_array_equal(weights(2.0 * Y - 1.0), weights(Y))
    one_bad = np.where(np.arange(64) == 5, 7e12, Y)
    np.testing.assert_array_equal(weights(one_bad), weights(np.minimum(one_bad, 1.0)))


@pytest.mark.parametrize(
    ("rows", "labels"),
    [
        (X, ["0"] * 63 + ["secret-4711"]),
        (X, [0.0] * 63 + [None]),
        (X.toarray().astype(object), Y),
        ([["secret-4711", 0.0]] * 64, Y),
    ],
)
def test_errors_tell_of_types_and_never_of_a_value_or_its_length(rows: Any, labels: Any) -> None:
    with pytest.raises(ValueError, match=r"Expected numbers in [Xy], found (str_|object_)") as info:
        model("output", delta=0.0).fit(rows, labels)
    assert info.value.__cause__ is None
    assert info.value.__context__ is None  # a traceback shows these too
    assert not any(character.isdigit() for character in str(info.value))


def test_errors_do_not_count_rows() -> None:
    for labels_N, bound in ((Y[:17], None), (Y, 23)):
        with pytest.raises(ValueError, match="Expected") as info:
            model("output", delta=0.0, num_examples=bound).fit(X, labels_N)
        assert "64" not in str(info.value)
        assert "17" not in str(info.value)


def test_a_number_of_examples_that_is_given_hides_the_number_of_rows() -> None:
    """Rows that are empty add nothing, and noise, divisor and delta come from the number given."""
    quick = model("projection", delta=0.0, steps=2, num_examples=100, fit_intercept=False)
    more = copy.deepcopy(quick).fit(
        sparse.vstack([X, np.zeros((30, 120))]), np.append(Y, np.ones(30)),
        noise=np.random.default_rng(0),
    )  # fmt: skip
    quick.fit(X, Y, noise=np.random.default_rng(0))
    np.testing.assert_array_equal(more.coef_, quick.coef_)
    assert more.noise_multiplier_ == quick.noise_multiplier_
    assert model("output", num_examples=10_000, epsilon=1.0).fit(X, Y).delta_ == 1e-5


def test_plain_lists_of_numbers_are_rows_too() -> None:
    quick = model("projection", delta=0.0, steps=1)
    fitted = quick.fit([[1, 0], [0, 1]], [True, False])
    assert fitted.predict([[1, 0]]).shape == (1,)

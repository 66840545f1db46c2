"""The linear model among scikit-learn's own tools, and without them."""

from __future__ import annotations

import runpy
import sys
from typing import Any

import numpy as np
import pytest
from scipy import sparse
from sklearn.base import clone, is_classifier, is_regressor
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import accuracy_score, r2_score
from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MaxAbsScaler
from sklearn.utils.validation import check_is_fitted

from lightning_dpsparse.estimators import linear_model
from lightning_dpsparse.estimators.linear_model import DPLinearModel
from tests.support.estimator_examples import clicks

X, Y = clicks(900, 40, 4, seed=0)
SCORES = X @ np.random.default_rng(3).normal(0.0, 1.0, 40)
# Laplace noise: its calibration is in closed form. A large budget, so that models are good.
QUICK: dict[str, Any] = {
    "estimator": "projection",
    "delta": 0.0,
    "epsilon": 2e3,
    "max_nonzeros": 4,
    "steps": 20,
    "learning_rate": 8.0,
}


def model(**settings: Any) -> DPLinearModel:
    return DPLinearModel(**{**QUICK, **settings})


def test_it_clones() -> None:
    first = DPLinearModel(epsilon=2.0, estimator="output", radius=3.0)
    copied = clone(first.fit(X, Y))
    assert copied is not first
    assert copied.get_params() == first.get_params()
    assert not hasattr(copied, "coef_")
    assert repr(copied) == "DPLinearModel(estimator='output', epsilon=2.0, radius=3.0)"
    assert copied.set_params(epsilon=5.0) is copied
    assert (copied.epsilon, first.epsilon) == (5.0, 2.0)
    with pytest.raises(ValueError, match=r"found \['sigma'\]"):
        copied.set_params(sigma=1.0)


def test_its_loss_says_what_it_is() -> None:
    assert is_classifier(model())
    assert not is_regressor(model())
    assert is_regressor(model(loss="squared"))
    assert not is_classifier(model(loss="squared"))
    fitted = model().fit(X, Y)
    check_is_fitted(fitted)
    assert fitted.n_features_in_ == 40
    assert fitted.classes_.tolist() == [0, 1]
    assert not hasattr(fitted.set_params(loss="squared").fit(X, SCORES), "classes_")


def test_scores_are_accuracy_and_r_squared() -> None:
    weights_N = np.linspace(0.0, 2.0, 900)
    logistic, squared = model().fit(X, Y), model(loss="squared", learning_rate=1.0).fit(X, SCORES)
    for weights in (None, weights_N):
        expected = accuracy_score(Y, logistic.predict(X), sample_weight=weights)
        assert logistic.score(X, Y, weights) == pytest.approx(expected)
        expected = r2_score(SCORES, squared.predict(X), sample_weight=weights)
        assert squared.score(X, SCORES, weights) == pytest.approx(expected)
    assert squared.score(X, np.ones(900)) == 0.0
    assert squared.score(sparse.csr_array((2, 40)), [squared.intercept_] * 2) == 1.0
    with pytest.raises(ValueError, match="Recode them"):
        logistic.score(X, 2.0 * Y - 1.0)
    with pytest.raises(ValueError, match="Expected a label for each row"):
        logistic.score(X, Y[:-1])


@pytest.mark.parametrize("loss", ["logistic", "squared"])
def test_it_is_cross_validated(loss: Any) -> None:
    labels_N, public = (Y, LogisticRegression()) if loss == "logistic" else (SCORES, Ridge(0.1))
    private = model(loss=loss, max_residual=5.0, fit_intercept=False)
    scores = cross_val_score(private, X, labels_N, cv=3)
    assert scores.shape == (3,)
    assert scores.mean() > cross_val_score(public, X, labels_N, cv=3).mean() - 0.05


def test_chances_serve_scorers_that_ask_for_them() -> None:
    aucs = cross_val_score(model(), X, Y, cv=2, scoring="roc_auc")
    assert aucs.min() > 0.8
    assert cross_val_score(model(), X, Y, cv=2, scoring="neg_log_loss").min() > -0.6
    assert cross_val_predict(model(), X, Y, cv=2, method="predict_proba").shape == (900, 2)


def test_it_is_searched_over_a_grid_in_a_pipeline() -> None:
    pipeline = make_pipeline(MaxAbsScaler(), model())
    names = {"dplinearmodel__steps": np.array([5, 20]), "dplinearmodel__epsilon": [0.001, 2e3]}
    search = GridSearchCV(pipeline, names, cv=2).fit(X, Y)
    assert search.best_params_["dplinearmodel__epsilon"] == 2e3
    best = search.best_estimator_[-1]
    assert 1.9e3 < best.epsilon_ <= 2e3  # of this one fit, and of no other in the grid
    assert search.predict(X[:5]).shape == (5,)
    assert search.score(X, Y) == best.score(search.best_estimator_[:-1].transform(X), Y)


def test_scikit_learn_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "sklearn"]:
        monkeypatch.setitem(sys.modules, name, None)  # an import of it now fails
    alone: dict[str, Any] = runpy.run_path(linear_model.__file__)
    fitted = alone["DPLinearModel"](**QUICK).fit(X, Y)
    assert fitted.score(X, Y) > 0.6
    with pytest.raises(ImportError):
        fitted.__sklearn_tags__()

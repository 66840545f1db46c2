"""Private linear models of wide, sparse data, with the interface of scikit-learn.

`DPLinearModel` checks parameters and data, bounds the rows, and hands a `Problem` to `fitting.py`.
It needs no scikit-learn, but its clone, pipelines and searches take the model.
"""

from __future__ import annotations

import inspect
import math
import warnings
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.special import expit

from lightning_dpsparse.accounting.calibration import check_delta, default_delta, delta_warning
from lightning_dpsparse.checks import (
    check_choice,
    check_flag,
    check_kind,
    check_number,
    check_whole,
    is_number,
    shown,
)
from lightning_dpsparse.estimators.fitting import (
    Problem,
    bias_reduced_steps,
    equal_steps,
    fit_by_output,
    fit_by_steps,
)
from lightning_dpsparse.estimators.objective import Loss, LossName
from lightning_dpsparse.estimators.release import fresh
from lightning_dpsparse.estimators.rows import (
    Array,
    Rows,
    clip_rows,
    finite_rows,
    keep_rows,
    limit_nonzeros,
    numbers,
)
from lightning_dpsparse.refused import Refused

EstimatorName = Literal["gaussian", "projection", "sketch", "output", "bias_reduced"]
Self = TypeVar("Self", bound="DPLinearModel")

_MOST_STEPS, _MOST_EXAMPLES = 10**9, 10**15
_LABELS = (-1e100, 1e100)  # range for the squared loss: sums of larger losses may overflow

# N examples, D columns


class DPLinearModel:
    """Logistic or squared-loss regression on sparse rows, (epsilon, delta)-private for one example.

    The model, its accounting and everything on the way are private for one example added or
    removed; an example is a row and its label. Public, and yours to choose without a look at the
    data: the parameters, the number of columns, and the number n of examples.

    n is public: it sets divisor, noise and delta. Where it is left to the data, the guarantee is
    for an example that is emptied, its place kept. To hide n, give `num_examples`, an upper bound
    that you knew before.

    No error tells of an example: one with a number that is not finite counts as absent, and labels
    of the logistic loss, 0 and 1, are clipped to this range. (Recode others before: 1 and 2 are all
    ones here.)

    gaussian      full-batch gradient steps with Gaussian noise: the yardstick
    projection    the same, each gradient projected on an l1 ball; Laplace noise if delta is 0
    sketch        gradients by l1 recovery from a sketch: a dense matrix of measurements x columns
                  and a linear program a step, so for a few thousand columns; refused where a step
                  has so little noise that a sketch would measure every column
    output        the regularised minimum with noise, in one release; Laplace noise if delta is 0
    bias_reduced  steps on small random batches, with a random number of them

    All but the sketch hold some ten dense vectors of D columns: a million columns are no trouble.

    After `fit`: coef_, intercept_, event_ (for dp_accounting), epsilon_ and delta_ (what was spent,
    at most what was asked), noise_multiplier_, and n_iter_, the number of noisy steps.

    scikit-learn's clone, pipelines, cross-validation and grids take it. **Every fit spends its own
    epsilon**: five folds of a grid of ten are fifty fits, fifty-one with the last one on all rows,
    and an example is in four fifths of them. Their costs add up (compose the event_ of each), and
    `score` on private rows is not even counted. Search on public data, or account for all of it.
    """

    def __init__(
        self,
        *,
        loss: LossName = "logistic",
        estimator: EstimatorName = "gaussian",
        epsilon: float = 3.0,
        delta: float | None = None,
        feature_norm: float = 1.0,
        max_nonzeros: int = 64,
        max_residual: float = 1.0,
        steps: int = 50,
        learning_rate: float = 1.0,
        regularisation: float | None = None,
        sampling_rate: float = 1.0,
        radius: float = 10.0,
        fit_intercept: bool = True,
        num_examples: int | None = None,
    ) -> None:
        """
        loss            "logistic" or "squared"
        estimator       see above
        delta           None is 1 / (10 n), rounded down to a power of ten, and more is warned of;
                        1 / n is refused; 0 is pure DP
        feature_norm    rows are scaled down to this l2 norm
        max_nonzeros    of more in a row, those first in a fixed order of columns are kept
        max_residual    of the squared loss: larger ones count as this (Huber's loss)
        steps           at most, with a gradient each; "output" has none
        learning_rate   of the steps
        regularisation  lambda / 2 ||w||^2, intercept included; None is 0 for steps, and the value
                        that balances penalty and noise for "output"
        sampling_rate   of a Poisson sample for every step; not for output and bias_reduced
        radius          of "output": of the l2 ball in which a good model is thought to be
        num_examples    public, and at least the number of rows, or fit refuses; None is the number
                        of rows, which is then public
        """
        self.loss = loss
        self.estimator = estimator
        self.epsilon = epsilon
        self.delta = delta
        self.feature_norm = feature_norm
        self.max_nonzeros = max_nonzeros
        self.max_residual = max_residual
        self.steps = steps
        self.learning_rate = learning_rate
        self.regularisation = regularisation
        self.sampling_rate = sampling_rate
        self.radius = radius
        self.fit_intercept = fit_intercept
        self.num_examples = num_examples

    # ---- scikit-learn's protocol: for its clone, grids, pipelines and cross-validation -----------

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """All parameters by name. (`deep` is scikit-learn's, and there is nothing deeper.)"""
        names = inspect.signature(type(self)).parameters
        return {name: getattr(self, name) for name in names}

    def set_params(self: Self, **params: Any) -> Self:
        unknown = sorted(params.keys() - self.get_params().keys())
        if unknown:
            raise Refused(
                f"Expected parameters of {type(self).__name__}, found {unknown}. See get_params()."
            )
        for name, value in params.items():
            setattr(self, name, value)
        return self

    def __sklearn_tags__(self) -> Any:
        """Tags of a binary classifier or a regressor of sparse rows. Only scikit-learn asks."""
        from sklearn.utils import ClassifierTags, InputTags, RegressorTags, Tags, TargetTags

        is_classifier = self.loss == "logistic"
        return Tags(
            estimator_type="classifier" if is_classifier else "regressor",
            target_tags=TargetTags(required=True),
            classifier_tags=ClassifierTags(multi_class=False) if is_classifier else None,
            regressor_tags=None if is_classifier else RegressorTags(),
            input_tags=InputTags(sparse=True, allow_nan=True),
            non_deterministic=True,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self._changed())})"

    def _changed(self) -> list[tuple[str, Any]]:
        defaults = inspect.signature(type(self)).parameters
        return [(k, v) for k, v in self.get_params().items() if v != defaults[k].default]

    # ---- fitting ---------------------------------------------------------------------------------

    def fit(self: Self, X: Rows, y: Any, *, noise: np.random.Generator | None = None) -> Self:
        """Learn from rows X (an array, or scipy.sparse) and labels y.

        `noise` is for tests: a generator that someone else can rebuild protects nobody, so event_
        is then NonPrivateDpEvent and epsilon_ infinite.
        """
        self._check()
        if noise is not None:
            check_kind("noise", noise, np.random.Generator, remedy="Leave it out.")
        rows_ND, labels_N = self._examples(X, y)
        count = rows_ND.shape[0] if self.num_examples is None else self.num_examples
        if not max(1, rows_ND.shape[0]) <= count:
            raise Refused(
                f"Expected from one to num_examples={count} rows, found others. Raise "
                "num_examples, which is public."
            )
        delta = self._checked_delta(count)
        problem = Problem(
            rows_ND=rows_ND,
            labels_N=labels_N,
            loss=Loss(self.loss, float(self.max_residual)),
            num_examples=count,
            row_norm=math.hypot(self.feature_norm, float(self.fit_intercept)),
            max_nonzeros=self.max_nonzeros + int(self.fit_intercept),
            epsilon=float(self.epsilon),
            delta=delta,
            is_noise_secret=noise is None,
        )
        source = fresh(noise)
        if self.estimator == "output":
            fitted = fit_by_output(problem, self.regularisation, self.radius, source)
        else:
            if self.estimator == "bias_reduced":
                steps = bias_reduced_steps(problem, self.steps, source)
            else:
                steps = equal_steps(problem, self.estimator, self.steps, self.sampling_rate, source)
            fitted = fit_by_steps(
                problem,
                steps,
                learning_rate=self.learning_rate,
                regularisation=self.regularisation or 0.0,
            )
        width = rows_ND.shape[1] - int(self.fit_intercept)
        self.n_features_in_ = width
        self.coef_: Array = fitted.weights_D[:width]
        self.intercept_ = float(fitted.weights_D[width]) if self.fit_intercept else 0.0
        vars(self).pop("classes_", None)  # of an earlier fit with another loss
        if self.loss == "logistic":
            self.classes_ = np.array([0, 1])
        self.noise_multiplier_, self.n_iter_ = fitted.noise_multiplier, fitted.steps
        self.event_, self.epsilon_, self.delta_ = fitted.event, fitted.epsilon, problem.delta
        return self

    def _checked_delta(self, num_examples: int) -> float:
        """The delta of a fit. One that protects nobody is refused, a large one is warned of."""
        if self.delta is None:
            return default_delta(num_examples)
        check_delta(self.delta, num_examples)
        warning = delta_warning(self.delta, num_examples)
        if warning is not None:
            warnings.warn(warning, stacklevel=3)
        return float(self.delta)

    def _check(self) -> None:
        """Check the parameters before the data is looked at."""
        check_choice("loss to be one of", self.loss, get_args(LossName))
        check_choice("estimator to be one of", self.estimator, get_args(EstimatorName))
        for name in ("feature_norm", "max_residual", "learning_rate", "radius", "epsilon"):
            check_number(name, getattr(self, name), above=0)
        check_whole("max_nonzeros", self.max_nonzeros)
        check_whole("steps", self.steps, most=_MOST_STEPS)
        check_flag("fit_intercept", self.fit_intercept)
        if self.num_examples is not None:
            check_whole("num_examples", self.num_examples, most=_MOST_EXAMPLES)
        if self.regularisation is not None:
            check_number(
                "regularisation", self.regularisation, least=0, remedy="The default is None."
            )
        if self.regularisation == 0 and self.estimator == "output":
            raise Refused(
                'Expected regularisation > 0 with "output", found 0: without it one example may '
                "move the minimum anywhere. Leave it out."
            )
        if not is_number(self.sampling_rate) or not 0 < self.sampling_rate <= 1:
            raise Refused(
                f"Expected 0 < sampling_rate <= 1, found {shown(self.sampling_rate)}. Full batches "
                "are 1."
            )
        if self.sampling_rate < 1 and self.estimator in ("output", "bias_reduced"):
            raise Refused(
                f"Expected sampling_rate=1 with {self.estimator!r}, found {self.sampling_rate}: it "
                "samples by itself or not at all. Leave it out."
            )
        if self.delta is not None and not (is_number(self.delta) and 0 <= self.delta < 1):
            raise Refused(
                f"Expected 0 <= delta < 1, found {shown(self.delta)}. The default is None."
            )
        if self.delta == 0 and self.estimator not in ("projection", "output"):
            raise Refused(
                f"Expected delta > 0 with {self.estimator!r}, found 0: its noise is Gaussian. For "
                'pure DP use "projection" or "output".'
            )

    def _examples(self, X: Rows, y: Any) -> tuple[Rows, Array]:
        given_ND, labels_N = numbers(X, "X"), numbers(y, "y")
        if labels_N.ndim != 1 or given_ND.ndim != 2 or labels_N.size != given_ND.shape[0]:
            raise Refused(
                f"Expected a label for each row, found X with {given_ND.ndim} dimensions, y with "
                f"{labels_N.ndim}, or another number of labels. Give y as one column."
            )
        kept_N = np.isfinite(labels_N) & finite_rows(sparse.csr_array(given_ND))
        rows_ND = self._rows(given_ND)
        if self.fit_intercept:
            rows_ND = sparse.hstack([rows_ND, np.ones((labels_N.size, 1))], format="csr")
        labels_N = np.clip(labels_N, *((0, 1) if self.loss == "logistic" else _LABELS))
        return keep_rows(rows_ND, kept_N), np.where(kept_N, labels_N, 0.0)

    def _rows(self, given_ND: Rows) -> Rows:
        """Rows as the bounds of the loss need them: limited in non-zeros, then clipped."""
        return clip_rows(limit_nonzeros(given_ND, self.max_nonzeros), self.feature_norm)

    # ---- predicting ------------------------------------------------------------------------------

    def decision_function(self, X: Rows) -> Array:
        """Scores <w, x> + b of rows, limited and clipped as in training."""
        if not hasattr(self, "coef_"):
            raise AttributeError("Expected a fitted model, found one without coef_. Call fit.")
        given_ND = numbers(X, "X")
        width = given_ND.shape[1] if given_ND.ndim == 2 else "no table"
        if width != self.n_features_in_:
            raise Refused(
                f"Expected {self.n_features_in_} columns, found {width}. Use the columns of the "
                "data that the model was fitted on."
            )
        scores_N: Array = self._rows(given_ND) @ self.coef_ + self.intercept_
        return scores_N

    def predict_proba(self, X: Rows) -> Array:
        """The chances of labels 0 and 1, by the logistic loss."""
        if self.loss != "logistic":
            raise AttributeError(
                f'Expected loss="logistic", found {self.loss!r}: it has no chances. Use predict.'
            )
        chances_N = np.asarray(expit(self.decision_function(X)))
        return np.stack([1.0 - chances_N, chances_N], axis=1)

    def predict(self, X: Rows) -> NDArray[Any]:
        """Labels 0 or 1 of the logistic loss, scores of the squared one."""
        scores_N = self.decision_function(X)
        return (scores_N > 0).astype(np.int64) if self.loss == "logistic" else scores_N

    def score(self, X: Rows, y: Any, sample_weight: Any = None) -> float:
        """Accuracy of the logistic loss, R^2 of the squared one. No noise: for public rows."""
        labels_N, found_N = numbers(y, "y"), self.predict(X)
        if labels_N.shape != found_N.shape:
            raise Refused("Expected a label for each row, found others. Give y as one column.")
        if self.loss == "logistic":
            if not np.isin(labels_N, self.classes_).all():
                raise Refused(
                    "Expected labels 0 and 1 of the logistic loss, found others. Recode them, for "
                    'fit too, or use loss="squared".'
                )
            return float(np.average(found_N == labels_N, weights=sample_weight))
        middle = np.average(labels_N, weights=sample_weight)
        left = float(np.average((labels_N - found_N) ** 2, weights=sample_weight))
        spread = float(np.average((labels_N - middle) ** 2, weights=sample_weight))
        if spread == 0.0:  # all labels alike: as scikit-learn has it
            return float(left == 0.0)
        return 1.0 - left / spread

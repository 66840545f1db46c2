"""Losses of a linear model, by score: convex, with slopes and curvatures that are bounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import expit

from lightning_dpsparse.estimators.rows import Array

LossName = Literal["logistic", "squared"]

# N examples


@dataclass(frozen=True)
class Loss:
    """f(score, label). An example's gradient is its slope times its row, as sparse as the row."""

    name: LossName
    max_residual: float
    """Of the squared loss, which is linear beyond (Huber's): else no gradient is bounded."""

    @property
    def max_slope(self) -> float:
        return 1.0 if self.name == "logistic" else self.max_residual

    @property
    def max_curvature(self) -> float:
        return 0.25 if self.name == "logistic" else 1.0

    def slopes(self, scores_N: Array, labels_N: Array) -> Array:
        """df / dscore: at most `max_slope` in size."""
        if self.name == "logistic":
            return np.asarray(expit(scores_N)) - labels_N
        return np.clip(scores_N - labels_N, -self.max_residual, self.max_residual)

    def values(self, scores_N: Array, labels_N: Array) -> Array:
        if self.name == "logistic":
            return np.logaddexp(0.0, scores_N) - labels_N * scores_N
        residuals_N = scores_N - labels_N
        inside_N = np.clip(residuals_N, -self.max_residual, self.max_residual)
        values_N: Array = inside_N * (residuals_N - inside_N / 2.0)
        return values_N

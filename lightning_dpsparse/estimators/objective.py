"""Losses of a linear model as functions of its score.

They are convex, and their slopes and curvatures are bounded: the bound on the slope bounds the
gradient of an example, and both bounds together bound how far an example moves the minimum
(`output.py`).
"""

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
    """A loss f(score, label). The gradient of an example is the slope of f times its row."""

    name: LossName
    max_residual: float
    """Residual beyond which the squared loss is linear (Huber's loss), which bounds gradients."""

    @property
    def max_slope(self) -> float:
        """Bound on the first derivative of the loss with respect to the score."""
        return 1.0 if self.name == "logistic" else self.max_residual

    @property
    def max_curvature(self) -> float:
        """Bound on the second derivative of the loss with respect to the score."""
        return 0.25 if self.name == "logistic" else 1.0

    def slopes(self, scores_N: Array, labels_N: Array) -> Array:
        """Derivative of the loss with respect to the score. Its size is at most `max_slope`."""
        if self.name == "logistic":
            return np.asarray(expit(scores_N)) - labels_N
        return np.clip(scores_N - labels_N, -self.max_residual, self.max_residual)

    def values(self, scores_N: Array, labels_N: Array) -> Array:
        """The loss of every example."""
        if self.name == "logistic":
            return np.logaddexp(0.0, scores_N) - labels_N * scores_N
        residuals_N = scores_N - labels_N
        inside_N = np.clip(residuals_N, -self.max_residual, self.max_residual)
        values_N: Array = inside_N * (residuals_N - inside_N / 2.0)
        return values_N

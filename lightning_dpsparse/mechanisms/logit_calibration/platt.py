"""The line that maps a model's logits to calibrated ones, fitted to noisy counts.

Platt (1999): p = sigmoid(slope * logit + bias), by maximum likelihood. With w examples of a bin at
logit c, n of them clicks, the likelihood is largest where

    sum (n - w p) = 0   and   sum c (n - w p) = 0.

Both sums are linear in the counts, so that noise of mean zero leaves them right on average. (To
leave out single bins that look like noise would not: those that stay have too much of it.) Only the
outer bins are left out, from both ends up to where counts begin to stand out. The sums fall with
bias and slope, and their roots are found by halving intervals, which cannot fail. All of this is
post-processing of counts that were released.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# S slices, L labels (2), K bins, T tasks

Floats = NDArray[np.float64]

SLOPES = (0.25, 4.0)
"""Least and largest slope. A model that needs another one has not learned."""
BIASES = (-10.0, 10.0)
"""Least and largest bias."""
_CLEAR = 3.0
"""Standard deviations by which outer bins, added up, must stand out of their noise to be used."""
_LARGEST_ERROR = 0.1
"""Largest standard error of a slope, or of a slice's bias, that is used."""
_LARGEST_ERROR_OF_BIAS = 0.25
"""Largest standard error of the bias: a factor of 1.3 in clicks."""
_HALVINGS = 60


@dataclass(frozen=True)
class LogitMap:
    """What a calibration found: logit -> slope * logit + bias + bias of the slice."""

    slope: float = 1.0
    bias: float = 0.0
    slice_biases: tuple[float, ...] = ()

    @property
    def is_identity(self) -> bool:
        """Whether it changes nothing: noise drowned the counts."""
        return self.slope == 1.0 and self.bias == 0.0 and not any(self.slice_biases)


def fit_line(
    noisy_SLK: Floats, centres_K: Floats, stddev: float, *, fit_slope: bool = True
) -> LogitMap:
    """Fit slope and bias to the counts of all slices, and then a bias to each slice alone.

    `noisy_SLK` are counts by slice, label (no click, click) and bin, `stddev` is their noise. What
    noise leaves too uncertain stays as it is: the slope one, a bias zero.
    """
    together_LK, num_slices = noisy_SLK.sum(0), len(noisy_SLK)
    bins = _Bins.of(together_LK, centres_K, stddev * math.sqrt(num_slices))
    slope, bias = (bins.best_line() if fit_slope else None) or (1.0, bins.best_bias(1.0))
    if bias is None:
        return LogitMap(slice_biases=(0.0,) * (num_slices if num_slices > 1 else 0))
    if num_slices == 1:
        return LogitMap(slope, bias)
    moved_K = slope * centres_K + bias
    slices = (_Bins.of(noisy_LK, moved_K, stddev) for noisy_LK in noisy_SLK)
    return LogitMap(slope, bias, tuple(one.best_bias(1.0, _LARGEST_ERROR) or 0.0 for one in slices))


def fit_tasks(
    noisy_TLK: Floats, centres_K: Floats, stddev: float, *, fit_slope: bool = True
) -> tuple[LogitMap, ...]:
    """Fit each task's line to its own counts. `stddev` is the noise on each count."""
    return tuple(
        fit_line(noisy_LK[None], centres_K, stddev, fit_slope=fit_slope) for noisy_LK in noisy_TLK
    )


@dataclass(frozen=True)
class _Bins:
    """The bins between which examples stand out of their noise: logits, examples and clicks."""

    logit_K: Floats
    examples_K: Floats
    clicks_K: Floats
    stddev: float
    """Standard deviation of the noise on the examples of either label."""

    @classmethod
    def of(cls, noisy_LK: Floats, logit_K: Floats, stddev: float) -> _Bins:
        examples_K = noisy_LK.sum(0)
        used = slice(_outer(examples_K, stddev), len(examples_K) - _outer(examples_K[::-1], stddev))
        return cls(logit_K[used], examples_K[used], noisy_LK[1][used], stddev)

    def best_bias(self, slope: float, most_error: float = _LARGEST_ERROR_OF_BIAS) -> float | None:
        """The best bias for this slope; None if it is too uncertain."""
        if not self.examples_K.size:
            return None
        bias = _root(lambda b: float(self._missing_K(slope, b).sum()), *BIASES)
        ones_K = np.ones_like(self.logit_K)[None]
        return bias if self._errors(slope, bias, ones_K)[0] <= most_error else None

    def best_line(self) -> tuple[float, float] | None:
        """The best slope and bias; None if they are too uncertain."""
        if self.examples_K.size < 2:
            return None

        def bias_of(slope: float) -> float:
            return _root(lambda b: float(self._missing_K(slope, b).sum()), *BIASES)

        def excess(slope: float) -> float:
            return float((self.logit_K * self._missing_K(slope, bias_of(slope))).sum())

        slope = _root(excess, *SLOPES)
        bias = bias_of(slope)
        errors = self._errors(slope, bias, np.stack([self.logit_K, np.ones_like(self.logit_K)]))
        is_clear = errors[0] <= _LARGEST_ERROR and errors[1] <= _LARGEST_ERROR_OF_BIAS
        return (slope, bias) if is_clear else None

    def _missing_K(self, slope: float, bias: float) -> Floats:
        """Clicks that the line does not predict. They fall with the bias."""
        missing: Floats = self.clicks_K - self.examples_K * self._chance_K(slope, bias)
        return missing

    def _chance_K(self, slope: float, bias: float) -> Floats:
        chance: Floats = 0.5 * (1.0 + np.tanh(0.5 * (slope * self.logit_K + bias)))
        return chance

    def _errors(self, slope: float, bias: float, inputs_PK: Floats) -> Floats:
        """Standard errors of what multiplies each input: of the data itself, and of its noise."""
        p_K = self._chance_K(slope, bias)
        variance_K = self.examples_K.clip(0.0) * p_K * (1.0 - p_K)
        noise_K = self.stddev**2 * ((1.0 - p_K) ** 2 + p_K**2)
        information = (inputs_PK * variance_K) @ inputs_PK.T
        score = (inputs_PK * (variance_K + noise_K)) @ inputs_PK.T
        try:
            inverse = np.linalg.inv(information)
        except np.linalg.LinAlgError:
            return np.full(len(inputs_PK), np.inf)
        errors: Floats = np.sqrt(np.abs(np.diag(inverse @ score @ inverse)))
        return np.where(np.isfinite(errors), errors, np.inf)


def _outer(examples_K: Floats, stddev: float) -> int:
    """Number of bins at the beginning that hold no more, added up, than noise may have made."""
    noise_K = stddev * np.sqrt(2.0 * np.arange(1, len(examples_K) + 1))
    clear_K = examples_K.cumsum() > _CLEAR * noise_K
    return int(clear_K.argmax()) if clear_K.any() else len(examples_K)


def _root(falling: Callable[[float], float], low: float, high: float) -> float:
    """Where a falling function is zero; an end of the interval if it is zero nowhere inside."""
    if falling(low) <= 0:
        return low
    if falling(high) >= 0:
        return high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2

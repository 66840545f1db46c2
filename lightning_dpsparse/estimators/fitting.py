"""How a linear model is found: by noisy gradient steps, or by one noisy minimum.

`linear_model.py` checks what the user gave and makes a `Problem` of it: bounded examples and public
numbers. The functions here choose the noise for the budget, fit the weights, and say what was
spent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lightning_dpsparse.accounting.events import DpEvent, composed, not_private
from lightning_dpsparse.estimators.bias_reduced import (
    Levels,
    bias_reduced_mean,
    draw_levels,
    event_of_bias_reduced,
)
from lightning_dpsparse.estimators.calibration import (
    grid_for,
    noise_multiplier_for,
    spent_epsilon,
)
from lightning_dpsparse.estimators.mean import event_of_mean, noisy_mean
from lightning_dpsparse.estimators.objective import Loss
from lightning_dpsparse.estimators.output import (
    BLOCK,
    event_of_output,
    gradient_error,
    l1_sensitivity,
    l2_sensitivity,
    minimise,
    perturbed_minimiser,
    regularisation_for,
)
from lightning_dpsparse.estimators.projection import projected_mean
from lightning_dpsparse.estimators.release import Kind
from lightning_dpsparse.estimators.rows import Array, Rows, sample, scale_rows
from lightning_dpsparse.estimators.sketch import draw_sketch, sketch_size, sketched_mean
from lightning_dpsparse.refused import Refused

Estimate = Callable[[Rows], Array]
"""A private mean of the rows, of which each example has one."""

_SMALL_BATCH = 4  # the small batch of bias_reduced is up to 2^-4 of the examples

# N examples, D columns, the intercept's included


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Bounded examples, and the public numbers that a fit needs."""

    rows_ND: Rows
    labels_N: Array
    loss: Loss
    num_examples: int
    row_norm: float
    max_nonzeros: int
    epsilon: float
    delta: float
    is_noise_secret: bool = True
    """False if the caller gave the generator: who can draw the noise can take it off again."""

    @property
    def lipschitz(self) -> float:
        """The largest l2 norm of an example's gradient."""
        return self.loss.max_slope * self.row_norm

    @property
    def smoothness(self) -> float:
        return self.loss.max_curvature * self.row_norm**2

    @property
    def kind(self) -> Kind:
        return "gaussian" if self.delta > 0 else "laplace"

    def gradients(self, weights_D: Array) -> Rows:
        """The gradient of every example, which is its slope times its row."""
        return scale_rows(self.rows_ND, self.loss.slopes(self.rows_ND @ weights_D, self.labels_N))


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The weights of a model, and what they cost."""

    weights_D: Array
    event: DpEvent
    """The privacy event of the fit; a non-private one if the noise was not secret."""
    epsilon: float
    noise_multiplier: float
    steps: int


@dataclass(frozen=True, kw_only=True)
class Steps:
    """How noisy steps are taken, and what they cost."""

    event_of: Callable[[float], DpEvent]
    """The privacy event of all steps together, for a noise multiplier."""
    estimates: Callable[[float], list[Estimate]]
    """The private mean of every step, for a noise multiplier."""


def fit_by_steps(
    problem: Problem, steps: Steps, *, learning_rate: float, regularisation: float
) -> Fitted:
    """w <- w - eta (private mean of the gradients + lambda w), averaged over the last half."""
    noise_multiplier = noise_multiplier_for(steps.event_of, problem.epsilon, problem.delta)
    estimates = steps.estimates(noise_multiplier)
    weights_D = np.zeros(problem.rows_ND.shape[1])
    total_D, averaged = np.zeros_like(weights_D), range(len(estimates) // 2, len(estimates))
    for step, estimate in enumerate(estimates):
        gradient_D = estimate(problem.gradients(weights_D)) + regularisation * weights_D
        weights_D = weights_D - learning_rate * gradient_D
        if step in averaged:
            total_D += weights_D
    event = steps.event_of(noise_multiplier)
    return _fitted(problem, total_D / len(averaged), event, noise_multiplier, len(estimates))


def equal_steps(
    problem: Problem, estimator: str, count: int, rate: float, noise: np.random.Generator
) -> Steps:
    """Steps by plain, projected or sketched means, with the same kind of release at every step."""
    divisor = rate * problem.num_examples

    def event_of(noise_multiplier: float) -> DpEvent:
        return composed([(event_of_mean(noise_multiplier, kind=problem.kind, rate=rate), count)])

    def estimates(noise_multiplier: float) -> list[Estimate]:
        sketch_MD = None
        if estimator == "sketch":  # one for all steps
            sketch_MD = _sketch(problem, divisor, noise_multiplier, noise)

        def estimate(gradients_ND: Rows) -> Array:
            drawn_N = sample(gradients_ND.shape[0], rate, noise)
            shared: dict[str, Any] = {
                "divisor": divisor,
                "clip_norm": problem.lipschitz,
                "noise_multiplier": noise_multiplier,
                "noise": noise,
            }
            if sketch_MD is not None:
                return sketched_mean(gradients_ND[drawn_N], sketch_MD, **shared)
            if estimator == "projection":
                shared |= {"max_nonzeros": problem.max_nonzeros, "kind": problem.kind}
                return projected_mean(gradients_ND[drawn_N], **shared)
            return noisy_mean(gradients_ND[drawn_N], **shared)

        return [estimate] * count

    return Steps(event_of=event_of, estimates=estimates)


def _sketch(
    problem: Problem, divisor: float, noise_multiplier: float, noise: np.random.Generator
) -> Array:
    """A sketch for the noise of one step; it is refused if it would measure every column."""
    columns = problem.rows_ND.shape[1]
    size = sketch_size(
        num_columns=columns,
        max_nonzeros=problem.max_nonzeros,
        divisor=divisor,
        noise_multiplier=noise_multiplier,
    )
    if size == columns:
        raise Refused(
            f'Expected "sketch" to need fewer measurements than columns, found that {divisor:,.0f} '
            f"examples a step at a noise multiplier of {noise_multiplier:.3g} call for all "
            f'{columns:,}: nothing would be sketched. Use "projection", or "gaussian"; or lower '
            "max_nonzeros if the rows are sparser."
        )
    return draw_sketch(size, columns, noise)


def bias_reduced_steps(problem: Problem, count: int, noise: np.random.Generator) -> Steps:
    """Steps by small random batches, whose levels are drawn before the first step."""
    largest = problem.num_examples.bit_length() - 1
    if largest < 1:
        raise Refused(
            f'Expected two examples or more with "bias_reduced", found {problem.num_examples}. '
            'Use "projection".'
        )
    levels = Levels(
        num_examples=problem.num_examples,
        first=max(0, largest - _SMALL_BATCH),
        last=largest - 1,
        steps=count,
    )

    def estimates(noise_multiplier: float) -> list[Estimate]:
        settings: dict[str, Any] = {
            "clip_norm": problem.lipschitz,
            "max_nonzeros": problem.max_nonzeros,
            "noise_multiplier": noise_multiplier,
            "noise": noise,
        }
        return [
            partial(bias_reduced_mean, level=level, levels=levels, **settings)
            for level in draw_levels(levels, noise)
        ]

    return Steps(event_of=partial(event_of_bias_reduced, levels=levels), estimates=estimates)


def fit_by_output(
    problem: Problem, regularisation: float | None, radius: float, noise: np.random.Generator
) -> Fitted:
    """Release the minimum of the regularised mean loss, with noise."""
    rows_ND, columns, n = problem.rows_ND, problem.rows_ND.shape[1], problem.num_examples
    bounds: dict[str, Any] = {"lipschitz": problem.lipschitz, "num_examples": n}
    sparsity: dict[str, Any] = {
        "max_nonzeros": problem.max_nonzeros,
        "num_columns": columns,
        "smoothness": problem.smoothness,
    }
    penalty = regularisation or regularisation_for(
        radius=radius, epsilon=problem.epsilon, delta=problem.delta, **bounds, **sparsity
    )
    tolerance = 1e-3 * problem.lipschitz / n  # costs two thousandths of the sensitivity
    if problem.kind == "laplace":
        tolerance /= math.sqrt(columns)
    bounds["regularisation"] = penalty
    hidden = gradient_error(
        **bounds, smoothness=problem.smoothness, max_nonzeros=problem.max_nonzeros
    )
    # The solver's norm of D numbers may itself be too small, by D 2^-53.
    bounds["tolerance"] = tolerance * (1.0 + columns * 2.0**-52) + hidden
    sensitivity = (
        l2_sensitivity(**bounds)
        if problem.kind == "gaussian"
        else l1_sensitivity(**bounds, **sparsity)
    )

    blocks = [slice(start, start + BLOCK) for start in range(0, rows_ND.shape[0], BLOCK)]
    parts = [(rows_ND[block].T, block) for block in blocks]  # transposed

    def objective(weights_D: Array) -> tuple[float, Array]:
        scores_N = rows_ND @ weights_D
        value = problem.loss.values(scores_N, problem.labels_N).sum() / n
        slopes_N = problem.loss.slopes(scores_N, problem.labels_N)
        sums = (part_DN @ slopes_N[block] for part_DN, block in parts)
        total_D = sum(sums, np.zeros(columns))
        gradient_D: Array = total_D / n + penalty * weights_D
        return float(value + penalty / 2.0 * (weights_D @ weights_D)), gradient_D

    event_of = partial(event_of_output, kind=problem.kind)
    noise_multiplier = noise_multiplier_for(event_of, problem.epsilon, problem.delta)
    weights_D = perturbed_minimiser(
        minimise(
            objective,
            columns,
            smoothness=problem.smoothness,
            regularisation=penalty,
            tolerance=tolerance,
        ),
        sensitivity=sensitivity,
        radius=radius,
        noise_multiplier=noise_multiplier,
        kind=problem.kind,
        noise=noise,
    )
    return _fitted(problem, weights_D, event_of(noise_multiplier), noise_multiplier, 1)


def _fitted(
    problem: Problem, weights_D: Array, event: DpEvent, noise_multiplier: float, steps: int
) -> Fitted:
    spent = event if problem.is_noise_secret else not_private()
    return Fitted(
        weights_D=weights_D,
        event=spent,
        epsilon=spent_epsilon(spent, problem.delta, grid_for(problem.epsilon)),
        noise_multiplier=noise_multiplier,
        steps=steps,
    )

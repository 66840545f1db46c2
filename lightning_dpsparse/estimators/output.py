"""Output perturbation with an l_inf projection, for convex losses with sparse gradients.

A regularised convex loss has one minimum, and one example moves it only a little. The minimum is
found without noise, released once with noise of that sensitivity, and moved back into a ball. The
sensitivity includes what the solver and float64 leave. `linear_model.py` calls it "output".
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.optimize import minimize

from lightning_dpsparse.accounting.events import DpEvent
from lightning_dpsparse.checks import check_number, is_number
from lightning_dpsparse.estimators.mean import event_of_mean
from lightning_dpsparse.estimators.release import Kind, check_release, release_point
from lightning_dpsparse.estimators.rows import Array
from lightning_dpsparse.estimators.shrinking import nearest_in_l2_ball
from lightning_dpsparse.refused import Refused

# F(x) = 1/n sum_i f_i(x) + lambda/2 ||x||^2 with f_i convex, L-Lipschitz and H-smooth in l2, and
# n a public constant. "Tolerance" bounds ||grad F|| where a solver stopped.

BLOCK = 1 << 16
"""Number of examples whose gradients are added in one block; one long sum would err by more."""


def perturbed_minimiser(
    minimiser_D: Array,
    *,
    sensitivity: float,
    radius: float,
    noise_multiplier: float,
    kind: Kind = "gaussian",
    noise: np.random.Generator | None = None,
) -> Array:
    """argmin ||x - (x* + noise)||_inf over ||x||_2 <= radius, where x* minimises F.

    Noise has the scale noise_multiplier * sensitivity, in l2 (Gaussian) or l1 (Laplace): see
    `l2_sensitivity` and `l1_sensitivity`, to which `release.py` adds what its grid may move. The
    poster's last line leaves the feasible set out; it is
    the ball here, and the projection shrinks all coordinates alike. Dense in the D columns.

    Excess risk, for R = radius and lambda = regularisation_for(...):
    L R (s ln(d) ln(1/delta))^(1/4) / sqrt(epsilon n) for Gaussian noise, and of the order of
    (s ln(d) / (epsilon n))^(1/3) for Laplace noise; 1/sqrt(n) more for the population's risk.
    Reference: the poster, Output Perturbation with l_inf-Projection, and Table 2.
    """
    check_number("sensitivity", sensitivity, above=0)
    if not (is_number(radius) and radius == math.inf):  # which leaves the ball out
        check_number("radius", radius, above=0)
    check_number("noise_multiplier", noise_multiplier, least=0)
    check_release(kind, noise)
    noisy_D = release_point(
        minimiser_D,
        sensitivity=sensitivity,
        noise_multiplier=noise_multiplier,
        kind=kind,
        noise=noise,
    )
    return nearest_in_l2_ball(noisy_D, radius)


def l2_sensitivity(
    *, lipschitz: float, regularisation: float, num_examples: int, tolerance: float
) -> float:
    """L / (lambda n) + 2 tolerance / lambda.

    F is lambda-strongly convex and an example moves its gradient by at most L/n; the same holds
    over any convex set. Either solution is within tolerance / lambda of its minimiser.
    """
    return (lipschitz / num_examples + 2.0 * tolerance) / regularisation


def l1_sensitivity(
    *,
    lipschitz: float,
    regularisation: float,
    num_examples: int,
    tolerance: float,
    smoothness: float,
    max_nonzeros: int,
    num_columns: int,
) -> float:
    """sqrt(s) L / (lambda n) (1 + sqrt(2) H / lambda) + 2 sqrt(d) tolerance / lambda.

    With x and x' the minimisers, over the whole space, with and without an example z:
    lambda (x' - x) = 1/n sum_i (grad f_i(x) - grad f_i(x')) + 1/n grad f_z(x). Each difference has
    2s non-zeros and an l2 norm of at most H ||x - x'||_2 <= H L / (lambda n), and there are at most
    n of them; the last term has s non-zeros and norm L.
    """
    shared = math.sqrt(2.0 * max_nonzeros) * smoothness * lipschitz / regularisation
    own = math.sqrt(max_nonzeros) * lipschitz
    rounding = 2.0 * math.sqrt(num_columns) * tolerance
    return ((shared + own) / num_examples + rounding) / regularisation


def gradient_error(
    *,
    lipschitz: float,
    regularisation: float,
    num_examples: int,
    smoothness: float,
    max_nonzeros: int,
) -> float:
    """The most that float64 changes grad F of a linear model by, in l2, at its minimum.

    2^-52 L (m + (s + 16) (1 + H / lambda)), with m = min(n, B) + n / B for sums over blocks of B.

    Adding up n gradients errs by m 2^-53 times the sum of their norms, which is n L at most. Scores
    are sums of s products with weights of norm L / lambda at most: they err by s 2^-53 of that, and
    slopes by H times as much. Rows may exceed their norms by s 2^-53, since they were clipped in
    float64. The factor of two and the 16 are for all that is smaller.
    Reference: Higham 2002, Accuracy and Stability of Numerical Algorithms, chapters 3 and 4.
    """
    additions = min(num_examples, BLOCK) + num_examples / BLOCK
    products = (max_nonzeros + 16) * (1.0 + smoothness / regularisation)
    return 2.0**-52 * lipschitz * (additions + products)


def regularisation_for(
    *,
    lipschitz: float,
    radius: float,
    num_examples: int,
    num_columns: int,
    max_nonzeros: int,
    epsilon: float,
    delta: float,
    smoothness: float,
) -> float:
    """The lambda whose penalty, lambda R^2, is as large as the risk that the noise adds.

    That is 2 L sqrt(s) ||noise||_inf at most: the projection keeps the l_inf distance to x* below
    twice the noise, and gradients have l1 norms of L sqrt(s). Up to constants,
    Gaussian: lambda R^2 = L^2 sqrt(s ln(d) ln(1/delta)) / (lambda epsilon n), and
    Laplace: lambda R^2 = L^2 s ln(d) (1 + H / lambda) / (lambda epsilon n), by its larger term.
    """
    spread = max_nonzeros * math.log(max(2, num_columns))
    if delta > 0:
        rate = math.sqrt(spread * math.log(1 / delta)) / (epsilon * num_examples)
        return lipschitz / radius * math.sqrt(rate)
    rate = (lipschitz / radius) ** 2 * spread / (epsilon * num_examples)
    return max(math.sqrt(rate), float(math.pow(rate * smoothness, 1 / 3)))


def minimise(
    objective: Callable[[Array], tuple[float, Array]],
    num_columns: int,
    *,
    smoothness: float,
    regularisation: float,
    tolerance: float,
) -> Array:
    """A point where ||grad F||_2 <= tolerance, for the F and grad F that `objective` returns.

    L-BFGS does the work. What it leaves, gradient steps of 1 / (H + lambda) finish: each brings the
    gradient down by a factor of H / (H + lambda), so the bound is met on every data set.
    """
    found = minimize(
        objective,
        np.zeros(num_columns),
        jac=True,
        method="L-BFGS-B",
        options={"gtol": tolerance / math.sqrt(num_columns), "ftol": 0.0, "maxiter": 1_000},
    )
    point_D = np.asarray(found.x, np.float64)
    gradient_D, steepest = objective(point_D)[1], smoothness + regularisation
    most = math.ceil(steepest / regularisation * 60)  # the gradient shrinks by exp(-60)
    for _ in range(most):
        if float(np.linalg.norm(gradient_D)) <= tolerance:
            return point_D
        point_D = point_D - gradient_D / steepest
        gradient_D = objective(point_D)[1]
    raise Refused(
        f"Expected a gradient norm of at most {tolerance:.3g} after {most:,} steps, found rounding "
        "in the way. Raise the regularisation or the tolerance."
    )


def event_of_output(noise_multiplier: float, *, kind: Kind = "gaussian") -> DpEvent:
    """The privacy event of releasing the minimiser once. The steps of the solver cost nothing."""
    return event_of_mean(noise_multiplier, kind=kind)

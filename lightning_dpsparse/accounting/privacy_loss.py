"""From an event to the distribution of its privacy loss, from which epsilon follows.

dp-accounting builds the distributions of most events. Those of Poisson samples, exponential choices
and Gumbel noise are built here: it has none for them, or slower ones. All are rounded up to a grid
(`grid.py`), so that epsilon is never too small.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from dp_accounting.dp_event import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    MixtureOfGaussiansDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    TruncatedSubsampledGaussianDpEvent,
)
from dp_accounting.pld import privacy_loss_distribution as builders
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy.stats import binom

from lightning_dpsparse.accounting.events import ExponentialDpEvent, GumbelDpEvent
from lightning_dpsparse.accounting.grid import (
    Array,
    both_ways,
    check_points,
    from_losses,
    points_after,
)
from lightning_dpsparse.accounting.mixture import mixture_losses, replaced_losses
from lightning_dpsparse.refused import Refused

FINE = 1e-4
"""Distance between losses on the grid for results. Any grid gives an upper bound of epsilon, and a
finer one a tighter bound."""
COARSE = 1e-3
"""Distance between losses on a grid that is ten times quicker, for searches and for epsilon during
training."""


_LEAST_NOISE = 0.1
"""Least noise multiplier of a step on a sample that is computed. With less noise epsilon is in the
hundreds, protects nobody, and takes minutes to compute. It is reported as infinite, which is an
upper bound too."""
_LEAST_OF_USER = 0.036
"""The same where users are protected: the noise over the most that all examples of a user can move
the sum, in the rare case that all are drawn at once."""
_MOST_NOISE = 1e6
"""Noise multiplier beyond which more noise is charged as this much: what it costs is lost in
rounding."""
_LEAST_RATE = 1e-15
"""Sampling rate over the noise multiplier below which it is charged as this much."""
_NEVER_CUT = 1e-100
"""Chance of a cut batch below which none is cut: all runs together come to less than any delta."""
_LARGE = 700.0
"""Largest epsilon of one choice that is computed: float64 holds no larger exponential."""
_FAR = 300.0
"""Loss beyond which one is nothing beside its exponential."""
_MOST_RUNS = 10**9
"""Number of runs beyond which rounding errors, which grow with it, could hide the loss."""
_SLOW = 2.0
"""How much longer dp-accounting takes for a point, about."""
_MANY = 1_000
"""Number of runs from which on losses are composed at all points of the grid."""
_WIDTH = 21.0
"""Distance, in standard deviations, between the lowest and the highest loss that count."""
_LEAST_GAUSSIAN = 0.02
"""Least noise multiplier of all steps together without sampling, which is quicker to compute."""


def losses_of(event: DpEvent, count: int = 1, grid: float = FINE) -> PrivacyLossDistribution | None:
    """The loss of `count` independent runs of the event; None if it has no finite bound."""
    if count == 0 or isinstance(event, NoOpDpEvent):
        return builders.from_privacy_parameters(_nothing(), value_discretization_interval=grid)
    if isinstance(event, SelfComposedDpEvent):
        return losses_of(event.event, event.count * count, grid)
    if isinstance(event, ComposedDpEvent):
        return compose([losses_of(one, count, grid) for one in event.events], grid)
    if isinstance(event, GaussianDpEvent) and event.noise_multiplier:
        # The sum of Gaussian losses is the loss of one Gaussian, exactly: nothing is convolved.
        deviation = _bounded(event.noise_multiplier) / math.sqrt(count)
        if deviation < _LEAST_GAUSSIAN:
            return None
        check_points(_SLOW * _WIDTH / deviation / grid)
        with np.errstate(all="ignore"):
            return builders.from_gaussian_mechanism(deviation, value_discretization_interval=grid)
    with np.errstate(all="ignore"):  # far tails are rounded to zero, or to infinity
        once = _losses_once(event, grid)
    if once is None or count == 1:
        return once
    if count > _MOST_RUNS:
        return None
    for pmf in (once._pmf_remove, once._pmf_add):
        check_points(points_after(pmf, count))
    if count > _MANY:  # dp-accounting would go through them one by one if there are few losses
        once = PrivacyLossDistribution(
            once._pmf_remove.to_dense_pmf(), once._pmf_add.to_dense_pmf()
        )
    return once.self_compose(count)


def compose(
    parts: list[PrivacyLossDistribution | None], grid: float = FINE
) -> PrivacyLossDistribution | None:
    """The loss of mechanisms that are run one after the other, each with noise of its own."""
    total = losses_of(NoOpDpEvent(), grid=grid)
    for part in parts:
        if part is None or total is None:
            return None
        check_points(total._pmf_remove.size + part._pmf_remove.size)
        total = total.compose(part)
    return total


def _losses_once(event: DpEvent, grid: float) -> PrivacyLossDistribution | None:
    if isinstance(event, (NonPrivateDpEvent, GaussianDpEvent)):  # of no noise: see above
        return None
    if isinstance(event, (GumbelDpEvent, ExponentialDpEvent)) and event.epsilon > _LARGE:
        return None
    if isinstance(event, LaplaceDpEvent) and event.noise_multiplier * _LARGE < 1.0:
        return None
    if isinstance(event, GumbelDpEvent):
        return _gumbel(event.epsilon, grid)
    if isinstance(event, ExponentialDpEvent):
        return _exponential(event.epsilon, grid)
    if isinstance(event, TruncatedSubsampledGaussianDpEvent):
        if event.noise_multiplier < _LEAST_NOISE:
            return None
        if event.sampling_probability == 0:
            return losses_of(NoOpDpEvent(), grid=grid)
        return _truncated(event, grid)
    if isinstance(event, MixtureOfGaussiansDpEvent):
        furthest = max(event.sensitivities)
        if event.standard_deviation < _LEAST_OF_USER * furthest:
            return None
        deviation = min(event.standard_deviation, _MOST_NOISE * furthest)
        return mixture_losses(deviation, event.sensitivities, event.sampling_probs, grid)
    if isinstance(event, LaplaceDpEvent):
        check_points(2.0 / event.noise_multiplier / grid)
        return builders.from_laplace_mechanism(
            event.noise_multiplier, value_discretization_interval=grid
        )
    if isinstance(event, PoissonSampledDpEvent):
        inner, rate = event.event, event.sampling_probability
        if rate == 1:
            return losses_of(inner, grid=grid)
        if isinstance(inner, GaussianDpEvent) and inner.noise_multiplier:
            if inner.noise_multiplier < _LEAST_NOISE:
                return None
            noise = _bounded(inner.noise_multiplier)
            rate = max(rate, noise * _LEAST_RATE)
            return mixture_losses(noise, (0.0, 1.0), (1.0 - rate, rate), grid)
        whole = losses_of(inner, grid=grid)
        return None if whole is None else poisson_subsampled(whole, rate)
    raise Refused(
        f"Expected an event with a known loss, found {type(event).__name__}. Take the ledger of a "
        "run of this version."
    )


def _truncated(event: TruncatedSubsampledGaussianDpEvent, grid: float) -> PrivacyLossDistribution:
    """The loss of a Poisson sample of which at most `truncated_batch_size` units are kept.

    Where nothing is cut, a unit adds itself. Where something is, it also takes another's place,
    which moves the sum by up to twice the clip norm. Reference: section 4.3 of dp-accounting's
    notes on privacy loss distributions; its own builder goes point by point in Python.
    """
    noise, kept = _bounded(event.noise_multiplier), event.truncated_batch_size
    rate = max(event.sampling_probability, noise * _LEAST_RATE)
    added = mixture_losses(noise, (0.0, 1.0), (1.0 - rate, rate), grid)
    cut = float(binom.sf(kept - 1, event.dataset_size - 1, rate))  # if the unit was drawn
    if kept >= event.dataset_size or cut < _NEVER_CUT:
        return added
    drawn = float(binom.sf(kept, event.dataset_size, rate)) * kept / cut / event.dataset_size
    return replaced_losses(noise / 2.0, drawn, grid).compute_mixture(added, cut)


def _bounded(noise_multiplier: float) -> float:
    return min(float(noise_multiplier), _MOST_NOISE)


def _nothing() -> Any:
    from dp_accounting.pld.common import DifferentialPrivacyParameters

    return DifferentialPrivacyParameters(0.0, 0.0)


def poisson_subsampled(whole: PrivacyLossDistribution, rate: float) -> PrivacyLossDistribution:
    """The loss of any mechanism on a Poisson sample of the units, from its loss on all of them.

    With A the output's density with the unit and B without: the sampled mechanism has
    M = (1 - q) B + q A against B when the unit is removed, and B against M when it is added.
    Dominating pairs stay dominating under this (Zhu, Dong and Wang 2022, arXiv:2106.08567), so a
    pessimistic loss in gives a pessimistic loss out.
    """
    grid = float(whole._pmf_remove._discretization)

    loss, with_unit, never = _table(whole._pmf_remove)
    without_unit = with_unit * np.exp(-loss)
    without_unit[0] += 1.0 - float(without_unit.sum())  # the mass of all losses below the first
    mixed = (1.0 - rate) * without_unit + rate * with_unit
    # log(1 - q + q e^l), in a form that does not overflow where l is large.
    large = loss + np.log(rate + (1.0 - rate) * np.exp(-np.maximum(loss, 0.0)))
    sampled = np.where(loss > _FAR, large, np.log1p(rate * np.expm1(np.minimum(loss, _FAR))))
    remove = from_losses(sampled, mixed, rate * never, grid)

    loss, mass, never = _table(whole._pmf_add)
    shrunk: Array = -np.log1p(rate * np.expm1(-loss))
    # An output that is impossible with the unit stays possible: the sample may leave the unit out.
    add = from_losses(np.append(shrunk, -np.log1p(-rate)), np.append(mass, never), 0.0, grid)
    return PrivacyLossDistribution(remove, add)


_ROUNDING = 1e-10
"""Probabilities below this are rounding errors of differences that were divided by the grid."""


def _table(pmf: Any) -> tuple[Array, Array, float]:
    """Losses, their probabilities, and the probability of an infinite one.

    The lowest losses, where exp(-loss) would enlarge rounding errors, are moved to a higher one,
    which can only overstate epsilon.
    """
    dense = pmf.to_dense_pmf()
    probabilities = np.array(dense._probs, dtype=np.float64)
    cut = int(np.argmax(probabilities > _ROUNDING))
    probabilities[cut] += probabilities[:cut].sum()
    steps = dense._lower_loss + np.arange(probabilities.size)
    infinite = float(dense._infinity_mass)
    losses: Array = steps[cut:] * float(dense._discretization)
    return losses, probabilities[cut:], infinite


def _gumbel(epsilon: float, grid: float) -> PrivacyLossDistribution:
    """Loss -e + (exp(e) - 1) E with E ~ Exp(1) under P, and Exp with mean exp(-e) under Q."""
    furthest = 45.0  # E exceeds this with a probability below 1e-19
    check_points(math.exp(epsilon) * furthest / grid)
    first = math.floor(-epsilon / grid)
    last = math.ceil((math.expm1(epsilon) * furthest - epsilon) / grid)
    at = np.arange(first, last + 1) * grid
    x = np.maximum(0.0, (at + epsilon) / math.expm1(epsilon))
    p, q = np.exp(-x), np.exp(-x * math.exp(epsilon))
    return both_ways(first, -np.diff(p), -np.diff(q), float(p[-1]), float(q[-1]), grid)


def _exponential(epsilon: float, grid: float) -> PrivacyLossDistribution:
    """The worst of all pairs whose losses lie in an interval of length e.

    For each t in [0, e] the worst pair with losses in [t - e, t] takes only these two values, and
    the largest delta over all t is delta(x) = (exp(e/2) - exp(x/2))^2 / (exp(e) - 1) for |x| <= e.
    That is the curve of a pair with P(loss > x) = (A - sqrt(A a)) / (A - 1) under P and
    (sqrt(A / a) - 1) / (A - 1) under Q, where A = exp(e), a = exp(x): it dominates them all.
    Reference for the two values: Dong, Durfee and Rogers 2020 (arXiv:1909.13830).
    """
    check_points(2.0 * epsilon / grid)
    first, last = math.floor(-epsilon / grid), math.ceil(epsilon / grid)
    x = np.clip(np.arange(first, last + 1) * grid, -epsilon, epsilon)
    p = -np.exp(epsilon) * np.expm1((x - epsilon) / 2) / math.expm1(epsilon)
    q = np.expm1((epsilon - x) / 2) / math.expm1(epsilon)
    return both_ways(first, -np.diff(p), -np.diff(q), float(p[-1]), float(q[-1]), grid)

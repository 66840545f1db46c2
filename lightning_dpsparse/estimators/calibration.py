"""The noise that a budget needs, and the budget that noise has spent.

Where delta is positive this is the package's accounting by privacy losses. Where delta is zero
(pure differential privacy) only Laplace noise has a finite cost, which is computed in closed form
here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from lightning_dpsparse.accounting.calibration import calibrate, epsilon_of
from lightning_dpsparse.accounting.events import (
    ComposedDpEvent,
    DpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from lightning_dpsparse.accounting.privacy_loss import FINE, LaplaceDpEvent
from lightning_dpsparse.checks import check_kind, check_number


def spent_epsilon(event: DpEvent, delta: float, grid: float = FINE) -> float:
    """The epsilon of an event at this delta, by privacy losses or, at 0, in closed form."""
    check_kind("event", event, DpEvent, remedy="The functions event_of_... make one.")
    check_number("delta", delta, least=0, below=1)
    return pure_epsilon(event) if delta == 0 else epsilon_of([(event, 1)], delta, grid)


def noise_multiplier_for(
    event_of: Callable[[float], DpEvent], epsilon: float, delta: float
) -> float:
    """The least noise multiplier, to 1e-4, whose event costs at most epsilon at delta.

    >>> from lightning_dpsparse.estimators.mean import event_of_mean
    >>> round(noise_multiplier_for(event_of_mean, epsilon=1.0, delta=1e-6), 2)
    4.22
    """
    remedy = "State the budget that the people in the data were promised."
    expected = "epsilon > 0 and 0 <= delta < 1"
    check_number("epsilon", epsilon, above=0, expected=expected, remedy=remedy)
    check_number("delta", delta, least=0, below=1, expected=expected, remedy=remedy)

    def cost(noise_multiplier: float, grid: float) -> float:
        return spent_epsilon(event_of(noise_multiplier), delta, max(grid, grid_for(epsilon)))

    return calibrate(cost, epsilon, grid=FINE if delta == 0 else grid_for(epsilon))


def grid_for(epsilon: float) -> float:
    """Spacing of the grid of privacy losses for this epsilon.

    It is coarser for an epsilon in the hundreds, which would take a minute otherwise. Every grid
    gives an upper bound.
    """
    return max(FINE, 2e-5 * epsilon)


def pure_epsilon(event: DpEvent) -> float:
    """The epsilon at delta zero, summed over releases. It is infinite for all but Laplace noise.

    What costs x on all examples costs ln(1 - q + q e^x) on a Poisson sample of rate q.
    """
    if isinstance(event, LaplaceDpEvent) and event.noise_multiplier:
        return 1.0 / float(event.noise_multiplier)
    if isinstance(event, SelfComposedDpEvent):
        return int(event.count) * pure_epsilon(event.event)
    if isinstance(event, ComposedDpEvent):
        return sum(pure_epsilon(part) for part in event.events)
    if isinstance(event, PoissonSampledDpEvent):
        rate, whole = event.sampling_probability, pure_epsilon(event.event)
        return float(np.logaddexp(math.log1p(-rate), math.log(rate) + whole))
    return math.inf

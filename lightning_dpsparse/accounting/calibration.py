"""From events to epsilon, and from epsilon to noise.

`epsilon_of` adds up the privacy losses of events (`privacy_loss.py`). `calibrate` searches for the
least noise whose epsilon meets a target.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache

import numpy as np
from dp_accounting.dp_event import DpEvent
from dp_accounting.privacy_accountant import UnsupportedEventError
from dp_accounting.rdp import RdpAccountant
from scipy.optimize import brentq

from lightning_dpsparse.accounting.grid import TooManyPointsError
from lightning_dpsparse.accounting.privacy_loss import (
    COARSE,
    FINE,
    PrivacyLossDistribution,
    compose,
    losses_of,
)
from lightning_dpsparse.refused import Refused

EventCounts = Sequence[tuple[DpEvent, int]]
"""Events, each with how often it was run."""

_ORDERS = [*range(2, 64), 64, 80, 96, 128, 192, 256, 512, 1024]
"""Orders of the Renyi divergences that the cross-check takes the best of."""
_COARSEST = 10.0
"""Distance between losses on a grid that tells nothing any more."""
TOLERANCE = 1e-4
"""Largest error of a calibrated noise multiplier. It is never on the side of too little noise."""


def epsilon_of(counts: EventCounts, delta: float, grid: float = FINE) -> float:
    """The least epsilon at this delta, rounded up by the grid. It is infinite without privacy.

    Answers are kept: whoever fits twice with one plan does not calibrate its noise twice.
    """
    asked = tuple(counts)
    try:
        hash(asked)
    except TypeError:  # some events hold lists
        return _epsilon_of.__wrapped__(asked, delta, grid)
    return _epsilon_of(asked, delta, grid)


@lru_cache(maxsize=4096)
def _epsilon_of(counts: tuple[tuple[DpEvent, int], ...], delta: float, grid: float) -> float:
    total = _total_losses(counts, grid)
    return math.inf if total is None else _epsilon_at(total, delta)


def _total_losses(counts: EventCounts, grid: float) -> PrivacyLossDistribution | None:
    """The loss of all events together; None if it has no finite bound.

    Where the grid would have too many points, a coarser one is taken: epsilon is then in the
    hundreds, and the bound is looser.
    """
    while grid < _COARSEST:
        try:
            return compose([losses_of(event, count, grid) for event, count in counts], grid)
        except TooManyPointsError:
            grid *= 8.0
    return None


def epsilons_of(counts: EventCounts, deltas: Sequence[float]) -> list[float]:
    """The least epsilon at each of several deltas."""
    total = _total_losses(counts, FINE)
    if total is None:
        return [math.inf] * len(deltas)
    return [_epsilon_at(total, delta) for delta in deltas]


def _epsilon_at(total: PrivacyLossDistribution, delta: float) -> float:
    with np.errstate(all="ignore"):  # far tails are rounded to zero
        return max(0.0, float(total.get_epsilon_for_delta(delta)))


def rdp_epsilon_of(counts: EventCounts, delta: float) -> float | None:
    """Epsilon by Renyi divergences: a looser bound, by independent code, as a cross-check.

    None if the accountant does not know some event, or cannot compute it.
    """
    accountant = RdpAccountant(_ORDERS)
    try:
        with _quiet():
            for event, count in counts:
                accountant.compose(event, count)
            return float(accountant.get_epsilon(delta))
    except (UnsupportedEventError, ArithmeticError, ValueError):  # some numbers are too extreme
        return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what the accountant says of rounding errors, a line for each of its orders."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def default_delta(num_units: int) -> float:
    """1 / (10 N), rounded down to a power of ten.

    >>> default_delta(1_000_000), default_delta(45_840_617)
    (1e-07, 1e-09)
    """
    return float(f"1e{-math.ceil(math.log10(10 * num_units) - 1e-12)}")


def check_delta(delta: float, num_units: int) -> None:
    """Refuse a delta that a mechanism without any privacy meets.

    A mechanism that publishes one unit, chosen at random, is (0, 1/N)-differentially private.
    """
    if delta * num_units >= 1.0:
        raise Refused(
            f"Expected delta below 1 / {num_units:,} (the number of units), found {delta:g}: at "
            "that delta somebody's data may be published as it is. Use "
            f"{default_delta(num_units):g}, or leave delta out."
        )


def delta_warning(delta: float, num_units: int | None) -> str | None:
    """A warning for a delta that is large; None if it is small enough."""
    if num_units is None or delta * 10 * num_units <= 1.0 + 1e-9:
        return None
    if delta * num_units >= 1.0:
        return (
            f"delta={delta:g} is not below 1 / {num_units:,}: somebody's data may be published as "
            f"it is, and training refuses it. {default_delta(num_units):g} is the default."
        )
    return (
        f"delta={delta:g} is more than a tenth of 1 / {num_units:,}: the chance that something "
        f"goes wrong for somebody is {delta * num_units:.0%}. {default_delta(num_units):g} is the "
        "default."
    )


def calibrate(
    cost: Callable[[float, float], float],
    epsilon: float,
    tolerance: float = TOLERANCE,
    grid: float = FINE,
) -> float:
    """The least noise multiplier, to `tolerance`, with cost(noise multiplier, grid) <= epsilon.

    The search begins on the coarse grid. There epsilon comes out too large, and so does the noise:
    the search on the fine grid starts just below.
    """

    @cache
    def excess(noise: float, grid: float) -> float:
        return min(cost(noise, grid) - epsilon, 1e9)

    low, high = _bracket(lambda noise: excess(noise, COARSE), 0.25, 2.0)
    rough = float(brentq(excess, low, high, args=(COARSE,), xtol=10 * tolerance))
    if grid >= COARSE:
        noise = rough
    else:
        low, high = _bracket(lambda noise: excess(noise, grid), rough * 0.985, rough * 1.005)
        noise = float(brentq(excess, low, high, args=(grid,), xtol=tolerance / 2))
    while excess(noise, grid) > 0:  # the root found may lie half a tolerance below the true one
        noise += tolerance / 2
    return noise


def most_steps(costs_at_most: Callable[[int], bool], planned: int | None) -> int:
    """The largest number of steps, up to `planned`, that costs at most what it may.

    More steps must never cost less.
    """
    if planned is not None and costs_at_most(planned):
        return planned
    if not costs_at_most(0):
        return 0
    low, high = 0, 1
    if planned is None:
        while costs_at_most(high):
            low, high = high, high * 2
    else:
        high = planned
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if costs_at_most(middle) else (low, middle)
    return low


def _bracket(excess: Callable[[float], float], low: float, high: float) -> tuple[float, float]:
    """Two noise multipliers, one with too little noise and one with enough."""
    while excess(high) > 0:
        low, high = high, high * 1.5
        if high > 1e6:
            raise Refused(
                "Expected a budget that some noise can meet, found none below a noise multiplier "
                "of a million. Take fewer steps, or a larger epsilon or delta."
            )
    while excess(low) <= 0:
        low, high = low / 1.5, low
        if low < 1e-3:
            raise Refused(
                "Expected a budget that needs noise, found one that the least noise meets. Take a "
                "smaller epsilon."
            )
    return low, high

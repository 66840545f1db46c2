"""A lower bound on epsilon from one run's guesses (Steinke, Nasr, Jagielski 2023).

Each of m canaries was put into the data by a fair coin of its own. An attacker who sees what the
run released guesses some of the coins. If the run is (epsilon, delta)-differentially private, the
number of right guesses is hardly larger than that of as many coins with bias e^eps / (1 + e^eps):
too many right guesses disprove the claim. Reference: arXiv:2305.08846, Theorem 5.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from lightning_dpsparse.checks import check_number, shown
from lightning_dpsparse.refused import Refused

CONFIDENCE = 0.95
GUESSED = (0.001, 0.003, 0.01, 0.1, 1.0)
"""Shares of the canaries that the attacker guesses, surest first. They are fixed before any run."""

_MOST_EPSILON = 60.0
"""The search for the bound ends here."""

# M canaries


def p_value(
    epsilon: float, delta: float, *, num_canaries: int, num_guesses: int, num_right: int
) -> float:
    """Largest probability of so many right guesses that any (epsilon, delta)-DP run allows.

    P(W >= v) <= f(v) + 2 m delta max_i (f(v - i) - f(v)) / i, with f(v) = P(Binomial(r, q) >= v)
    and q = e^eps / (1 + e^eps).

    >>> p_value(0.0, 0.0, num_canaries=10, num_guesses=3, num_right=3)
    0.125
    """
    check_number("epsilon", epsilon, least=0)
    check_number("delta", delta, least=0, below=1)
    if not 0 <= num_right <= num_guesses <= num_canaries:
        raise Refused(
            "Expected no more right guesses than guesses, and no more guesses than canaries, found "
            f"{shown(num_right)}, {shown(num_guesses)} and {shown(num_canaries)}. Count them again."
        )
    if num_guesses == 0:
        return 1.0
    q = 1.0 / (1.0 + math.exp(-epsilon))
    tail = float(binom.sf(num_right - 1, num_guesses, q))
    if delta > 0 and num_right > 0:
        # f(v - i) - f(v) is the sum of the i probabilities below v.
        below = np.cumsum(binom.pmf(np.arange(num_right - 1, -1, -1), num_guesses, q))
        slack = float((below / np.arange(1, num_right + 1)).max())
        tail += 2.0 * num_canaries * delta * slack
    return min(1.0, tail)


def lower_bound(
    delta: float, confidence: float, *, num_canaries: int, num_guesses: int, num_right: int
) -> float:
    """The largest epsilon that so many right guesses rule out; it is 0 if they rule out none.

    >>> bound = lower_bound(1e-6, 0.95, num_canaries=1000, num_guesses=100, num_right=100)
    >>> round(bound, 2)
    3.49
    """

    check_number("confidence", confidence, above=0, below=1, remedy="The default is 0.95.")

    def is_ruled_out(epsilon: float) -> bool:
        found = p_value(
            epsilon,
            delta,
            num_canaries=num_canaries,
            num_guesses=num_guesses,
            num_right=num_right,
        )
        return found <= 1.0 - confidence

    if not is_ruled_out(0.0):
        return 0.0
    low, high = 0.0, _MOST_EPSILON
    for _ in range(50):  # halves the interval to far below the digits that anybody reads
        middle = (low + high) / 2
        low, high = (middle, high) if is_ruled_out(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class Measured:
    """What an audit found: a lower bound on epsilon, with the confidence that was asked for."""

    epsilon: float
    attack: str
    num_guesses: int
    num_right: int


def measure(
    scores: Mapping[str, NDArray[np.float64]],
    is_included_M: NDArray[np.bool_],
    delta: float,
    confidence: float = CONFIDENCE,
    guessed: Sequence[float] = GUESSED,
) -> Measured:
    """The largest lower bound that several attacks give.

    `scores` has a number for each canary and attack; a high one says that the canary was in the
    data. An attack guesses that the canaries with the highest scores were in and those with the
    lowest were out, and keeps silent on the rest.

    Guarantees: the bound holds with the confidence given for all attacks and numbers of guesses
    together (each gets its share of the error), so the best may be picked.
    """
    check_number("confidence", confidence, above=0, below=1, remedy="The default is 0.95.")
    check_number("delta", delta, least=0, below=1)
    num_canaries = len(is_included_M)
    for attack, score_M in scores.items():
        if len(score_M) != num_canaries or np.isnan(score_M).any():
            raise Refused(
                f"Expected a score of every canary for {attack!r}, found another number of them, "
                "or some that are no numbers. Give each canary one."
            )
    counts = sorted({2 * round(share * num_canaries / 2) for share in guessed} - {0})
    tries = len(scores) * len(counts)
    best = Measured(0.0, "", 0, 0)
    for attack, score_M in scores.items():
        order_M = np.argsort(score_M, kind="stable")
        for count in counts:
            half = count // 2
            right = int(is_included_M[order_M[-half:]].sum())
            right += int((~is_included_M[order_M[:half]]).sum())
            epsilon = lower_bound(
                delta,
                1.0 - (1.0 - confidence) / tries,
                num_canaries=num_canaries,
                num_guesses=2 * half,
                num_right=right,
            )
            if epsilon > best.epsilon or not best.attack:
                best = Measured(epsilon, attack, 2 * half, right)
    return best

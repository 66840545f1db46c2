"""The one-run bound: exact where it can be worked out, valid where epsilon is known."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

from lightning_dpsparse.audit.bound import lower_bound, measure, p_value


@pytest.mark.parametrize("epsilon", [0.0, 0.7, 2.0])
def test_without_delta_it_is_randomised_response(epsilon: float) -> None:
    """Of five coins, each guessed right with probability e^eps / (1 + e^eps): all cases counted."""
    q = math.exp(epsilon) / (1 + math.exp(epsilon))
    for right in range(6):
        exact = sum(
            math.prod(q if hit else 1 - q for hit in hits)
            for hits in product([True, False], repeat=5)
            if sum(hits) >= right
        )
        found = p_value(epsilon, 0.0, num_canaries=9, num_guesses=5, num_right=right)
        assert found == pytest.approx(exact, rel=1e-12)


def test_delta_adds_the_steepest_chord() -> None:
    """f(v) + 2 m delta max_i (f(v - i) - f(v)) / i, term by term."""
    m, r, v, delta, epsilon = 40, 12, 10, 1e-3, 0.4
    q = 1 / (1 + math.exp(-epsilon))

    def tail(v: int) -> float:
        return sum(math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(max(v, 0), r + 1))

    chords = [(tail(v - i) - tail(v)) / i for i in range(1, m + 1)]
    exact = tail(v) + 2 * m * delta * max(chords)
    found = p_value(epsilon, delta, num_canaries=m, num_guesses=r, num_right=v)
    assert found == pytest.approx(exact, rel=1e-9)


def test_the_bound_is_where_the_p_value_crosses() -> None:
    settings = {"num_canaries": 500, "num_guesses": 200, "num_right": 170}
    found = lower_bound(1e-6, 0.95, **settings)
    assert p_value(found, 1e-6, **settings) == pytest.approx(0.05, abs=1e-6)
    assert lower_bound(1e-6, 0.95, num_canaries=500, num_guesses=200, num_right=100) == 0.0
    assert lower_bound(1e-6, 0.95, num_canaries=500, num_guesses=0, num_right=0) == 0.0


def test_randomised_response_is_hardly_ever_accused() -> None:
    """Tight and pure: the bound is above the truth in at most 5% of 400 runs, up to three sigma."""
    draws, epsilon, m = np.random.default_rng(1), 1.0, 300
    q = 1 / (1 + math.exp(-epsilon))
    accused, bounds = 0, []
    for _ in range(400):
        is_in = draws.random(m) < 0.5
        answer = np.where(draws.random(m) < q, is_in, ~is_in)
        found = measure({"answer": answer.astype(float)}, is_in, 0.0, guessed=(1.0,))
        accused += found.epsilon > epsilon
        bounds.append(found.epsilon)
    assert accused <= 400 * 0.05 + 3 * math.sqrt(400 * 0.05 * 0.95)
    assert np.mean(bounds) > 0.6 * epsilon  # and it is not idle


@pytest.mark.parametrize(
    ("lie", "is_caught"), [pytest.param(1.0, False, marks=pytest.mark.slow), (2.0, True)]
)
def test_half_the_noise_is_found_on_gaussian_scores(lie: float, is_caught: bool) -> None:
    """What the white-box audit sees: the claim is for mu = 0.3, the scores have lie * mu."""
    mu, delta, m = 0.3, 1e-6, 100_000
    claim = from_gaussian_mechanism(1 / mu).get_epsilon_for_delta(delta)
    draws = np.random.default_rng(2)
    for _ in range(5):
        is_in = draws.random(m) < 0.5
        scores = {name: is_in * mu * lie + draws.normal(size=m) for name in ("down", "moved")}
        assert (measure(scores, is_in, delta).epsilon > claim) is is_caught


def test_guesses_are_counted_from_both_ends() -> None:
    is_in = np.array([True] * 50 + [False] * 50)
    found = measure({"exact": is_in * 1.0}, is_in, 0.0, guessed=(1.0,))
    assert (found.num_guesses, found.num_right, found.attack) == (100, 100, "exact")
    assert found.epsilon == lower_bound(0.0, 0.95, num_canaries=100, num_guesses=100, num_right=100)
    backwards = measure({"wrong": is_in * -1.0}, is_in, 0.0, guessed=(1.0,))
    assert (backwards.num_right, backwards.epsilon) == (0, 0.0)


def test_many_attacks_pay_for_being_many() -> None:
    is_in = np.array([True] * 50 + [False] * 50)
    one = measure({"a": is_in * 1.0}, is_in, 0.0, guessed=(1.0,)).epsilon
    three = measure(dict.fromkeys("abc", is_in * 1.0), is_in, 0.0, guessed=(1.0,)).epsilon
    assert three == lower_bound(0.0, 1 - 0.05 / 3, num_canaries=100, num_guesses=100, num_right=100)
    assert three < one

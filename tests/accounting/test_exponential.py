"""Choices by the exponential mechanism: what they cost, alone, composed, and on a sample."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import permutations, product

import numpy as np
import pytest
from dp_accounting.dp_event import DpEvent, PoissonSampledDpEvent
from dp_accounting.pld import privacy_loss_distribution as builders
from dp_accounting.pld.common import DifferentialPrivacyParameters
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from lightning_dpsparse.accounting import events
from lightning_dpsparse.accounting.calibration import epsilon_of
from lightning_dpsparse.accounting.grid import Array
from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.accounting.privacy_loss import COARSE, FINE, losses_of
from lightning_dpsparse.engine.step_inputs import Table
from lightning_dpsparse.mechanisms.adafest import AdaFEST
from lightning_dpsparse.mechanisms.exponential import ExponentialSelection
from lightning_dpsparse.mechanisms.selection import GumbelHistogram
from lightning_dpsparse.plan import PrivacyPlan
from lightning_dpsparse.run_plan import resolve
from lightning_dpsparse.sampling.poisson import Phase

RATE, STEPS, DELTA = 1024 / 1e6, 10_000, 1e-6  # the "1M reference": noise .7931 for epsilon 1
RANGES = [0.03, 0.5, 2.0]
ROUNDING = 1e-12  # of sums of at most a few thousand numbers below one


def losses(epsilon: float, count: int = 1, grid: float = FINE) -> PrivacyLossDistribution:
    found = losses_of(events.exponential(epsilon), count, grid)
    assert found is not None
    return found


def step_event(plan: PrivacyPlan, phase: Phase) -> DpEvent:
    """What one step costs, sampling included."""
    (charge,) = resolve(plan, [phase], phase.count, phase.rate * phase.count, 1).charges(0, 1)
    return charge.event


def exact(epsilon: float, x: float) -> float:
    return (math.exp(epsilon / 2) - math.exp(x / 2)) ** 2 / math.expm1(epsilon)


def two_valued(ranges: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Losses and probabilities of independent pairs, each with loss t - e or t.

    P(t) = (exp(e) - exp(t)) / (exp(e) - 1): what makes Q add up to one.
    """
    total, chance = [], []
    for picks in product((0, 1), repeat=len(ranges)):
        loss, p = 0.0, 1.0
        for is_upper, (e, t) in zip(picks, ranges):
            upper = (math.exp(e) - math.exp(t)) / math.expm1(e)
            loss += t if is_upper else t - e
            p *= upper if is_upper else 1.0 - upper
        total.append(loss)
        chance.append(p)
    return total, chance


def deltas_of(total: Sequence[float], chance: Sequence[float], x_X: Array) -> Array:
    """delta(x) = E[max(0, 1 - exp(x - loss))], exactly."""
    excess_XN = np.maximum(0.0, -np.expm1(x_X[:, None] - np.asarray(total)))
    found: Array = excess_XN @ np.asarray(chance)
    return found


def charged(found: PrivacyLossDistribution, x_X: Array) -> Array:
    return np.asarray(found.get_delta_for_epsilon(x_X.tolist()))


@pytest.mark.parametrize("epsilon", RANGES)
@pytest.mark.parametrize("way", ["_pmf_remove", "_pmf_add"])
def test_the_loss_is_the_formula_and_never_below(epsilon: float, way: str) -> None:
    """Both ways: with a = exp(x), 1 - a + a delta(-x) = delta(x)."""
    found = getattr(losses(epsilon), way)
    for x in [*np.linspace(-epsilon, epsilon, 41), epsilon * math.sqrt(0.5)]:
        delta = found.get_delta_for_epsilon(float(x))
        assert delta >= exact(epsilon, float(x)) - ROUNDING
        # A chord over one interval of the grid lies above the curve by at most h^2 / 8 times its
        # second derivative in exp(x), which is below one for |x| <= 2 once multiplied by exp(2x):
        # h = FINE, and the ends of the range may fall between two points, where h counts once.
        assert delta <= exact(epsilon, float(x)) + 2 * FINE**2 / math.expm1(epsilon)
    assert found.get_delta_for_epsilon(epsilon + FINE) <= ROUNDING


@pytest.mark.parametrize("epsilon", RANGES)
@pytest.mark.parametrize("k", [1, 2, 9])
def test_it_dominates_every_two_valued_pair(epsilon: float, k: int) -> None:
    x_X = np.linspace(0.0, k * epsilon, 23)
    found = charged(losses(epsilon, k, COARSE), x_X)
    for t in np.linspace(0.0, epsilon, 11):
        upper = (math.exp(epsilon) - math.exp(t)) / math.expm1(epsilon)
        total = [k * float(t) - (k - j) * epsilon for j in range(k + 1)]
        chance = [math.comb(k, j) * upper**j * (1 - upper) ** (k - j) for j in range(k + 1)]
        assert (found >= deltas_of(total, chance, x_X) - ROUNDING).all()


def test_it_dominates_pairs_of_different_kinds() -> None:
    generator = np.random.default_rng(0)
    x_X = np.linspace(0.0, 2.8, 29)
    found = charged(losses(0.7, 4, COARSE), x_X)
    for _ in range(50):
        pair = two_valued([(0.7, float(t)) for t in generator.uniform(0.0, 0.7, 4)])
        assert (found >= deltas_of(*pair, x_X) - ROUNDING).all()


@pytest.mark.parametrize("epsilon", RANGES)
def test_some_two_valued_pair_reaches_it(epsilon: float) -> None:
    """Domination alone would be met by any loss that is large enough."""
    x_X = np.linspace(-0.9 * epsilon, 0.9 * epsilon, 7)
    pairs = [two_valued([(epsilon, float(t))]) for t in np.linspace(0.0, epsilon, 1001)]
    largest = np.max([deltas_of(*pair, x_X) for pair in pairs], axis=0)
    # The best t lies within epsilon / 2000 of one of these; delta is smooth there.
    assert largest == pytest.approx([exact(epsilon, float(x)) for x in x_X], rel=1e-4)


def peeled(score: Array, scale: float, k: int) -> dict[tuple[int, ...], float]:
    """P(the k rows that are chosen, one after the other), the exponential mechanism each time."""
    weight = np.exp(scale * score)
    chances = {}
    for order in permutations(range(len(score)), k):
        p, left = 1.0, float(weight.sum())
        for row in order:
            p, left = p * weight[row] / left, left - weight[row]
        chances[order] = float(p)
    return chances


def largest_excess(range_of_choice: float, scale: float, k: int) -> float:
    """The most that top-k selection exceeds the charged delta, over neighbouring score vectors."""
    generator, worst = np.random.default_rng(1), -1.0
    x_X = np.linspace(0.0, 1.2 * range_of_choice * k, 13)
    covered = charged(losses(range_of_choice, k, COARSE), x_X)
    moves = [np.eye(1, 4, 0)[0], np.array([1.0, 1.0, 0.0, 0.0])]
    cases = [(np.zeros(4), move) for move in moves]
    cases += [(generator.uniform(0, 3, 4), generator.uniform(0, 1, 4)) for _ in range(10)]
    for score, move in cases:
        pairs = [peeled(score, scale, k), peeled(score + move, scale, k)]
        for one, other in (pairs, pairs[::-1]):
            total = [math.log(one[order] / other[order]) for order in one]
            delta = deltas_of(total, list(one.values()), x_X)
            worst = max(worst, float((delta - covered).max()))
    return worst


@pytest.mark.parametrize(("k", "scale"), [(1, 1.5), (2, 0.4), (3, 1.5)])
def test_it_covers_the_mechanism_itself(k: int, scale: float) -> None:
    """Scores that rise by 0 to 1, all outcomes counted out; half the range would not cover it."""
    assert largest_excess(scale, scale, k) <= ROUNDING
    assert largest_excess(scale / 2, scale, k) > 1e-3


@pytest.mark.parametrize(("epsilon", "k"), [(0.5, 1), (0.3, 20), (0.05, 300)])
def test_it_is_cheaper_than_pure_privacy(epsilon: float, k: int) -> None:
    """Randomized response, with losses of epsilon and -epsilon, is the worst of what is pure."""
    pure = builders.from_privacy_parameters(
        DifferentialPrivacyParameters(epsilon, 0.0), value_discretization_interval=FINE
    ).self_compose(k)
    found = losses(epsilon, k).get_epsilon_for_delta(1e-5)
    assert found < 0.8 * pure.get_epsilon_for_delta(1e-5) or k == 1
    half = losses(epsilon, k).get_delta_for_epsilon(epsilon / 2)
    assert half < pure.get_delta_for_epsilon(epsilon / 2)


def test_choices_survive_as_plain_data_and_in_the_ledger() -> None:
    step = events.poisson(
        0.01, events.composed([(events.exponential(0.25), 16), (events.gaussian(2.0), 1)])
    )
    again = events.event_from_data(json.loads(json.dumps(events.event_to_data(step))))
    assert epsilon_of([(again, 3)], 1e-5, COARSE) == epsilon_of([(step, 3)], 1e-5, COARSE)
    assert events.event_from_data(
        events.event_to_data(events.exponential(0.25))
    ) == events.exponential(0.25)
    ledger = Ledger()
    ledger.charge(step)
    ledger = ledger.copy()
    ledger.charge(again)
    ledger.charge(step)
    assert [entry.count for entry in ledger.entries] == [3]  # equal after the round trip
    assert ledger.epsilon(1e-5, COARSE) == epsilon_of([(step, 3)], 1e-5, COARSE)


def test_choices_are_described_for_people() -> None:
    step = events.poisson(
        0.01, events.composed([(events.exponential(0.25), 16), (events.gaussian(2.0), 1)])
    )
    said = events.describe_event(step)
    assert "16 x choice of range 0.25 and" in said
    assert "Gaussian, noise multiplier 2" in said
    assert said.endswith("on a Poisson sample of rate 0.01")
    assert "without amplification" not in said  # there is some: the sample is right behind
    assert "DpEvent" not in said


def test_selection_and_gradients_of_a_step_are_one_event_on_one_sample() -> None:
    mechanism = ExponentialSelection(num_rows=16, noise_ratio=2.0)
    plan = PrivacyPlan(mechanism=mechanism, noise_multiplier=1.0)
    # sigma1 = 2 sigma2 and sigma1^-2 + sigma2^-2 = 1, by hand.
    first, second = math.sqrt(5.0), math.sqrt(5.0) / 2
    found = step_event(plan, Phase(0, 10_000, 0.01))
    assert isinstance(found, PoissonSampledDpEvent)
    assert found.sampling_probability == 0.01
    choices, noisy_sum = found.event.events
    assert choices.count == 16
    assert choices.event.epsilon == pytest.approx(2.0 / (first * math.sqrt(16)))
    assert noisy_sum.event.noise_multiplier == pytest.approx(second)
    apart = [events.poisson(0.01, part) for part in found.event.events]
    right = epsilon_of([(found, 300)], 1e-5, COARSE)
    assert epsilon_of([(part, 300) for part in apart], 1e-5, COARSE) < 0.95 * right


def test_the_choices_cost_about_what_their_share_of_the_budget_says() -> None:
    """k choices of range 2 / (sigma sqrt(k)) are as many zCDP as a Gaussian of sigma."""
    for k in (64, 1024):
        mechanism = ExponentialSelection(num_rows=k, noise_ratio=1.0)
        share = mechanism.epsilon_per_row(2.0)
        choices = epsilon_of([(events.exponential(share), k)], 1e-5)
        gaussian = epsilon_of([(events.gaussian(2.0 * math.sqrt(2.0)), 1)], 1e-5)
        # The curve that dominates all pairs at once has variance e^2 / 3 against the e^2 / 4 of any
        # one pair, so for many choices it behaves as a Gaussian of sigma sqrt(3 / 4).
        worse = epsilon_of([(events.gaussian(2.0 * math.sqrt(2.0) * math.sqrt(3 / 4)), 1)], 1e-5)
        assert gaussian < choices < 1.05 * worse


@pytest.mark.parametrize(("ratio", "two_samples"), [(1.0, 0.670), (5.0, 0.942)])
def test_the_two_queries_of_adafest_are_one_gaussian_on_one_sample(
    ratio: float, two_samples: float
) -> None:
    mechanism = AdaFEST(threshold=4.0, noise_ratio=ratio)
    plan = PrivacyPlan(mechanism=mechanism, noise_multiplier=0.7931)
    found = step_event(plan, Phase(0, 1_000_000, RATE))
    assert found == events.poisson_gaussian(RATE, 0.7931)
    assert epsilon_of([(found, STEPS)], DELTA) == pytest.approx(1.0, abs=1e-3)
    # What the paper's text would report for the same two noises.
    split = (mechanism.map_stddev(0.7931), mechanism.gradient_noise(0.7931))
    wrong = [(events.poisson_gaussian(RATE, sigma), STEPS) for sigma in split]
    assert epsilon_of(wrong, DELTA) == pytest.approx(two_samples, abs=2e-3)


def test_a_gumbel_histogram_is_charged_for_every_feature() -> None:
    tables = [Table(f"ebc.embedding_bags.t{i}.weight", 10, (f"f{i}",)) for i in range(26)]
    event = GumbelHistogram(epsilon=0.01).event(tables)
    assert event == events.composed([(events.gumbel(0.01), 26)])
    assert epsilon_of([(event, 1)], 1e-6) == pytest.approx(0.248, abs=5e-4)
    doubled = GumbelHistogram(epsilon=0.01, max_ids_of={"f3": 2, "f4": 2}).event(tables)
    assert doubled == events.composed([(events.gumbel(0.01), 28)])

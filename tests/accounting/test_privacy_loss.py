"""Reference values, and agreement with dp-accounting's own builders."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting.dp_event import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld import privacy_loss_distribution as builders

from lightning_dpsparse.accounting import events
from lightning_dpsparse.accounting.calibration import epsilon_of, epsilons_of, rdp_epsilon_of
from lightning_dpsparse.accounting.events import GumbelDpEvent, combined_noise, split_noise
from lightning_dpsparse.accounting.privacy_loss import COARSE, losses_of, poisson_subsampled

RATE, STEPS, DELTA = 1024 / 1e6, 10_000, 1e-6  # the "1M reference": noise .7931 for epsilon 1


# N, B, T, delta and the noise multipliers for epsilon 1, 3 and 8, by dp-accounting's bisection.
REFERENCE = [
    (1e6, 1024, 10_000, 1e-6, (0.7931, 0.6099, 0.4729)),
    (1e6, 1024, 10_000, 1e-7, (0.8376, 0.6436, 0.4923)),
    (45e6, 2048, 21_973, 1 / 45e6, (0.5771, 0.4845, 0.3718)),
    (45e6, 2048, 21_973, 1e-9, (0.6212, 0.5196, 0.3951)),
    (45e6, 2048, 109_863, 1 / 45e6, (0.6012, 0.5037, 0.3908)),
    (45e6, 65_536, 687, 1 / 45e6, (0.8203, 0.6347, 0.4601)),
    (4e9, 65_536, 61_035, 1 / 4e9, (0.5898, 0.5004, 0.3860)),
]


@pytest.mark.parametrize(("size", "batch", "steps", "delta", "noise"), REFERENCE)
@pytest.mark.parametrize("which", range(3))
def test_reference_noise_multipliers(
    size: float, batch: int, steps: int, delta: float, noise: tuple[float, ...], which: int
) -> None:
    target = (1.0, 3.0, 8.0)[which]

    def epsilon(noise_multiplier: float) -> float:
        event = events.poisson_gaussian(batch / size, noise_multiplier)
        return epsilon_of([(event, steps)], delta)

    assert epsilon(noise[which] + 5e-4) <= target < epsilon(noise[which] - 5e-4)


@pytest.mark.parametrize(
    ("k", "expected"), [(1, 0.57), (2, 1.20), (4, 2.56), (8, 5.56), (16, 12.6)]
)
def test_users_with_several_examples(k: int, expected: float) -> None:
    event = events.poisson_examples_of_user(k, RATE, 1.0)
    found = epsilon_of([(event, STEPS)], DELTA)
    assert found == pytest.approx(expected, rel=5e-3)  # three digits


@pytest.mark.parametrize(("most", "expected"), [(1024 + 7 * 32, 0.9999), (1024, 13.42)])
def test_truncated_batches(most: int, expected: float) -> None:
    event = events.truncated_poisson_gaussian(10**6, RATE, most, 0.7931)
    assert epsilon_of([(event, STEPS)], DELTA) == pytest.approx(expected, abs=5e-3)


@pytest.mark.parametrize(
    ("size", "rate", "most", "noise"),
    [
        (10**6, RATE, 1024, 0.7931),
        (10**6, RATE, 1124, 0.5),
        (2_000, 0.9, 1_500, 2.0),
        (2_000, 1.0, 1_999, 0.5),
        (100, 0.01, 1, 2.0),
        (100, 0.01, 100, 2.0),  # nothing is ever cut
    ],
)
def test_truncated_batches_agree_with_dp_accounting(
    size: int, rate: float, most: int, noise: float
) -> None:
    theirs = builders.from_truncated_subsampled_gaussian_mechanism(
        size, rate, most, noise, value_discretization_interval=COARSE
    ).self_compose(10)
    event = events.truncated_poisson_gaussian(size, rate, most, noise)
    ours = losses_of(event, 10, COARSE)
    assert ours is not None
    for delta in (1e-2, 1e-5, 1e-9):
        expected = theirs.get_epsilon_for_delta(delta)
        assert ours.get_epsilon_for_delta(delta) == pytest.approx(expected, rel=2e-5, abs=1e-6)


@pytest.mark.parametrize("most", [2_040, 2_436, 2_439, 2_442])
def test_batches_that_are_all_but_never_cut_cost_as_if_they_were_not(most: int) -> None:
    """Chances from 1e-175 down to numbers that have but a digit left, and zero."""
    cut, whole = (
        losses_of(events.truncated_poisson_gaussian(10**6, RATE, size, 1.0), 10, COARSE)
        for size in (most, 10**6)
    )
    assert cut is not None
    assert whole is not None
    expected = whole.get_epsilon_for_delta(1e-6)
    assert cut.get_epsilon_for_delta(1e-6) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("noise", [0.4, 0.8, 3.0])
@pytest.mark.parametrize(("rate", "steps"), [(0.2, 3), (1e-3, 300), (1e-5, 1)])
def test_sampled_gaussians_agree_with_dp_accounting(noise: float, rate: float, steps: int) -> None:
    event = events.poisson_gaussian(rate, noise)
    theirs = PLDAccountant()
    theirs.compose(event, steps)
    for delta in (1e-5, 1e-9):
        ours = epsilon_of([(event, steps)], delta)
        assert ours == pytest.approx(
            theirs.get_epsilon(delta), rel=2e-5, abs=1e-7
        )  # theirs rounds more


@pytest.mark.parametrize(("noise", "rate"), [(0.8, 1e-3), (2.0, 0.3)])
def test_both_directions_agree_with_dp_accounting(noise: float, rate: float) -> None:
    """Removing a unit is the dearer one here; adding must be right all the same."""
    theirs = builders.from_gaussian_mechanism(noise, sampling_prob=rate)
    ours = losses_of(events.poisson_gaussian(rate, noise))
    whole = losses_of(events.gaussian(noise))
    assert ours is not None
    assert whole is not None
    for found in (ours, poisson_subsampled(whole, rate)):
        for direction in ("_pmf_remove", "_pmf_add"):
            for epsilon in (-rate / 2, 0.0, rate / 2):
                expected = getattr(theirs, direction).get_delta_for_epsilon(epsilon)
                delta = getattr(found, direction).get_delta_for_epsilon(epsilon)
                assert delta == pytest.approx(expected, rel=1e-5), direction


def test_users_agree_with_dp_accounting() -> None:
    event = events.poisson_examples_of_user(3, 0.01, 1.3)
    theirs = builders.from_mixture_gaussian_mechanism(
        1.3, event.sensitivities, event.sampling_probs, value_discretization_interval=COARSE
    ).self_compose(100)
    ours = losses_of(event, 100, COARSE)
    assert ours is not None
    for epsilon in (0.0, 0.5, 2.0):
        expected = theirs.get_delta_for_epsilon(epsilon)
        assert ours.get_delta_for_epsilon(epsilon) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("inner", [GaussianDpEvent(0.7931), LaplaceDpEvent(1.0)])
def test_any_loss_can_be_subsampled(inner: DpEvent) -> None:
    whole = losses_of(inner)
    assert whole is not None
    ours = poisson_subsampled(whole, RATE).self_compose(STEPS)
    theirs = PLDAccountant()
    theirs.compose(PoissonSampledDpEvent(RATE, inner), STEPS)
    expected = theirs.get_epsilon(DELTA)
    assert ours.get_epsilon_for_delta(DELTA) == pytest.approx(expected, rel=1e-4)


def test_subsampling_an_event_without_a_builder_goes_the_same_way() -> None:
    both = ComposedDpEvent([GaussianDpEvent(1.1216), GaussianDpEvent(1.1216)])
    found = epsilon_of([(PoissonSampledDpEvent(RATE, both), STEPS)], DELTA)
    assert found == pytest.approx(1.0, abs=1e-3)  # one sample, two queries: .7931 in all


def test_two_queries_of_one_batch_are_not_two_samples() -> None:
    """Composing two subsampled events, as the AdaFEST paper's text suggests, reports half."""
    wrong = [(events.poisson_gaussian(RATE, 1.1216), 2 * STEPS)]
    right = [(events.poisson_gaussian(RATE, combined_noise(1.1216, 1.1216)), STEPS)]
    assert epsilon_of(right, DELTA) == pytest.approx(1.0, abs=1e-3)
    assert epsilon_of(wrong, DELTA) < 0.75


@pytest.mark.parametrize(
    ("ratio", "first", "second"),
    [(1, 1.1216, 1.1216), (2, 1.7734, 0.8867), (5, 4.044, 0.8088), (10, 7.971, 0.7971)],
)
def test_noise_splits_by_ratio(ratio: float, first: float, second: float) -> None:
    assert split_noise(0.7931, ratio) == pytest.approx((first, second), rel=1e-4)
    assert combined_noise(*split_noise(0.7931, ratio)) == pytest.approx(0.7931)


def test_gumbel_loss_by_monte_carlo() -> None:
    """delta(epsilon) both ways from a million draws of the loss itself."""
    scale, epsilon = 0.5, 0.6
    exponential = np.random.default_rng(0).exponential(size=1_000_000)
    removed = -scale + np.expm1(scale) * exponential
    added = scale + np.expm1(-scale) * exponential
    found = losses_of(GumbelDpEvent(scale))
    assert found is not None
    expected = max(
        np.maximum(0.0, -np.expm1(epsilon - removed)).mean(),
        np.maximum(0.0, -np.expm1(epsilon - added)).mean(),
    )
    deviation = 5 * 0.5 / math.sqrt(exponential.size)
    assert found.get_delta_for_epsilon(epsilon) == pytest.approx(expected, abs=deviation)


def test_gumbel_costs_do_not_grow_with_the_number_released_but_are_not_pure() -> None:
    """26 histograms at 0.01 each: far from 26 x 0.01 x k, and no pure epsilon of 0.26 either."""
    found = epsilon_of([(GumbelDpEvent(0.01), 26)], 1e-6)
    assert found == pytest.approx(0.2478, abs=2e-4)
    assert epsilon_of([(GumbelDpEvent(0.01), 26)], 1e-12) > 0.26


def test_what_is_not_private_is_unbounded() -> None:
    assert epsilon_of([(NonPrivateDpEvent(), 1)], DELTA) == math.inf
    assert epsilon_of([(events.gaussian(1.0), 1), (events.not_private(), 1)], DELTA) == math.inf
    assert epsilons_of([(events.gaussian(0.0), 1)], [1e-5, 1e-6]) == [math.inf, math.inf]
    assert epsilon_of([(events.poisson_gaussian(0.1, 0.0), 1)], DELTA) == math.inf


def test_nothing_costs_nothing() -> None:
    assert epsilon_of([], DELTA) == 0
    assert epsilon_of([(events.gaussian(1.0), 0)], DELTA) == 0


def test_integers_do_not_fool_renyi() -> None:
    """dp-accounting's RDP drops all but the first of nested Gaussians with integer multipliers."""
    both = ComposedDpEvent([events.gaussian(5), SelfComposedDpEvent(events.gaussian(1), 1)])
    one = events.poisson_gaussian(0.01, combined_noise(5.0, 1.0))
    expected = rdp_epsilon_of([(one, 1)], 1e-5)
    assert rdp_epsilon_of([(PoissonSampledDpEvent(0.01, both), 1)], 1e-5) == pytest.approx(expected)


def test_renyi_is_a_looser_bound() -> None:
    charges = [(events.poisson_gaussian(RATE, 0.7931), STEPS)]
    found = rdp_epsilon_of(charges, DELTA)
    assert found is not None
    assert 1.0 < found < 2.0
    assert rdp_epsilon_of([(GumbelDpEvent(1.0), 1)], DELTA) is None


@pytest.mark.parametrize(
    "event",
    [
        events.poisson_gaussian(0.01, 0.8),
        events.gaussian(2.0),
        events.truncated_poisson_gaussian(100, 0.1, 15, 1.0),
        events.poisson_examples_of_user(3, 0.01, 1.0),
        events.not_private(),
        GumbelDpEvent(0.5),
        events.composed([(events.gaussian(2.0), 3), (GumbelDpEvent(0.5), 1)]),
    ],
)
def test_events_survive_as_plain_data(event: DpEvent) -> None:
    import json

    data = json.loads(json.dumps(events.event_to_data(event)))
    again = events.event_from_data(data)
    assert epsilon_of([(again, 2)], 1e-5, COARSE) == epsilon_of([(event, 2)], 1e-5, COARSE)
    assert events.describe_event(again)


def test_only_events_can_be_read_back() -> None:
    with pytest.raises(ValueError, match="Expected an event of dp_accounting, found 'os'"):
        events.event_from_data({"module_name": "os", "class_name": "system"})


@pytest.mark.parametrize(
    "event",
    [
        events.poisson(0.01, GaussianDpEvent(0.01)),
        GaussianDpEvent(0.001),
        SelfComposedDpEvent(GaussianDpEvent(1.0), 10_000),
        events.poisson_examples_of_user(4, 0.01, 0.1),
    ],
    ids=["sampled", "gaussian", "many gaussians", "users"],
)
def test_noise_of_no_use_has_no_bound(event: DpEvent) -> None:
    """Their losses are in the thousands and would fill the memory: infinite is right, and quick."""
    assert epsilon_of([(event, 1)], 1e-6) == math.inf


def test_little_noise_still_has_a_bound() -> None:
    for event in (events.poisson(0.01, GaussianDpEvent(0.11)), GaussianDpEvent(0.1)):
        assert math.isfinite(epsilon_of([(event, 1)], 1e-6, COARSE))


@pytest.mark.parametrize("rate", [5e-324, 1e-300])
def test_a_rate_of_next_to_nothing_costs_next_to_nothing(rate: float) -> None:
    truncated = events.truncated_poisson_gaussian(100, rate, 15, 1.0)
    for event in (truncated, events.poisson(rate, GaussianDpEvent(1.0))):
        assert 0 <= epsilon_of([(event, 3)], 1e-6, COARSE) < 1e-3

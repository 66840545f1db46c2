"""A plan meets its data: noise, delta, and the event of what is run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from lightning_dpsparse.accounting import events
from lightning_dpsparse.accounting.calibration import epsilon_of
from lightning_dpsparse.accounting.charges import Charge
from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.mechanisms.eana import EANA
from lightning_dpsparse.plan import PrivacyPlan, Users
from lightning_dpsparse.run_plan import RunPlan, resolve
from lightning_dpsparse.sampling.poisson import Phase, day_phases

BY_EXAMPLE = Users(max_examples=2, drawn="examples")
ALL = [Phase(0, 1_000_000, 1024 / 1e6)]


def met(plan: PrivacyPlan, steps: int | None = 10_000, **more: Any) -> RunPlan:
    phases = more.pop("phases", ALL)
    return resolve(plan, phases, more.pop("num_units", 1_000_000), 1024.0, steps, **more)


def spent(run: RunPlan, steps: int, first: int = 0) -> Ledger:
    ledger = Ledger()
    run.charge(ledger, first, steps)
    return ledger


def test_noise_is_calibrated_to_the_target() -> None:
    run = met(PrivacyPlan(epsilon=1.0, delta=1e-6), num_units=999_999)
    assert run.noise_multiplier == pytest.approx(0.7931, abs=5e-4)
    assert spent(run, 10_000).epsilon(1e-6) <= 1.0
    assert epsilon_of([(run.event, 1)], 1e-6) == spent(run, 10_000).epsilon(1e-6)


def test_delta_is_chosen_by_the_number_of_units() -> None:
    assert met(PrivacyPlan(noise_multiplier=1.0)).delta == 1e-7
    assert met(PrivacyPlan(noise_multiplier=1.0, delta=1e-8)).delta == 1e-8
    for too_large in (1e-6, 0.05, 0.9):
        with pytest.raises(ValueError, match="Expected delta below 1 / 1,000,000"):
            met(PrivacyPlan(noise_multiplier=1.0, delta=too_large))
    with pytest.raises(ValueError, match="Expected delta, or a data set of known size"):
        met(PrivacyPlan(noise_multiplier=1.0), num_units=None)


def test_a_target_needs_an_end() -> None:
    with pytest.raises(ValueError, match="found training without end"):
        met(PrivacyPlan(epsilon=1.0), steps=None)


def test_events_follow_the_unit() -> None:
    phase = ALL[0]
    plans = {
        PrivacyPlan(noise_multiplier=1.0): events.poisson_gaussian(phase.rate, 1.0),
        PrivacyPlan(noise_multiplier=1.0, max_batch_size=2000): events.truncated_poisson_gaussian(
            1_000_000, phase.rate, 2000, 1.0
        ),
        PrivacyPlan(
            noise_multiplier=1.0, unit=Users(max_examples=3, drawn="examples")
        ): events.poisson_examples_of_user(3, phase.rate, 1.0),
        PrivacyPlan(
            noise_multiplier=1.0, unit=Users(max_examples=3, drawn="users")
        ): events.poisson_gaussian(phase.rate, 1.0),
        PrivacyPlan(noise_multiplier=1.0, sampling="unamplified"): events.gaussian(1.0),
        PrivacyPlan(noise_multiplier=1.0, sampling="fixed_order"): events.gaussian(1.0),
        PrivacyPlan(noise_multiplier=1.0, mechanism=EANA()): events.not_private(),
        PrivacyPlan(noise_multiplier=0.0): events.not_private(),
        PrivacyPlan(noise_multiplier=1.0, fixed_key=1): events.not_private(),
    }
    for plan, event in plans.items():
        assert met(plan).charges(0, 1) == [Charge(event, 1, 1)]


@pytest.mark.parametrize(
    ("first", "steps", "passes"),
    [(0, 1, 1), (0, 10, 1), (0, 11, 2), (3, 7, 0), (3, 8, 1), (10, 1, 1), (10, 20, 2), (9, 12, 2)],
)
def test_fixed_order_costs_a_pass_when_it_begins(first: int, steps: int, passes: int) -> None:
    """From `first` on, in a segment that began with the schedule."""
    run = met(PrivacyPlan(noise_multiplier=1.0, sampling="fixed_order"), steps_per_pass=10)

    def begun(ledger: Ledger) -> int:
        return sum(entry.count for entry in ledger.entries)

    ledger = spent(run, first)
    before = begun(ledger)
    run.extend(ledger, first + steps)
    assert begun(ledger) - before == passes
    assert ledger.steps == first + steps
    one_by_one = spent(run, first)
    for step in range(first, first + steps):
        run.extend(one_by_one, step + 1)
    assert one_by_one.entries == ledger.entries == spent(run, first + steps).entries


def test_a_pass_taken_up_again_costs_like_a_new_one() -> None:
    run = met(PrivacyPlan(noise_multiplier=1.0, sampling="fixed_order"), steps_per_pass=10)
    ledger = spent(run, 10)
    run.charge(ledger, 10, 0)
    assert ledger.entries[0].count == 1  # nothing was broken off
    ledger = spent(run, 4)
    run.charge(ledger, 4, 0)
    assert (ledger.entries[0].count, ledger.steps) == (2, 4)
    run.extend(ledger, 6)
    assert (ledger.entries[0].count, ledger.steps) == (2, 10)
    run.extend(ledger, 7)
    assert (ledger.entries[0].count, ledger.steps) == (3, 11)


def test_days_cost_the_largest_where_units_live_in_one() -> None:
    names = ["day 1", "day 2"]
    bounds = [0, 400_000, 1_000_000]
    plan = PrivacyPlan(noise_multiplier=0.8, by_day=True)
    alone = met(plan, phases=day_phases(bounds, 1024, 10_000, names))
    added = met(plan, phases=day_phases(bounds, 1024, 10_000))
    assert plan.unit_lives_in_one_day
    largest = epsilon_of([(events.poisson_gaussian(1024 / 400_000, 0.8), 4_000)], 1e-7)
    found = spent(alone, 10_000).epsilon(1e-7)
    assert found >= largest
    assert found < spent(added, 10_000).epsilon(1e-7)
    assert [e.count for e in spent(alone, 5_000).entries] == [4_000, 1_000]
    assert [e.count for e in spent(alone, 100, first=3_950).entries] == [50, 50]


def test_users_live_in_one_day_only_if_the_plan_says_so() -> None:
    for in_one_day in (False, True):
        unit = Users(max_examples=2, in_one_day=in_one_day)
        plan = PrivacyPlan(noise_multiplier=1.0, by_day=True, unit=unit)
        assert plan.unit_lives_in_one_day is in_one_day


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "Expected epsilon or noise_multiplier, found neither"),
        ({"epsilon": 0.0}, "Expected epsilon > 0"),
        ({"epsilon": math.inf}, "Expected epsilon > 0"),
        ({"epsilon": 1.0, "delta": 1.5}, "Expected delta between 0 and 1"),
        ({"epsilon": 1.0, "mechanism": EANA()}, "found EANA, which is not differentially private"),
        ({"epsilon": 1.0, "noise_multiplier": 0.0}, "found noise_multiplier=0"),
        ({"epsilon": 1.0, "clip_norm": math.inf}, "Expected a finite clip_norm"),
        ({"noise_multiplier": -1.0}, "Expected noise_multiplier >= 0"),
        ({"noise_multiplier": 1.0, "max_batch_size": 0}, "Expected max_batch_size >= 1"),
        (
            {"noise_multiplier": 1.0, "sampling": "fixed_order", "by_day": True},
            "Expected sampling='poisson' with max_batch_size, by_day or users",
        ),
        (
            {"noise_multiplier": 1.0, "max_batch_size": 9, "unit": BY_EXAMPLE},
            "Expected no max_batch_size where users' examples are drawn one by one",
        ),
    ],
)
def test_plans_that_cannot_be_kept_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrivacyPlan(**settings)


def test_a_fixed_key_cannot_promise() -> None:
    with pytest.raises(ValueError, match="Expected secret noise"):
        met(PrivacyPlan(epsilon=1.0, fixed_key=3))


def test_users_are_drawn_whole_unless_the_plan_says_otherwise() -> None:
    """With less noise for the same epsilon: that is why it is the default."""
    plan = PrivacyPlan(noise_multiplier=1.0, unit=Users(max_examples=16))
    assert plan.draws_whole_users
    whole = spent(met(plan), 10_000).epsilon(1e-6)
    one_by_one = replace(plan, unit=Users(max_examples=16, drawn="examples"))
    apart = spent(met(one_by_one), 10_000).epsilon(1e-6)
    assert whole == pytest.approx(0.57, abs=5e-3)  # of one example, at the same rate
    assert apart == pytest.approx(12.6, rel=5e-3)  # the reference has three digits


def test_a_user_has_examples() -> None:
    with pytest.raises(ValueError, match="Expected max_examples >= 1, found 0"):
        Users(max_examples=0)

"""A calibration is planned from the start, charged before it is made, and never at the cost of
the target."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

from lightning_dpsparse.accounting import events
from lightning_dpsparse.accounting.journal import Journal
from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.budget import Budget, forecast
from lightning_dpsparse.mechanisms.logit_calibration import LogitCalibration
from lightning_dpsparse.plan import PrivacyPlan, Users
from lightning_dpsparse.plugin.run_ledger import _charge_in_vain
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.run_plan import RunPlan, resolve
from lightning_dpsparse.sampling.poisson import Phase
from tests.support.journals import charged_in

PHASES, DELTA = [Phase(0, 10_000, 0.01)], 1e-6
DEAR = LogitCalibration(noise_multiplier=2.0)  # a good part of the budget


@cache
def run_plan(steps: int | None = 200, **settings: Any) -> RunPlan:
    plan = PrivacyPlan(delta=DELTA, **settings)
    return resolve(plan, PHASES, 10_000, 100.0, steps)


def by_dp_accounting(noise: float, steps: int, calibrations: int = 1, sigma: float = 2.0) -> float:
    """Composed by hand, by other code."""
    accountant = PLDAccountant()
    step = dp_event.PoissonSampledDpEvent(0.01, dp_event.GaussianDpEvent(noise))
    if steps:
        accountant.compose(step, steps)
    if calibrations:
        accountant.compose(dp_event.GaussianDpEvent(sigma), calibrations)
    return float(accountant.get_epsilon(DELTA))


def start(run: RunPlan, ledger: Ledger | None = None, folder: Path | None = None) -> Budget:
    ledger = ledger or Ledger()
    journal = Journal(folder, ledger.run) if folder else None
    return Budget(run, ledger, forecast(run, ledger), journal)


# ---- planned -------------------------------------------------------------------------------------


def test_noise_is_calibrated_to_steps_and_calibration_together() -> None:
    run = run_plan(epsilon=3.0, calibration=DEAR)
    assert by_dp_accounting(run.noise_multiplier, 200) == pytest.approx(3.0, abs=5e-3)
    alone = run_plan(epsilon=3.0)
    assert alone.calibration is None
    assert by_dp_accounting(alone.noise_multiplier, 200, 0) == pytest.approx(3.0, abs=5e-3)
    assert run.noise_multiplier > 1.05 * alone.noise_multiplier


@pytest.mark.parametrize("epsilon", [0.5, 3.0, 8.0])
def test_the_default_costs_at_most_one_percent_of_noise(epsilon: float) -> None:
    with_it = run_plan(epsilon=epsilon, calibration=LogitCalibration())
    without = run_plan(epsilon=epsilon)
    assert 1.0 < with_it.noise_multiplier / without.noise_multiplier < 1.01
    sigma = with_it.plan.calibration.noise_multiplier  # type: ignore[union-attr]
    spent = by_dp_accounting(with_it.noise_multiplier, 200, sigma=sigma)  # type: ignore[arg-type]
    assert spent == pytest.approx(epsilon, rel=2e-3)


def test_the_event_of_a_run_holds_its_calibration() -> None:
    run = run_plan(noise_multiplier=1.0, calibration=DEAR)
    accountant = PLDAccountant()
    accountant.compose(run.event)
    assert accountant.get_epsilon(DELTA) == pytest.approx(by_dp_accounting(1.0, 200), abs=5e-3)
    assert run.calibration == events.gaussian(2.0)


def test_a_calibration_that_takes_all_of_the_target_is_named() -> None:
    with pytest.raises(Refused, match=r"noise_multiplier=0.5 takes all of it. Use a larger one"):
        run_plan(epsilon=3.0, calibration=LogitCalibration(noise_multiplier=0.5))


def test_a_fixed_key_makes_the_calibration_not_private() -> None:
    run = run_plan(noise_multiplier=1.0, calibration=DEAR, fixed_key=3)
    assert run.calibration == events.not_private()


def test_the_price_is_the_same_for_users_whose_noise_is_larger() -> None:
    users = Users(max_examples=5, drawn="users")
    run = run_plan(noise_multiplier=1.0, calibration=DEAR, unit=users)
    assert run.calibration == events.gaussian(2.0)
    assert DEAR.stddev(5) == 10.0


# ---- charged -------------------------------------------------------------------------------------


def test_a_calibrated_run_takes_all_its_steps_and_its_calibration() -> None:
    run = run_plan(epsilon=3.0, calibration=DEAR)
    budget = start(run)
    assert budget.remaining == 200
    last = 0.0
    for _ in range(200):
        budget.charge()
        assert last <= budget.epsilon <= 3.0
        last = budget.epsilon
    assert budget.covers_calibration()
    before = budget.exact_epsilon()
    budget.charge_calibration()
    assert before < 0.95 * budget.exact_epsilon()
    assert budget.exact_epsilon() <= 3.0
    assert budget.epsilon >= budget.exact_epsilon()  # what is shown is a bound all the time
    assert [(e.event, e.count, e.steps) for e in budget.ledger.entries] == [
        (events.poisson_gaussian(0.01, run.noise_multiplier), 200, 200),
        (events.gaussian(2.0), 1, 0),
    ]
    assert budget.ledger.steps == 200


def test_steps_end_before_they_use_up_what_the_calibration_needs() -> None:
    """Of a run with noise and a target, which ends when the target is spent."""
    run = run_plan(epsilon=3.0, noise_multiplier=0.6, calibration=DEAR)
    budget = start(run)
    limit = budget.remaining
    assert limit is not None
    assert 0 < limit < (start(run_plan(epsilon=3.0, noise_multiplier=0.6)).remaining or 0)
    for _ in range(limit):
        budget.charge()
    assert budget.covers_calibration()
    budget.charge_calibration()
    assert budget.exact_epsilon() <= 3.0
    assert by_dp_accounting(0.6, limit + 1) > 2.99


def test_the_journal_has_the_charge_when_it_returns(tmp_path: Path) -> None:
    budget = start(run_plan(noise_multiplier=1.0, calibration=DEAR), folder=tmp_path)
    for _ in range(3):
        budget.charge()
    assert events.gaussian(2.0) not in [e.event for e in charged_in(tmp_path).entries]
    budget.charge_calibration()
    found = [(e.event, e.count) for e in charged_in(tmp_path).entries]
    assert (events.gaussian(2.0), 1) in found


def test_steps_after_a_calibration_do_not_take_its_charge_away(tmp_path: Path) -> None:
    run = run_plan(noise_multiplier=1.0, calibration=DEAR)
    budget = start(run, folder=tmp_path)
    budget.charge()
    budget.charge_calibration()
    budget.charge()
    budget.settle()
    for ledger in (budget.ledger, charged_in(tmp_path)):
        counts = {repr(e.event): (e.count, e.steps) for e in ledger.entries}
        assert sorted(counts.values()) == [(1, 0), (2, 2)]
        assert ledger.steps == 2


def test_steps_after_a_calibration_are_in_the_journal_before_they_are_taken(
    tmp_path: Path,
) -> None:
    """The charge for the query takes back what the journal had announced."""
    budget = start(run_plan(noise_multiplier=1.0, calibration=DEAR), folder=tmp_path)
    for taken in range(1, 4):
        budget.charge()
        if taken == 2:
            budget.charge_calibration()
        assert charged_in(tmp_path).steps >= taken


def test_a_second_calibration_of_one_run_is_not_covered() -> None:
    budget = start(run_plan(noise_multiplier=1.0, calibration=DEAR))
    budget.charge()
    assert budget.covers_calibration()
    budget.charge_calibration()
    assert not budget.covers_calibration()


def test_a_run_that_goes_on_reserves_and_pays_for_another_one() -> None:
    run = run_plan(noise_multiplier=1.0, epsilon=6.0, calibration=DEAR)
    budget = start(run)
    for _ in range(100):
        budget.charge()
    budget.charge_calibration()
    ledger = Ledger.from_data(budget.ledger.to_data())
    assert run.prices_like(ledger)  # its last entry is no step
    again = start(run, ledger)
    for _ in range(again.remaining or 0):
        again.charge()
    assert again.covers_calibration()
    again.charge_calibration()
    assert again.exact_epsilon() <= 6.0
    counts = [e.count for e in again.ledger.entries if e.event == events.gaussian(2.0)]
    assert counts == [1, 1]


def test_a_target_that_is_spent_covers_no_calibration() -> None:
    run = run_plan(epsilon=3.0, calibration=DEAR)
    ledger = Ledger()
    run.charge(ledger, 0, 200, to_end=True)
    budget = start(run, ledger)
    assert budget.remaining == 0
    assert not budget.covers_calibration()


def test_a_journal_that_may_lack_a_record_is_charged_for_a_calibration() -> None:
    run, ledger = run_plan(noise_multiplier=1.0, calibration=DEAR), Ledger()
    _charge_in_vain(run, ledger, 4)
    assert [(e.event, e.count) for e in ledger.entries][1:] == [(events.gaussian(2.0), 1)]
    assert ledger.position == 0

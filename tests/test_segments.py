"""A run is priced as a whole: t steps need not cost t times what one step costs.

The mechanism here has the price of noise that is correlated over steps: its first t steps are one
Gaussian event, and the longer the run, the less each further step adds. Budget, ledger, journal and
report must charge exactly that price, in every segment of a run.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from lightning_dpsparse import report
from lightning_dpsparse.accounting import events
from lightning_dpsparse.accounting.calibration import epsilon_of
from lightning_dpsparse.accounting.charges import Charge
from lightning_dpsparse.accounting.events import DpEvent
from lightning_dpsparse.accounting.journal import Journal
from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.accounting.privacy_loss import COARSE
from lightning_dpsparse.budget import WRITE_AHEAD, Budget, BudgetSpentError, forecast
from lightning_dpsparse.engine.mechanism import Mechanism
from lightning_dpsparse.plan import PrivacyPlan
from lightning_dpsparse.report.facts import make_facts
from lightning_dpsparse.run_plan import RunPlan, resolve
from lightning_dpsparse.sampling.poisson import Phase
from lightning_dpsparse.sampling.schedule import Schedule
from tests.support.journals import charged_in

STEPS, DELTA = 400, 1e-6


@dataclass(frozen=True)
class Correlated(Mechanism):
    """Its first t steps are one Gaussian whose sensitivity grows with the logarithm of t."""

    is_private: ClassVar[bool] = True
    threat_model: ClassVar[str] = "The adversary sees every model."

    def charges(
        self, schedule: Schedule, noise_multiplier: float, first_step: int, steps: int
    ) -> list[Charge]:
        assert schedule.planned_steps is not None
        steps = max(0, min(steps, schedule.planned_steps - first_step))
        return [Charge(price(noise_multiplier, steps), steps, 1)] if steps else []


def price(noise_multiplier: float, steps: int) -> DpEvent:
    """gaussian(sigma / sqrt(1 + log t)): that of no number of equal steps."""
    return events.gaussian(noise_multiplier / math.sqrt(1.0 + math.log(steps)))


def planned(steps: int = STEPS, **settings: float) -> RunPlan:
    plan = PrivacyPlan(
        mechanism=Correlated(),
        sampling="fixed_order",
        delta=DELTA,
        **settings,  # type: ignore[arg-type]
    )
    return resolve(plan, [Phase(0, 10_000, 1.0)], 10_000, 25.0, steps, steps_per_pass=STEPS)


def start(run: RunPlan, ledger: Ledger, folder: Path | None = None) -> Budget:
    run.continue_ledger(ledger)
    journal = Journal(folder, ledger.run) if folder else None
    return Budget(run, ledger, forecast(run, ledger), journal)


def held(ledger: Ledger) -> list[tuple[DpEvent, int, int]]:
    return [(entry.event, entry.count, entry.steps) for entry in ledger.entries]


def test_every_further_step_replaces_the_price_of_all() -> None:
    budget = start(planned(noise_multiplier=2.0), Ledger())
    assert held(budget.ledger) == []
    for step in range(50):
        assert budget.charge() == step
        assert held(budget.ledger) == [(price(2.0, step + 1), 1, step + 1)]
        assert budget.ledger.steps == budget.ledger.position == step + 1
    assert budget.exact_epsilon() == epsilon_of([(price(2.0, 50), 1)], DELTA)
    assert budget.exact_epsilon() < epsilon_of([(price(2.0, 1), 50)], DELTA) / 3


def test_noise_is_calibrated_to_the_price_of_the_whole_run() -> None:
    run = planned(epsilon=2.0)
    whole = epsilon_of([(price(run.noise_multiplier, STEPS), 1)], DELTA)
    assert 2.0 - 1e-3 < whole <= 2.0
    assert epsilon_of([(run.event, 1)], DELTA) == whole


def test_the_budget_covers_exactly_the_steps_that_the_target_covers() -> None:
    run = planned(epsilon=2.0, noise_multiplier=5.0)
    budget = start(run, Ledger())
    limit = budget.remaining
    assert limit is not None
    assert 1 < limit < STEPS
    assert epsilon_of([(price(5.0, limit), 1)], DELTA) <= 2.0
    assert epsilon_of([(price(5.0, limit + 1), 1)], DELTA) > 2.0
    for _ in range(limit):
        budget.charge()
        assert budget.exact_epsilon() - 1e-9 <= budget.epsilon <= 2.0
    before = held(budget.ledger)
    with pytest.raises(BudgetSpentError, match=f"found the budget spent after {limit} steps"):
        budget.charge()
    assert held(budget.ledger) == before


def test_a_step_after_the_end_changes_nothing() -> None:
    budget = start(planned(3, noise_multiplier=2.0), Ledger())
    for _ in range(3):
        budget.charge()
    with pytest.raises(BudgetSpentError, match="found step 3 after its end"):
        budget.charge()
    assert held(budget.ledger) == [(price(2.0, 3), 1, 3)]


def test_the_journal_holds_the_price_of_the_steps_ahead(tmp_path: Path) -> None:
    budget = start(planned(noise_multiplier=2.0), Ledger(), tmp_path)
    path = tmp_path / f"{budget.ledger.run}.journal"
    for step in range(40):
        budget.charge()
        ahead = step // WRITE_AHEAD * WRITE_AHEAD + WRITE_AHEAD
        assert held(charged_in(path)) == [(price(2.0, ahead), 1, ahead)]
    budget.close()
    assert charged_in(path) == budget.ledger


def test_a_run_that_goes_on_begins_a_segment_and_leaves_the_earlier_one(tmp_path: Path) -> None:
    run = planned(noise_multiplier=2.0)
    budget = start(run, Ledger(), tmp_path)
    for _ in range(100):
        budget.charge()
    budget.close()
    ledger = Ledger.from_data(json.loads(json.dumps(budget.ledger.to_data())))
    assert run.prices_like(ledger)
    assert not planned(noise_multiplier=3.0).prices_like(ledger)
    again = start(run, ledger)
    assert held(ledger) == [(price(2.0, 100), 1, 100)]
    for step in range(100, 130):
        assert again.charge() == step
        taken = step - 99
        assert held(ledger) == [(price(2.0, 100), 1, 100), (price(2.0, taken), 1, taken)]
    both = [(price(2.0, 100), 1), (price(2.0, 30), 1)]
    assert again.exact_epsilon() == epsilon_of(both, DELTA)
    assert again.exact_epsilon() > epsilon_of([(price(2.0, 130), 1)], DELTA)


def test_segments_of_one_price_are_charged_twice() -> None:
    run = planned(noise_multiplier=2.0)
    ledger = Ledger()
    run.charge(ledger, 0, 10)
    run.charge(ledger, 10, 10)
    assert held(ledger) == [(price(2.0, 10), 2, 20)]
    run.extend(ledger, 9)  # the first one stays as it was
    assert held(ledger) == [(price(2.0, 10), 1, 10), (price(2.0, 9), 1, 9)]


def test_steps_that_were_lost_stay_charged(tmp_path: Path) -> None:
    """A killed run is charged to where its journal was; the next begins where its model is."""
    run = planned(noise_multiplier=2.0)
    budget = start(run, Ledger(), tmp_path)
    for _ in range(20):
        budget.charge()
    ledger = charged_in(tmp_path / f"{budget.ledger.run}.journal")  # as a kill would leave it
    budget.close()
    ledger.lost = ledger.steps - 12  # the checkpoint is of step 12
    again = start(run, ledger)
    assert again.step == ledger.position == 12
    assert again.charge() == 12
    charged = 2 * WRITE_AHEAD
    assert held(ledger) == [(price(2.0, charged), 1, charged), (price(2.0, 1), 1, 1)]
    assert ledger.position == 13


def test_what_was_spent_before_is_counted_against_the_target() -> None:
    run = planned(epsilon=2.0, noise_multiplier=6.5)
    alone = start(run, Ledger()).remaining
    ledger = Ledger()
    run.charge(ledger, 0, 5)
    left = start(run, ledger).remaining
    assert alone is not None
    assert left is not None
    assert 0 < left < alone - 5

    def cost(further: int) -> float:
        return epsilon_of([(price(6.5, 5), 1), (price(6.5, further), 1)], DELTA)

    assert cost(left) <= 2.0 < cost(left + 1)


def test_the_report_prices_every_point_on_the_way() -> None:
    other = PrivacyPlan(sampling="fixed_order", noise_multiplier=9.0, delta=DELTA)
    phases = [Phase(0, 10_000, 1.0)]
    ledger = Ledger()
    resolve(other, phases, 10_000, 25.0, 60, steps_per_pass=20).charge(ledger, 0, 60)
    run = planned(noise_multiplier=6.0)
    run.charge(ledger, 60, 180)
    facts = make_facts(run, ledger, ranks=1)
    passes = events.gaussian(9.0)
    whole = epsilon_of([(passes, 3), (price(6.0, 180), 1)], DELTA)
    assert facts["guarantee"]["epsilon"] == facts["cross_check"]["epsilon"] == whole
    *points, end = facts["epsilon_over_time"]
    assert end == [240, whole]
    assert [n for n, _ in points] == list(range(20, 240, 20))
    for n, epsilon in points:
        charged = [(passes, math.ceil(min(n, 60) / 20))]
        if n > 60:
            charged.append((price(6.0, n - 60), 1))
        assert epsilon == min(whole, epsilon_of(charged, DELTA, COARSE))
    assert [entry["steps"] for entry in facts["ledger"]] == [60, 180]
    assert facts["ledger"][0]["event"].endswith("3 times for all these steps together")
    assert facts["ledger"][1]["event"].endswith("once for all these steps together")
    assert facts["ran"]["steps"] == 240
    assert report.render(facts).startswith("<!DOCTYPE html>")

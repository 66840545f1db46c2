"""Every step is charged before it is taken, on disk too, or refused."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest

from lightning_dpsparse.accounting.journal import Journal
from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.budget import WRITE_AHEAD, Budget, BudgetSpentError, forecast
from lightning_dpsparse.plan import PrivacyPlan
from lightning_dpsparse.run_plan import RunPlan, resolve
from lightning_dpsparse.sampling.poisson import Phase
from tests.support.journals import charged_in

PHASES = [Phase(0, 10_000, 0.01)]


@cache
def run_plan(steps: int | None = 200, **settings: float) -> RunPlan:
    return resolve(PrivacyPlan(**settings), PHASES, 10_000, 100.0, steps)  # type: ignore[arg-type]


def start(run: RunPlan, ledger: Ledger | None = None, folder: Path | None = None) -> Budget:
    ledger = ledger or Ledger()
    journal = Journal(folder, ledger.run) if folder else None
    return Budget(run, ledger, forecast(run, ledger), journal)


def test_a_calibrated_run_takes_all_its_steps_and_not_one_more() -> None:
    run = run_plan(epsilon=2.0)
    budget = start(run)
    for expected in range(200):
        assert budget.charge() == expected
        assert budget.epsilon <= 2.0
    assert budget.remaining == 0
    assert budget.exact_epsilon() <= 2.0
    with pytest.raises(BudgetSpentError, match="found the budget spent after 200 steps"):
        budget.charge()
    assert budget.ledger.steps == 200


def test_noise_and_a_target_end_training_when_it_is_spent() -> None:
    run = run_plan(epsilon=2.0, noise_multiplier=0.6)
    budget = start(run)
    limit = budget.remaining
    assert limit is not None
    assert 0 < limit < 200

    def epsilon(steps: int) -> float:
        ledger = Ledger()
        run.charge(ledger, 0, steps)
        return ledger.epsilon(run.delta)

    assert epsilon(limit) <= 2.0 < epsilon(limit + 1)


def test_epsilon_on_the_way_is_an_upper_bound_that_never_falls() -> None:
    run = run_plan(epsilon=2.0, noise_multiplier=0.6)
    budget = start(run)
    last = 0.0
    for step in range(budget.remaining or 0):
        budget.charge()
        assert budget.epsilon >= last
        if step % 7 == 0:
            assert budget.epsilon >= budget.exact_epsilon() - 1e-9
        last = budget.epsilon
    assert last == budget.exact_epsilon()


def test_asking_for_epsilon_composes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = start(run_plan(epsilon=2.0))
    monkeypatch.setattr(Ledger, "epsilon", None)  # whoever composes, calls this
    for _ in range(100):
        budget.charge()
        assert 0 < budget.epsilon <= 2.0
    with pytest.raises(TypeError):
        budget.exact_epsilon()


def test_without_a_target_there_is_no_limit() -> None:
    budget = start(run_plan(noise_multiplier=1.0, steps=None))
    assert budget.remaining is None
    budget.charge()
    assert 0 < budget.epsilon < math.inf


def test_what_was_spent_before_counts() -> None:
    run = run_plan(epsilon=2.0)
    ledger = Ledger()
    run.charge(ledger, 0, 150)
    ledger.lost = 30  # the model is at step 120
    budget = start(run, ledger)
    assert budget.step == 120
    assert budget.remaining == 50
    heavy = Ledger()
    run_plan(noise_multiplier=0.5).charge(heavy, 0, 200)
    assert start(run, heavy).remaining == 0


def test_the_journal_is_ahead_of_every_step(tmp_path: Path) -> None:
    """A kill at any moment leaves a file that charges for all that may have begun."""
    run = run_plan(epsilon=2.0)
    budget = start(run, folder=tmp_path)
    path = tmp_path / f"{budget.ledger.run}.journal"
    for _ in range(50):
        budget.charge()
        on_disk = charged_in(path)
        assert budget.ledger.steps <= on_disk.steps <= budget.ledger.steps + WRITE_AHEAD
        assert on_disk.epsilon(run.delta, 1e-3) >= budget.ledger.epsilon(run.delta, 1e-3)
    budget.close()
    assert charged_in(path) == budget.ledger


def test_a_step_after_the_schedule_is_refused() -> None:
    phases = [Phase(0, 10_000, 0.01, steps=3)]
    run = resolve(PrivacyPlan(noise_multiplier=1.0), phases, 10_000, 100.0, 10)
    budget = start(run)
    for _ in range(3):
        budget.charge()
    with pytest.raises(BudgetSpentError, match="found step 3 after its end"):
        budget.charge()


def test_a_run_without_privacy_shows_no_epsilon() -> None:
    budget = start(run_plan(noise_multiplier=0.0))
    budget.charge()
    assert budget.epsilon == math.inf
    assert budget.exact_epsilon() == math.inf

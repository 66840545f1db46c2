"""The facts of a report follow from the plan and the ledger."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_dpsparse import report
from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.mechanisms.eana import EANA
from lightning_dpsparse.plan import PrivacyPlan, Users
from lightning_dpsparse.report.facts import make_facts
from lightning_dpsparse.run_plan import RunPlan, resolve
from lightning_dpsparse.sampling.poisson import Phase, day_phases


def ran(plan: PrivacyPlan, steps: int = 100) -> tuple[RunPlan, Ledger]:
    phases = [Phase(0, 10_000, 0.01)]
    if plan.by_day:
        phases = day_phases([0, 4_000, 10_000], 100, steps, ["day 1", "day 2"])
    run = resolve(plan, phases, 10_000, 100.0, steps)
    ledger = Ledger()
    run.charge(ledger, 0, steps)
    return run, ledger


def test_the_guarantee_is_the_ledgers() -> None:
    run, ledger = ran(PrivacyPlan(epsilon=2.0))
    facts = make_facts(run, ledger, ranks=4)
    guarantee = facts["guarantee"]
    assert guarantee["is_private"] is True
    assert guarantee["epsilon"] == ledger.epsilon(run.delta) <= 2.0
    assert guarantee["delta"] == 1e-5
    assert facts["target"] == {"epsilon": 2.0, "delta": 1e-5}
    said = float(guarantee["sentence"].split("(")[1].split(",")[0])
    assert guarantee["epsilon"] <= said <= guarantee["epsilon"] * 1.001
    assert "1e-05)-differentially private" in guarantee["sentence"]
    assert facts["epsilon_over_time"][-1] == [100, guarantee["epsilon"]]
    spent = [epsilon for _, epsilon in facts["epsilon_over_time"]]
    assert spent == sorted(spent)
    assert len(spent) > 8
    by_delta = dict(map(tuple, facts["epsilon_for_delta"]))
    assert by_delta[1e-5] == guarantee["epsilon"]
    assert facts["cross_check"]["rdp_epsilon"] > guarantee["epsilon"]
    assert facts["ran"]["ranks"] == 4
    assert {"torch", "dp-accounting"} <= set(facts["versions"])


@pytest.mark.parametrize(
    "plan",
    [
        PrivacyPlan(noise_multiplier=1.0, mechanism=EANA()),
        PrivacyPlan(noise_multiplier=0.0),
        PrivacyPlan(noise_multiplier=1.0, fixed_key=3),
    ],
)
def test_what_is_not_private_makes_no_promise(plan: PrivacyPlan) -> None:
    facts = make_facts(*ran(plan), ranks=1)
    assert facts["guarantee"]["is_private"] is False
    assert facts["guarantee"]["epsilon"] is None
    assert facts["guarantee"]["faults"]
    assert "not differentially private" in facts["guarantee"]["sentence"]
    assert "NOT PRIVATE" in report.render(facts)


@pytest.mark.parametrize(
    "plan",
    [
        PrivacyPlan(noise_multiplier=1.0),
        PrivacyPlan(noise_multiplier=1.0, unit=Users(max_examples=3)),
        PrivacyPlan(noise_multiplier=1.0, unit=Users(max_examples=3, drawn="examples")),
        PrivacyPlan(noise_multiplier=1.0, by_day=True),
        PrivacyPlan(noise_multiplier=1.0, sampling="unamplified"),
        PrivacyPlan(noise_multiplier=1.0, taints=("a", "b")),
    ],
)
def test_every_plan_can_be_reported(plan: PrivacyPlan) -> None:
    facts = make_facts(*ran(plan, 20), ranks=1, taints=["c"])
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert "c" in facts["taints"]
    assert report.render(facts).startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("unit", "counted"),
    [
        ("example", "examples"),
        (Users(max_examples=3), "users, each with up to 3 examples"),
        (Users(max_examples=3, drawn="examples"), "examples"),
    ],
)
def test_the_report_says_what_the_batch_size_counts(unit: Any, counted: str) -> None:
    facts = make_facts(*ran(PrivacyPlan(noise_multiplier=1.0, unit=unit), 20), ranks=1)
    assert facts["ran"]["batch_counts"] == counted
    assert counted in report.render(facts)


def test_a_run_that_has_not_begun_has_spent_nothing() -> None:
    run, _ = ran(PrivacyPlan(noise_multiplier=1.0))
    facts = make_facts(run, Ledger(), ranks=1)
    assert facts["guarantee"]["epsilon"] == 0
    assert facts["epsilon_over_time"] == []

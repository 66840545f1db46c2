"""Row selection in the schedule of a run: what is charged, when, and to whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_dpsparse.accounting import events
from lightning_dpsparse.accounting.calibration import epsilon_of
from lightning_dpsparse.accounting.journal import Journal
from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.budget import Budget, forecast
from lightning_dpsparse.engine.mechanism import Mechanism
from lightning_dpsparse.engine.step_inputs import Table
from lightning_dpsparse.mechanisms.adafest import AdaFEST
from lightning_dpsparse.mechanisms.exponential import ExponentialSelection
from lightning_dpsparse.mechanisms.fest import FEST, AdaFESTPlus
from lightning_dpsparse.mechanisms.selection import (
    Frequencies,
    GumbelHistogram,
    NoisyHistogram,
    PublicFrequencies,
    Selection,
)
from lightning_dpsparse.plan import PrivacyPlan, Users
from lightning_dpsparse.run_plan import RunPlan, resolve
from lightning_dpsparse.sampling.poisson import Phase, day_phases
from tests.support.journals import charged_in

TABLES = [Table("t0", 100, ("x", "y")), Table("t1", 50, ("z",))]
COUNTED = NoisyHistogram(noise_multiplier=4.0)
RELEASE, STEP = events.gaussian(4.0), events.poisson_gaussian(0.01, 1.0)
DELTA = 1e-5


def fest(frequencies: Frequencies = COUNTED, **settings: Any) -> FEST:
    return FEST(selection=Selection(frequencies=frequencies, rows_per_table=5, **settings))


def met(mechanism: Mechanism, phases: list[Phase] | None = None, **settings: Any) -> RunPlan:
    if "epsilon" not in settings:
        settings.setdefault("noise_multiplier", 1.0)
    plan = PrivacyPlan(mechanism=mechanism, delta=DELTA, **settings)
    phases = phases or [Phase(0, 10_000, 0.01)]
    return resolve(plan, phases, 10_000, 100.0, 60, tables=TABLES)


def entries(run: RunPlan, steps: int = 60, first: int = 0) -> list[tuple[Any, int, str | None]]:
    """Charged all at once; charged one by one it must be the same."""
    ledger, single = Ledger(), Ledger()
    run.charge(ledger, first, steps)
    for step in range(first, first + steps):
        run.charge(single, step, 1)
    assert single.entries == ledger.entries
    assert single.steps == ledger.steps == steps
    return [(e.event, e.count, e.partition) for e in ledger.entries]


def charged(run: RunPlan, steps: int = 60) -> Ledger:
    ledger = Ledger()
    run.charge(ledger, 0, steps)
    return ledger


def test_a_selection_is_charged_once_before_the_first_step() -> None:
    run = met(fest())
    assert run.release == RELEASE
    assert entries(run) == [(RELEASE, 1, None), (STEP, 60, None)]
    assert entries(run, 1) == [(RELEASE, 1, None), (STEP, 1, None)]
    assert entries(run, 20, first=40) == [(STEP, 20, None)]
    assert [step for step in range(60) if run.selects_before(step)] == [0]


def test_epsilon_is_that_of_release_and_steps_together() -> None:
    run = met(fest())
    expected = epsilon_of([(RELEASE, 1), (STEP, 60)], DELTA)
    assert charged(run).epsilon(DELTA) == expected
    assert epsilon_of([(run.event, 1)], DELTA) == pytest.approx(expected, abs=1e-9)
    assert expected > epsilon_of([(STEP, 60)], DELTA) + 0.05


def test_noise_is_calibrated_so_that_both_fit() -> None:
    run = met(fest(), epsilon=1.5)
    assert 1.5 - 5e-3 < charged(run).epsilon(DELTA) <= 1.5
    alone = epsilon_of([(events.poisson_gaussian(0.01, run.noise_multiplier), 60)], DELTA)
    assert alone < 1.4


@pytest.mark.parametrize(
    ("mechanism", "expected"),
    [
        (fest(NoisyHistogram(noise_multiplier=7.0, max_ids_per_bag=9)), events.gaussian(7.0)),
        (
            fest(GumbelHistogram(epsilon=0.01, max_ids_of={"z": 3})),
            events.composed([(events.gumbel(0.01), 1 + 1 + 3)]),
        ),
        (
            AdaFESTPlus(
                selection=Selection(frequencies=COUNTED, rows_in_total=9), false_positives=2.0
            ),
            RELEASE,
        ),
        (fest(PublicFrequencies(path="counts.npz")), None),
        (AdaFEST(threshold=3.0), None),
        (ExponentialSelection(num_rows=3), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_release_costs(mechanism: Mechanism, expected: Any) -> None:
    run = met(mechanism)
    assert run.release == expected
    assert len(entries(run, 3)) == (1 if expected is None else 2)
    assert not run.is_release_renewed


def test_adafest_plus_chooses_its_threshold_among_the_selected_rows() -> None:
    """Two false positives of nine rows are another threshold than two of 150."""
    selection = Selection(frequencies=COUNTED, rows_in_total=9)
    mechanism = AdaFESTPlus(selection=selection, false_positives=2.0)
    settled = met(mechanism).plan.mechanism
    assert isinstance(settled, AdaFESTPlus)
    assert settled.threshold is not None
    wide = met(AdaFEST(false_positives=2.0)).plan.mechanism
    assert isinstance(wide, AdaFEST)
    assert wide.threshold is not None
    assert settled.threshold < 0.6 * wide.threshold


def test_a_fixed_key_charges_a_release_as_not_private() -> None:
    run = met(fest(), fixed_key=3)
    assert run.release == events.not_private()
    assert entries(run)[0] == (events.not_private(), 61, None)


NAMES = ["day 1", "day 2", "day 3"]
BOUNDS = [0, 2_000, 5_000, 10_000]  # 12, 18 and 30 steps of 60


def step_of(size: int) -> Any:
    return events.poisson_gaussian(100 / size, 1.0)


def test_renewed_releases_are_charged_to_their_periods() -> None:
    run = met(fest(renew=True), day_phases(BOUNDS, 100.0, 60, NAMES), by_day=True)
    assert [step for step in range(60) if run.selects_before(step)] == [0, 12, 30]
    assert entries(run) == [
        (RELEASE, 1, "day 1"),
        (step_of(2_000), 12, "day 1"),
        (RELEASE, 1, "day 2"),
        (step_of(3_000), 18, "day 2"),
        (RELEASE, 1, "day 3"),
        (step_of(5_000), 30, "day 3"),
    ]
    assert entries(run, 10, first=25)[1] == (RELEASE, 1, "day 3")
    assert [run.phase(step).name for step in (0, 11, 12, 29, 30, 59)] == [
        name for name in NAMES for _ in range(2)
    ]
    # A unit lives in one day: it was in one release and in that day's steps.
    days = [(2_000, 12), (3_000, 18), (5_000, 30)]
    each = [epsilon_of([(RELEASE, 1), (step_of(n), t)], DELTA) for n, t in days]
    assert charged(run).epsilon(DELTA) == max(each)


def test_renewed_releases_add_up_where_users_live_in_several_days() -> None:
    unit = Users(max_examples=3, drawn="users")
    run = met(fest(renew=True), day_phases(BOUNDS, 100.0, 60), by_day=True, unit=unit)
    steps = [(step_of(2_000), 12), (step_of(3_000), 18), (step_of(5_000), 30)]
    assert charged(run).epsilon(DELTA) == pytest.approx(
        epsilon_of([(RELEASE, 3), *steps], DELTA), abs=2e-4
    )
    assert sum(count for event, count, _ in entries(run) if event == RELEASE) == 3


def test_one_release_over_all_days_is_every_days() -> None:
    """Without renewal all days are counted at once, before the first: nobody is spared."""
    run = met(fest(), day_phases(BOUNDS, 100.0, 60, NAMES), by_day=True)
    found = entries(run)
    assert found[0] == (RELEASE, 1, None)
    assert [event for event, _, _ in found].count(RELEASE) == 1
    worst = [(RELEASE, 1), (step_of(2_000), 12)]
    assert charged(run).epsilon(DELTA) >= epsilon_of(worst, DELTA)


def test_the_journal_holds_the_release_before_the_step_begins(tmp_path: Path) -> None:
    run = met(fest(renew=True), day_phases(BOUNDS, 100.0, 60, NAMES), by_day=True)
    ledger = Ledger()
    budget = Budget(run, ledger, forecast(run, ledger), Journal(tmp_path, ledger.run))
    path = tmp_path / f"{ledger.run}.journal"
    for step in range(31):
        assert budget.charge() == step
        on_disk = charged_in(path)
        paid = {e.partition for e in on_disk.entries if e.event == RELEASE}
        assert paid >= set(NAMES[: 1 + (step >= 12) + (step >= 30)])
        assert sum(e.count for e in ledger.entries if e.event == RELEASE) == len(
            {e.partition for e in ledger.entries}
        )
    budget.close()


GUMBEL = fest(GumbelHistogram())


@pytest.mark.parametrize(
    ("mechanism", "settings", "message"),
    [
        (fest(renew=True), {}, "Expected by_day=True where FEST renews its selection"),
        (fest(), {"sampling": "unamplified"}, "Expected a data set that can be read in order"),
        (GUMBEL, {"unit": Users(max_examples=2)}, "Expected unit='example' with GumbelHistogram"),
        (
            GUMBEL,
            {"unit": Users(max_examples=1, drawn="users")},
            "Expected unit='example' with GumbelHistogram",
        ),
        (
            ExponentialSelection(num_rows=3),
            {"max_batch_size": 20},
            "Expected plain Poisson samples with ExponentialSelection",
        ),
        (
            ExponentialSelection(num_rows=3),
            {"unit": Users(max_examples=2, drawn="examples")},
            "Expected plain Poisson samples with ExponentialSelection",
        ),
        (fest(), {"days_per_period": 2}, "Expected days_per_period >= 1, and by_day with more"),
        (fest(), {"days_per_period": 0, "by_day": True}, "Expected days_per_period >= 1"),
    ],
)
def test_plans_that_cannot_be_accounted_are_refused(
    mechanism: Mechanism, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PrivacyPlan(mechanism=mechanism, noise_multiplier=1.0, **settings)


def test_plans_beside_them_are_not() -> None:
    public = fest(PublicFrequencies(path="counts.npz"))
    PrivacyPlan(mechanism=public, noise_multiplier=1.0, sampling="unamplified")
    PrivacyPlan(mechanism=fest(), noise_multiplier=1.0, max_batch_size=20)
    PrivacyPlan(mechanism=fest(), noise_multiplier=1.0, unit=Users(max_examples=2))
    whole = Users(max_examples=2, drawn="users")
    plan = PrivacyPlan(mechanism=ExponentialSelection(num_rows=3), noise_multiplier=1.0, unit=whole)
    (charge,) = resolve(plan, [Phase(0, 10, 0.5)], 1_000, 5.0, 1).charges(0, 1)
    assert charge.event.sampling_probability == 0.5

"""A plan that met its data and model: the schedule, the noise, and what the steps will cost.

`PrivacyPlan` (`plan.py`) is what the user writes. `resolve` gives it the size of the data, the
number of steps and the tables, and chooses what depends on them: delta, the noise multiplier for
the target epsilon, and the mechanism's thresholds. The result, `RunPlan`, is the one object that
sampler, step, budget, report and calculator ask.

What steps cost is asked in one place, `RunPlan.charges`. The mechanism prices the steps there
(`Mechanism.charges`), and the run adds the releases that select rows by the data. A calibration
after the last step is no part of any step's price: `RunPlan.charge` adds it where a run is priced
to its end, before training, and `Budget.charge_calibration` when it is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from lightning_dpsparse.accounting import events
from lightning_dpsparse.accounting.calibration import (
    calibrate,
    check_delta,
    default_delta,
    epsilon_of,
)
from lightning_dpsparse.accounting.charges import Charge
from lightning_dpsparse.accounting.events import DpEvent
from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.accounting.privacy_loss import FINE
from lightning_dpsparse.engine.step_inputs import Table
from lightning_dpsparse.mechanisms.fest import selection_of
from lightning_dpsparse.plan import PrivacyPlan
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sampling.poisson import Phase
from lightning_dpsparse.sampling.schedule import Schedule


@dataclass(frozen=True)
class RunPlan:
    """A plan that met its data: everything that sampler, step and accountant go by."""

    plan: PrivacyPlan
    """The user's plan, with the mechanism's thresholds chosen. Only this one is asked from now on:
    the plan that the user wrote has served its purpose."""
    phases: tuple[Phase, ...]
    num_units: int | None
    """Number of units that are protected, if it is known. It is taken to be public."""
    expected_batch: float
    delta: float
    noise_multiplier: float
    steps_per_pass: int | None = None
    """In fixed order: number of steps in which the data is read once through."""
    planned_steps: int | None = None
    """Number of steps of the whole run; None is without end."""
    release: DpEvent | None = None
    """What it costs to select rows by the data, before the first step; None is nothing."""
    is_release_renewed: bool = False
    """Whether rows are selected again before every phase, by that phase's data alone."""
    calibration: DpEvent | None = None
    """What it costs to calibrate logits by the data, after the last step; None is nothing."""

    # ---- what steps cost ------------------------------------------------------------------------

    def charges(self, first_step: int, steps: int) -> list[Charge]:
        """What the first `steps` steps of a segment cost that begins at step `first_step`.

        Every selection of rows comes before the step that it is made for.
        """
        found: list[Charge] = []
        position = first_step
        for charge in self._step_charges(first_step, steps):
            found += self._releases(position, charge.steps)
            found.append(charge)
            position += charge.steps
        return found

    def charge(self, ledger: Ledger, first_step: int, steps: int, *, to_end: bool = False) -> None:
        """Charge a new segment of `steps` steps that begins at step `first_step`.

        With `to_end` they are the last, and what is released after the last step is charged too.
        """
        ledger.open_segment(first_step)
        self.extend(ledger, steps)
        if to_end and self.calibration is not None:
            ledger.charge(self.calibration, steps=0)

    def extend(self, ledger: Ledger, steps: int) -> None:
        """Charge the ledger's open segment as one of `steps` steps in all."""
        assert ledger.segment is not None
        ledger.charge_segment(self.charges(ledger.segment.first_step, steps))

    def ledger_after(self, ledger: Ledger, steps: int) -> Ledger:
        """A ledger of this run as it stood after its first so many steps, for the report.

        The open segment is priced exactly, by this plan. Earlier ones may have had other plans: of
        them the entries tell (see `Ledger.first`).
        """
        if ledger.segment is None:
            return ledger.first(steps)
        before = ledger.segment.before
        if steps <= before.steps:
            return before.first(steps)
        earlier = ledger.copy()
        self.extend(earlier, steps - before.steps)
        return earlier

    def prices_like(self, ledger: Ledger) -> bool:
        """Whether this plan may have charged the last entry of a ledger, if there is one."""
        of_steps = [entry for entry in ledger.entries if entry.steps]
        if not of_steps:
            return True
        last = of_steps[-1]
        all_phases = sum(phase.steps or 1 for phase in self.phases)
        alike = [
            *self._step_charges(0, all_phases),
            *self._step_charges(max(0, ledger.position - last.steps), last.steps),
        ]
        return any(charge.event == last.event for charge in alike)

    def _step_charges(self, first_step: int, steps: int) -> list[Charge]:
        """What the mechanism asks for a segment's first steps, if it keeps what it promises."""
        mechanism = self.plan.mechanism
        found = mechanism.charges(self.schedule, self.noise_multiplier, first_step, steps)
        if mechanism.is_private and self.plan.fixed_key is None:
            return found
        return [replace(charge, event=events.not_private()) for charge in found]

    def _releases(self, first_step: int, steps: int) -> list[Charge]:
        """Selections of rows that are made before one of these steps."""
        if self.release is None:
            return []
        return [
            Charge(self.release, 0, 1, self.phase(step).name if self.is_release_renewed else None)
            for step in self._selections
            if first_step <= step < first_step + steps
        ]

    @property
    def event(self) -> DpEvent:
        """The whole run as one event; days are added up one after the other."""
        assert self.planned_steps is not None
        counts = [(c.event, c.times) for c in self.charges(0, self.planned_steps)]
        if self.calibration is not None:
            counts.append((self.calibration, 1))
        return events.composed(counts)

    # ---- the schedule ---------------------------------------------------------------------------

    @cached_property
    def schedule(self) -> Schedule:
        """How the units of each step are drawn."""
        return self.plan.schedule(self.phases, self.steps_per_pass, self.planned_steps)

    def phase(self, step: int) -> Phase:
        """The phase that a step of the schedule belongs to."""
        return self.schedule.phase(step)

    def selects_before(self, step: int) -> bool:
        """Whether rows are selected by the data before this step of the schedule."""
        return step in self._selections

    @cached_property
    def _selections(self) -> list[int]:
        """Steps before which rows are selected by the data, in order."""
        if self.release is None:
            return []
        later = accumulate(phase.steps or 0 for phase in self.phases[:-1])
        return [0, *later] if self.is_release_renewed else [0]

    # ---- going on from an earlier run -----------------------------------------------------------

    @property
    def protects(self) -> str:
        """Whom the charges of this run protect: charges can only be added up for the same."""
        days = [f"{p.first:,} to {p.stop:,}" for p in self.phases if p.name is not None]
        return f"{self.plan.adjacency}{', living in one of ' if days else ''}{'; '.join(days)}"

    def continue_ledger(self, ledger: Ledger) -> None:
        """Before a run begins or goes on: refuse a ledger that protects somebody else."""
        if ledger.protects is not None and ledger.protects != self.protects:
            raise Refused(
                f"Expected to go on protecting {ledger.protects!r}, found a plan that protects "
                f"{self.protects!r}: what was charged before says nothing about it. Keep unit, "
                "sampling and days, or start anew."
            )
        ledger.protects = self.protects


def drew_whole_users(ledger: Ledger) -> bool | None:
    """Whether the last steps that a ledger of users charged drew whole users.

    None if nothing tells: no step was charged, or the last ones were not private.
    """
    taken = [entry.event for entry in ledger.entries if entry.steps]
    if not taken or not events.is_private(taken[-1]):
        return None
    return not events.counts_examples_of_user(taken[-1])


def resolve(
    plan: PrivacyPlan,
    phases: Sequence[Phase],
    num_units: int | None,
    expected_batch: float,
    planned_steps: int | None,
    steps_per_pass: int | None = None,
    tables: Sequence[Table] = (),
    *,
    grid: float = FINE,
    allow_any_delta: bool = False,
) -> RunPlan:
    """Give a plan its data and model: choose delta, and the noise that the target asks for.

    Args:
        plan: What the user wrote.
        phases: Stretches of steps that draw from one range of the units.
        num_units: Number of units that are protected, if it is known.
        expected_batch: What sums are divided by.
        planned_steps: Number of steps of the whole run; None is without end.
        steps_per_pass: In fixed order, number of steps in which the data is read once through.
        tables: What is public about the model's tables, by which thresholds are chosen.
        grid: Grid of losses for the calibration of noise. A coarse one is quicker.
        allow_any_delta: Answer for a delta that protects nobody too, as the calculator does, which
            trains nothing. Training refuses it.
    """
    if plan.delta is None and num_units is None:
        raise Refused(
            "Expected delta, or a data set of known size to choose it by, found neither. Set delta "
            "in the privacy plan."
        )
    delta = plan.delta if plan.delta is not None else default_delta(num_units or 1)
    if not allow_any_delta:
        check_delta(delta, num_units or math.ceil(expected_batch))
    selection = selection_of(plan.mechanism)
    release = None if selection is None else selection.frequencies.event(tables)
    if release is not None and plan.fixed_key is not None:
        release = events.not_private()

    calibration, calibrating = plan.calibration, None
    if calibration is not None:
        calibration = calibration.resolve(plan.epsilon, delta)
        is_secret = plan.fixed_key is None
        calibrating = calibration.event() if is_secret else events.not_private()

    def at(noise_multiplier: float) -> RunPlan:
        mechanism = (
            plan.mechanism.resolve_thresholds(noise_multiplier, tables)
            if tables
            else plan.mechanism
        )
        return RunPlan(
            replace(plan, mechanism=mechanism, calibration=calibration),
            tuple(phases),
            num_units,
            expected_batch,
            delta,
            noise_multiplier,
            steps_per_pass,
            planned_steps,
            release,
            selection is not None and selection.renew,
            calibrating,
        )

    if plan.noise_multiplier is not None:
        return at(plan.noise_multiplier)
    assert plan.epsilon is not None
    if plan.fixed_key is not None:
        raise Refused(
            f"Expected secret noise for epsilon={plan.epsilon}, found fixed_key. Set "
            "noise_multiplier instead."
        )
    if planned_steps is None:
        raise Refused(
            f"Expected a number of steps to calibrate epsilon={plan.epsilon} for, found training "
            "without end. Set max_steps or max_epochs, or noise_multiplier too."
        )

    if calibrating is not None and epsilon_of([(calibrating, 1)], delta) >= plan.epsilon:
        assert calibration is not None
        raise Refused(
            f"Expected a calibration that leaves part of epsilon={plan.epsilon:g} to training, "
            f"found that one with noise_multiplier={calibration.noise_multiplier:g} takes all of "
            "it. Use a larger one in the calibration, or leave it out for 1% of the budget."
        )

    def cost(noise_multiplier: float, grid: float) -> float:
        ledger = Ledger()
        at(noise_multiplier).charge(ledger, 0, planned_steps, to_end=True)
        return ledger.epsilon(delta, grid)

    return at(calibrate(cost, plan.epsilon, grid=grid))

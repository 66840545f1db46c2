"""A plan that met its data and model: the schedule, its events, and the noise that they need."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from lightning_dpsparse.accounting import events
from lightning_dpsparse.accounting.calibration import calibrate, check_delta, default_delta
from lightning_dpsparse.accounting.events import DpEvent
from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.engine.step_inputs import Table
from lightning_dpsparse.mechanisms.fest import selection_of
from lightning_dpsparse.plan import PrivacyPlan
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sampling.poisson import Phase


@dataclass(frozen=True)
class RunPlan:
    """A plan that met its data: everything that sampler, step and accountant go by."""

    plan: PrivacyPlan
    phases: tuple[Phase, ...]
    num_units: int | None
    """How many units are protected, where that is known. Taken to be public."""
    expected_batch: float
    delta: float
    noise_multiplier: float
    steps_per_pass: int | None = None
    """In fixed order, how many steps the data once through takes."""
    planned_steps: int | None = None
    release: DpEvent | None = None
    """What it costs to select rows by the data, before the first step; None is nothing."""
    is_release_renewed: bool = False
    """Whether rows are selected again before every phase, by that phase's data alone."""

    def charge(self, ledger: Ledger, first_step: int, steps: int) -> None:
        """Enter `steps` steps from `first_step` of the schedule on."""
        for event, partition, count, times in self._charges(first_step, steps):
            ledger.charge(event, partition, steps=count, times=times)

    def _charges(
        self, first_step: int, steps: int
    ) -> Iterator[tuple[DpEvent, str | None, int, int]]:
        """Event, part of the data, steps, and how often they cost it."""
        begin, last = 0, first_step + steps
        for phase, event in zip(self.phases, self._events):
            end = last if phase.steps is None else begin + phase.steps
            first, stop = max(begin, first_step), min(end, last)
            if stop > first:
                times = stop - first
                if self.steps_per_pass is not None:  # passes that begin in here
                    times = -(-stop // self.steps_per_pass) + -first // self.steps_per_pass
                if self.release is not None and self.selects_before(first):
                    yield self.release, phase.name if self.is_release_renewed else None, 0, 1
                yield event, phase.name, stop - first, times
            begin = end

    def phase(self, step: int) -> Phase:
        """The phase that a step of the schedule belongs to."""
        for phase in self.phases[:-1]:
            if phase.steps is None or step < phase.steps:
                return phase
            step -= phase.steps
        return self.phases[-1]

    def selects_before(self, step: int) -> bool:
        """Whether rows are selected by the data before this step of the schedule."""
        if self.release is None:
            return False
        later = accumulate(phase.steps or 0 for phase in self.phases[:-1])
        return step == 0 or (self.is_release_renewed and step in later)

    @cached_property
    def _events(self) -> list[DpEvent]:
        return [self.plan.event(phase, self.noise_multiplier) for phase in self.phases]

    @property
    def event(self) -> DpEvent:
        """The whole run, in dp-accounting's terms; days one after the other."""
        assert self.planned_steps is not None
        charged = self._charges(0, self.planned_steps)
        return events.composed([(event, times) for event, _, _, times in charged])

    @property
    def protects(self) -> str:
        """Whom the charges of this run protect: charges can only be added up for the same."""
        days = [f"{p.first:,} to {p.stop:,}" for p in self.phases if p.name is not None]
        return f"{self.plan.adjacency}{', living in one of ' if days else ''}{'; '.join(days)}"

    def continue_ledger(self, ledger: Ledger) -> None:
        """Before a run begins or goes on.

        A pass in fixed order that was broken off costs like a new one. A ledger that protects
        somebody else is refused.
        """
        if ledger.protects is not None and ledger.protects != self.protects:
            raise Refused(
                f"Expected to go on protecting {ledger.protects!r}, found a plan that protects "
                f"{self.protects!r}: what was charged before says nothing about it. Keep unit, "
                "sampling and days, or start anew."
            )
        ledger.protects = self.protects
        if self.steps_per_pass and (ledger.steps - ledger.lost) % self.steps_per_pass:
            ledger.charge(self._events[0], self.phases[0].name, steps=0)


def resolve(
    plan: PrivacyPlan,
    phases: list[Phase],
    num_units: int | None,
    expected_batch: float,
    planned_steps: int | None,
    steps_per_pass: int | None = None,
    tables: Sequence[Table] = (),
) -> RunPlan:
    """Give a plan its data and model: choose delta, and the noise that the target asks for."""
    if plan.delta is None and num_units is None:
        raise Refused(
            "Expected delta, or a data set of known size to choose it by, found neither. Set delta "
            "in the privacy plan."
        )
    delta = plan.delta if plan.delta is not None else default_delta(num_units or 1)
    check_delta(delta, num_units or math.ceil(expected_batch))
    selection = selection_of(plan.mechanism)
    release = None if selection is None else selection.frequencies.event(tables)
    if release is not None and plan.fixed_key is not None:
        release = events.not_private()

    def at(noise_multiplier: float) -> RunPlan:
        mechanism = (
            plan.mechanism.resolve_thresholds(noise_multiplier, tables)
            if tables
            else plan.mechanism
        )
        return RunPlan(
            replace(plan, mechanism=mechanism),
            tuple(phases),
            num_units,
            expected_batch,
            delta,
            noise_multiplier,
            steps_per_pass,
            planned_steps,
            release,
            selection is not None and selection.renew,
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

    def cost(noise_multiplier: float, grid: float) -> float:
        ledger = Ledger()
        at(noise_multiplier).charge(ledger, 0, planned_steps)
        return ledger.epsilon(delta, grid)

    return at(calibrate(cost, plan.epsilon))

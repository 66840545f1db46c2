"""The schedule of a run: how the units of each step are drawn, and what independent steps cost.

What a step costs depends on the mechanism, which says what the step releases, and on the sampling,
which says who takes part. `Schedule` holds all that is known of the sampling before training. It is
handed to `Mechanism.charges` (`engine/mechanism.py`), which prices the steps of a run. Mechanisms
whose steps are independent answer with `Schedule.sum_of_steps`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lightning_dpsparse.accounting import events
from lightning_dpsparse.accounting.charges import Charge
from lightning_dpsparse.accounting.events import DpEvent
from lightning_dpsparse.sampling.poisson import Phase, phase_at

Sampling = Literal["poisson", "fixed_order", "unamplified"]


@dataclass(frozen=True)
class Schedule:
    """Who may take part in which step. All of it is public."""

    phases: tuple[Phase, ...]
    """Stretches of steps that draw from one range of the units, in the order of training."""
    sampling: Sampling = "poisson"
    examples_per_user: int | None = None
    """k, where users are protected and their examples are drawn one by one; None otherwise."""
    max_batch: int | None = None
    """Poisson samples that are larger are cut to a random part of this size."""
    steps_per_pass: int | None = None
    """In fixed order: number of steps in which the data is read once through."""
    planned_steps: int | None = None
    """Number of steps of the whole run; None is without end."""

    def phase(self, step: int) -> Phase:
        """The phase that a step belongs to; after the end of the schedule, the last one."""
        return phase_at(self.phases, step) or self.phases[-1]

    def event(self, step_event: DpEvent, phase: Phase) -> DpEvent:
        """What one step of a phase costs, given what it costs the units that take part."""
        if self.sampling != "poisson" or not events.is_private(step_event):
            return step_event
        if self.examples_per_user is None and self.max_batch is None:
            return events.poisson(phase.rate, step_event)
        assert events.is_gaussian(step_event)  # the plan refuses others
        noise_multiplier = step_event.noise_multiplier
        if self.examples_per_user is not None:
            return events.poisson_examples_of_user(
                self.examples_per_user, phase.rate, noise_multiplier
            )
        assert self.max_batch is not None
        return events.truncated_poisson_gaussian(
            phase.count, phase.rate, self.max_batch, noise_multiplier
        )

    def sum_of_steps(self, step_event: DpEvent, first_step: int, steps: int) -> list[Charge]:
        """What a segment costs whose steps are independent of one another.

        Each step costs its own event. In fixed order each pass costs one event, since a unit is in
        one step of a pass; a pass that another segment had begun costs as much as a new one, since
        a unit may be in both parts of it. Steps after the end of the schedule are not charged.
        """
        return list(self._sum_of_steps(step_event, first_step, steps))

    def _sum_of_steps(self, step_event: DpEvent, first_step: int, steps: int) -> Iterator[Charge]:
        per_pass = self.steps_per_pass
        if per_pass is not None and first_step % per_pass:
            phase = self.phase(first_step)
            yield Charge(self.event(step_event, phase), 0, 1, phase.name)
        begin, last = 0, first_step + steps
        for phase in self.phases:
            end = last if phase.steps is None else begin + phase.steps
            first, stop = max(begin, first_step), min(end, last)
            if stop > first:
                times = stop - first
                if per_pass is not None:  # number of passes that begin in these steps
                    times = -(-stop // per_pass) + -first // per_pass
                yield Charge(self.event(step_event, phase), stop - first, times, phase.name)
            begin = end

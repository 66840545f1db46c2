"""The budget of a run: every step is charged before it is taken, or refused.

What further steps will cost is computed once, before training (`forecast`), since it takes seconds.
From then on `Budget` counts steps. It charges them to the ledger at the price that the plan asks
for the whole run so far (`RunPlan.extend`), and keeps the journal on disk ahead of training: before
a step begins, a charge for it and for some more steps has reached the disk. The calibration after
the last step is no step: it is forecast with the steps, and charged on disk before it is made.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from lightning_dpsparse.accounting.calibration import most_steps
from lightning_dpsparse.accounting.journal import Journal
from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.accounting.privacy_loss import COARSE, FINE
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.run_plan import RunPlan

GRID_POINTS = 16
"""Numbers of further steps for which a forecast has epsilon, at most."""
WRITE_AHEAD = 16
"""Number of steps that the journal charges for in advance, if nothing else is said. A run that
crashes is charged at most so many that it did not take; a larger number costs fewer syncs."""
_FAR = 1 << 20
"""Number of further steps that epsilon is forecast for if training has no end."""


class BudgetSpentError(Refused):
    """A step was asked for that the budget does not cover."""


@dataclass(frozen=True)
class Forecast:
    """What further steps will have cost. It is made once, so that asking is quick."""

    steps: tuple[int, ...]
    """Numbers of further steps, increasing, from zero."""
    epsilons: tuple[float, ...]
    """An upper bound of epsilon after each of these numbers."""
    limit: int | None
    """Number of further steps that the target covers; None without a target."""

    def epsilon(self, further_steps: int) -> float:
        """An upper bound: epsilon at the next larger number of steps that was computed."""
        at = bisect_left(self.steps, further_steps)
        return self.epsilons[at] if at < len(self.epsilons) else math.inf


def forecast(run: RunPlan, ledger: Ledger) -> Forecast:
    """Epsilon after a few numbers of further steps, and how many steps the target covers.

    Ask before the run's `Budget` is made, which opens a segment of the ledger.
    """
    step = ledger.position

    def cost(further: int, grid: float) -> float:
        ahead = ledger.copy()
        run.charge(ahead, step, further, to_end=True)  # steps may not use up what it needs
        return ahead.epsilon(run.delta, grid) if ahead.entries else 0.0

    target, planned, limit = run.plan.epsilon, run.planned_steps, None
    remaining = None if planned is None else max(0, planned - step)
    if target is not None:
        # The schedule's own end costs what calibration found, up to the search's tolerance.
        limit = most_steps(lambda n: cost(n, FINE) <= target, remaining)
    end = limit if limit is not None else remaining if remaining is not None else _FAR
    # Epsilon grows about as the square root of the steps: at squares it is spaced evenly.
    points = (end * i * i // (GRID_POINTS - 1) ** 2 for i in range(GRID_POINTS))
    steps = sorted({0, min(1, end), *points})
    last = cost(end, FINE)
    epsilons = [min(cost(n, COARSE), last) for n in steps[:-1]] + [last]
    for i in range(1, len(epsilons)):
        epsilons[i] = max(epsilons[i], epsilons[i - 1])
    return Forecast(tuple(steps), tuple(epsilons), limit)


class Budget:
    """Counts steps against a forecast, and keeps ledger and journal.

    Args:
        ahead: What further steps will have cost.
        journal: Is written by one rank; the others pass None.
        write_ahead: Number of steps that the journal charges for in advance.
    """

    def __init__(
        self,
        run: RunPlan,
        ledger: Ledger,
        ahead: Forecast,
        journal: Journal | None,
        write_ahead: int = WRITE_AHEAD,
    ) -> None:
        self.run, self.ledger = run, ledger
        self._forecast, self._journal = ahead, journal
        self._write_ahead = write_ahead
        self._has_calibrated = False
        self._start, self._reserved = ledger.steps, ledger.steps
        run.charge(ledger, ledger.position, 0)  # opens a segment, with no step yet
        if journal is not None:
            journal.write(ledger)

    @property
    def step(self) -> int:
        """Number of steps that this model took: where it stands in the schedule."""
        return self.ledger.position

    @property
    def _taken(self) -> int:
        """Number of steps of the open segment, which began with this budget."""
        return self.ledger.steps - self._start

    @property
    def remaining(self) -> int | None:
        """Number of steps that may still be taken; None without a target."""
        limit = self._forecast.limit
        return None if limit is None else limit - self._taken

    @property
    def epsilon(self) -> float:
        """An upper bound of the epsilon that has been spent. Asking is quick."""
        return self._forecast.epsilon(self._taken)

    def exact_epsilon(self) -> float:
        """The epsilon that has been spent. Computing it takes seconds."""
        return self.ledger.epsilon(self.run.delta) if self.ledger.entries else 0.0

    def charge(self) -> int:
        """Charge the next step before it is taken, and return its number in the schedule."""
        if self.remaining == 0:
            raise BudgetSpentError(
                f"Expected a step within epsilon={self.run.plan.epsilon:g} at "
                f"delta={self.run.delta:g}, found the budget spent after {self.ledger.steps:,} "
                "steps. Nothing was updated. Raise epsilon, or stop here."
            )
        step = self.step
        self._reserve()
        self.run.extend(self.ledger, self._taken + 1)
        if self.step == step:
            raise BudgetSpentError(
                f"Expected a step of the schedule, found step {step:,} after its end: nothing says "
                "what it costs."
            )
        return step

    def covers_calibration(self) -> bool:
        """Whether the calibration may be made now: once, and within the target.

        The forecast holds one. A second one might leave too little for steps that were promised.
        """
        if self._has_calibrated or self.run.calibration is None:
            return False
        ahead, target = self.ledger.copy(), self.run.plan.epsilon
        ahead.charge(self.run.calibration, steps=0)
        return target is None or ahead.epsilon(self.run.delta) <= target

    def charge_calibration(self) -> None:
        """Charge the calibration before it is made. The charge has reached the disk."""
        event, segment = self.run.calibration, self.ledger.segment
        assert event is not None
        assert segment is not None
        self._has_calibrated = True
        # It is no step of the open segment, and stays whatever that will cost.
        for ledger in (self.ledger, segment.before):
            ledger.charge(event, steps=0)
        if self._journal is not None:
            self._journal.write(self.ledger)
            self._reserved = self.ledger.steps  # it announces no further steps any more

    def _reserve(self) -> None:
        """Let the journal charge for this step and some more, before this one begins."""
        if self._journal is None or self.ledger.steps < self._reserved:
            return
        ahead = self.ledger.copy()
        self.run.extend(ahead, self._taken + self._write_ahead)
        self._journal.write(ahead)
        self._reserved = ahead.steps

    def settle(self) -> bool:
        """Let the journal charge for the steps that were really taken, and for no more.

        Returns whether that worked. If not, because the disk is full, say, the journal goes on
        charging for the steps that were announced, which are more.
        """
        if self._journal is not None:
            try:
                self._journal.write(self.ledger)
            except Refused:
                return False
        self._reserved = self.ledger.steps
        return True

    def close(self) -> None:
        """Write the journal for the last time, and let another process continue the run."""
        self.settle()
        if self._journal is not None:
            self._journal.close()
            self._journal = None

"""The privacy plan: one object that says what is promised and how the step keeps it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from lightning_dpsparse.accounting import events
from lightning_dpsparse.accounting.calibration import calibrate, default_delta
from lightning_dpsparse.accounting.events import DpEvent
from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.engine.clipping import Clipping, FlatClipping
from lightning_dpsparse.engine.mechanism import Mechanism
from lightning_dpsparse.mechanisms.dpsgd import DPSGD
from lightning_dpsparse.noise.keys import RunKey
from lightning_dpsparse.noise.sources import FastNoise, NoiseSource, RowNoise, SecureNoise
from lightning_dpsparse.sampling.poisson import Phase

_SOURCES: dict[str, Callable[[RunKey], NoiseSource]] = {
    "fast": FastNoise,
    "secure": SecureNoise,
    "row_keyed": RowNoise,
}


@dataclass(frozen=True, kw_only=True)
class Users:
    """Protect people, who may have several examples each.

    The data set says whose each example is: `dataset.users`, one number per example.
    """

    max_examples: int
    """k: a user's first k examples are used, and no more."""

    drawn: Literal["examples", "users"] = "examples"
    """Draw examples, and charge for the up to k that a user may have in a batch; or draw users with
    all their examples, and clip each user's summed gradient. The batch size then counts users."""

    in_one_day: bool = False
    """Whether a user's examples all lie in one day, by definition of a user: see by_day."""

    def __post_init__(self) -> None:
        if self.max_examples < 1:
            raise ValueError(f"Expected max_examples >= 1, found {self.max_examples}.")


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """How training is made private. Give a target epsilon, a noise multiplier, or both."""

    mechanism: Mechanism = field(default_factory=DPSGD)
    """Where noise goes."""

    clip_norm: float = 1.0
    """C: the most that one unit may move the sum of gradients."""

    epsilon: float | None = None
    """The target. Noise is calibrated to it, and no step is taken that would exceed it."""

    delta: float | None = None
    """Goes with epsilon. By default 1 / (10 x units), rounded down to a power of ten."""

    noise_multiplier: float | None = None
    """sigma: the noise's standard deviation over C. By default what epsilon asks for; with an
    epsilon too, training ends when it is spent. Zero is allowed, and is not private."""

    unit: Literal["example"] | Users = "example"
    """Whom the guarantee protects."""

    sampling: Literal["poisson", "fixed_order", "unamplified"] = "poisson"
    """poisson: the loader's order is replaced by Poisson samples of its data set. fixed_order: the
    data once through, in order, over and over; one full-price event per pass. unamplified: any
    loader that never repeats a unit within a batch; one full-price event per step."""

    by_day: bool = False
    """Train on one day after the other (`dataset.day_starts`). Where a unit lives in one day, the
    cost is the largest day's, not the sum."""

    expected_batch_size: int | None = None
    """What sums are divided by: a constant. By default the loader's batch size times the ranks."""

    max_batch_size: int | None = None
    """Cut larger Poisson samples to a random part of this size, at the price of its own event."""

    clipping: Clipping = field(default_factory=FlatClipping)
    """How units are held to C."""

    noise_source: Literal["fast", "secure", "row_keyed"] = "fast"
    """Where noise comes from. Speed and cryptography only: all three are exact Gaussians."""

    fixed_key: int | None = None
    """For tests and replay: noise that anyone can draw again. A run with it is not private."""

    taints: tuple[str, ...] = ()
    """Other ways in which private data went into this model, for the report: a vocabulary read off
    the data, settings tuned on it, and the like."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "taints", tuple(self.taints))  # lists, from YAML
        self._check_noise()
        if self.expected_batch_size is not None and self.expected_batch_size < 1:
            raise ValueError(
                f"Expected expected_batch_size >= 1, found {self.expected_batch_size}."
            )
        if self.max_batch_size is not None and self.max_batch_size < 1:
            raise ValueError(f"Expected max_batch_size >= 1, found {self.max_batch_size}.")
        if self.sampling != "poisson" and (
            self.max_batch_size is not None or self.by_day or isinstance(self.unit, Users)
        ):
            raise ValueError(
                f"Expected sampling='poisson' with max_batch_size, by_day or users, found "
                f"{self.sampling!r}."
            )
        if self.max_batch_size is not None and self._counts_examples_of_users:
            raise ValueError(
                "Expected no max_batch_size where users' examples are drawn one by one: there is "
                "no event for it. Draw whole users."
            )

    def _check_noise(self) -> None:
        if not self.clip_norm > 0:
            raise ValueError(f"Expected clip_norm > 0, found {self.clip_norm}.")
        if self.epsilon is None and self.noise_multiplier is None:
            raise ValueError(
                "Expected epsilon or noise_multiplier, found neither. Set one of them."
            )
        if self.epsilon is not None and not 0 < self.epsilon < math.inf:
            raise ValueError(f"Expected epsilon > 0, found {self.epsilon}.")
        if self.delta is not None and not 0 < self.delta < 1:
            raise ValueError(f"Expected delta between 0 and 1, found {self.delta}.")
        if self.epsilon is not None and not self.mechanism.is_private:
            raise ValueError(
                f"Expected a private mechanism for epsilon={self.epsilon}, found "
                f"{type(self.mechanism).__name__}, which is not differentially private. Set "
                "noise_multiplier instead."
            )
        if self.noise_multiplier is not None and not 0 <= self.noise_multiplier < math.inf:
            raise ValueError(f"Expected noise_multiplier >= 0, found {self.noise_multiplier}.")
        if math.isinf(self.clip_norm) and self.noise_multiplier != 0:
            raise ValueError(
                f"Expected a finite clip_norm with noise, found {self.clip_norm}: the noise would "
                "be infinite. Set noise_multiplier to 0 to compare with plain training."
            )
        if self.epsilon is not None and self.noise_multiplier == 0:
            raise ValueError(
                f"Expected noise for epsilon={self.epsilon}, found noise_multiplier=0. Leave one "
                "of them out."
            )

    @property
    def _counts_examples_of_users(self) -> bool:
        return isinstance(self.unit, Users) and self.unit.drawn == "examples"

    @property
    def draws_whole_users(self) -> bool:
        return isinstance(self.unit, Users) and self.unit.drawn == "users"

    @property
    def unit_lives_in_one_day(self) -> bool:
        return self.by_day and (not isinstance(self.unit, Users) or self.unit.in_one_day)

    @property
    def adjacency(self) -> str:
        """What two data sets may differ in."""
        if self.sampling == "fixed_order":
            return "one example replaced by none, in its place"
        if isinstance(self.unit, Users):
            return f"one user added or removed, with at most {self.unit.max_examples:,} examples"
        return "one example added or removed"

    def event(self, phase: Phase, noise_multiplier: float) -> DpEvent:
        """What one step of a phase (one pass, in fixed order) costs."""
        if not self.mechanism.is_private or self.fixed_key is not None:
            return events.not_private()
        if self.sampling != "poisson":
            return events.gaussian(noise_multiplier)
        if isinstance(self.unit, Users) and self.unit.drawn == "examples":
            return events.poisson_examples_of_user(
                self.unit.max_examples, phase.rate, noise_multiplier
            )
        if self.max_batch_size is not None:
            return events.truncated_poisson_gaussian(
                phase.count, phase.rate, self.max_batch_size, noise_multiplier
            )
        return events.poisson_gaussian(phase.rate, noise_multiplier)

    def make_key(self) -> RunKey:
        return RunKey() if self.fixed_key is None else RunKey.fixed(self.fixed_key)

    def make_source(self, key: RunKey) -> NoiseSource:
        return _SOURCES[self.noise_source](key)

    def faults(self) -> list[str]:
        """Why a run of this plan is not private, if it is not."""
        found = []
        if not self.mechanism.is_private:
            found.append(f"{type(self.mechanism).__name__} is not differentially private.")
        if self.noise_multiplier == 0:
            found.append("noise_multiplier=0: not private.")
        if self.fixed_key is not None:
            found.append("Fixed noise key: not private.")
        return found


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
                yield event, phase.name, stop - first, times
            begin = end

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

    def take_up(self, ledger: Ledger) -> None:
        """Before a run begins or goes on.

        A pass in fixed order that was broken off costs like a new one. A ledger that protects
        somebody else is refused.
        """
        if ledger.protects is not None and ledger.protects != self.protects:
            raise ValueError(
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
) -> RunPlan:
    """Give a plan its data: choose delta, and the noise that the target asks for."""
    if plan.delta is None and num_units is None:
        raise ValueError(
            "Expected delta, or a data set of known size to choose it by, found neither. Set delta "
            "in the privacy plan."
        )
    delta = plan.delta if plan.delta is not None else default_delta(num_units or 1)

    def at(noise_multiplier: float) -> RunPlan:
        return RunPlan(
            plan,
            tuple(phases),
            num_units,
            expected_batch,
            delta,
            noise_multiplier,
            steps_per_pass,
            planned_steps,
        )

    if plan.noise_multiplier is not None:
        return at(plan.noise_multiplier)
    assert plan.epsilon is not None
    if plan.fixed_key is not None:
        raise ValueError(
            f"Expected secret noise for epsilon={plan.epsilon}, found fixed_key. Set "
            "noise_multiplier instead."
        )
    if planned_steps is None:
        raise ValueError(
            f"Expected a number of steps to calibrate epsilon={plan.epsilon} for, found training "
            "without end. Set max_steps or max_epochs, or noise_multiplier too."
        )

    def cost(noise_multiplier: float, grid: float) -> float:
        ledger = Ledger()
        at(noise_multiplier).charge(ledger, 0, planned_steps)
        return ledger.epsilon(delta, grid)

    return at(calibrate(cost, plan.epsilon))

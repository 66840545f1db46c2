"""The privacy plan: one object that says what is promised and how the step keeps it.

A user writes a `PrivacyPlan`, in Python or in a recipe. It knows neither the data nor the model.
`run_plan.resolve` gives it both, and returns the `RunPlan` that everything else asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from lightning_dpsparse.accounting import events
from lightning_dpsparse.checks import (
    check_choice,
    check_flag,
    check_kind,
    check_names,
    check_number,
    check_text,
    check_whole,
    is_number,
)
from lightning_dpsparse.engine.clipping import Clipping, FlatClipping
from lightning_dpsparse.engine.dense import DenseGaussian, DenseMechanism
from lightning_dpsparse.engine.mechanism import Mechanism
from lightning_dpsparse.mechanisms.dpsgd import DPSGD
from lightning_dpsparse.mechanisms.fest import selection_of
from lightning_dpsparse.mechanisms.logit_calibration import LogitCalibration
from lightning_dpsparse.mechanisms.selection import GumbelHistogram, Histogram
from lightning_dpsparse.noise.keys import KEY_BYTES, RunKey
from lightning_dpsparse.noise.sources import FastNoise, NoiseSource, RowNoise, SecureNoise
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sampling.poisson import Phase
from lightning_dpsparse.sampling.schedule import Sampling, Schedule

_SOURCES: dict[str, Callable[[RunKey], NoiseSource]] = {
    "fast": FastNoise,
    "secure": SecureNoise,
    "row_keyed": RowNoise,
}

_MOST_EXAMPLES = 10_000
"""Most examples of a user that are drawn one by one: the price is computed for each number of
them."""


@dataclass(frozen=True, kw_only=True)
class Users:
    """Protect people, who may have several examples each.

    The data set says whose each example is: `dataset.users`, one number per example.

    What is drawn decides how much noise a user costs. If whole users are drawn, each user's summed
    gradient is clipped to C, and the user is one unit of the sample, as an example is elsewhere.
    If examples are drawn one by one, each is clipped to C, and a user of whom j <= k are in a batch
    moves its sum by up to j C. Noise must cover that, and needs up to k times the multiplier: all
    of it where a user is often in a batch with several examples, which is so in large batches, over
    many epochs and for a small epsilon. Draw users, unless batches are small, epochs few and
    epsilon large: `lightning-dpsparse calibrate --users` compares the two for your numbers, and
    docs/utility.md has an example.
    """

    max_examples: int
    """k: the first k examples of each user are used, and no more."""

    drawn: Literal["examples", "users"] = "users"
    """users: draw users with all their examples, and clip each user's summed gradient. The batch
    size then counts users: a batch has up to k times as many examples. examples: draw examples one
    by one, and charge for the up to k that a user may have in a batch; the batch size counts
    examples."""

    in_one_day: bool = False
    """Whether all examples of a user lie in one day, by the definition of a user: see by_day."""

    def __post_init__(self) -> None:
        check_whole("max_examples", self.max_examples)
        check_choice("drawn", self.drawn, ("examples", "users"))
        check_flag("in_one_day", self.in_one_day)
        if self.drawn == "examples" and self.max_examples > _MOST_EXAMPLES:
            raise Refused(
                f"Expected max_examples of at most {_MOST_EXAMPLES:,} where examples are drawn one "
                f"by one, found {self.max_examples:,}. Draw whole users."
            )


_PERIOD = "days_per_period >= 1, and by_day with more than one"
_REASON = "Say why in a sentence, or leave it out."
_LEAST, _MOST = 1e-24, 1e24
"""Smallest and largest standard deviation of noise that float32 holds, with its grid."""
_MOST_ON_COUNTS = 2**20
"""Least noise on counts whose grid would be coarser than whole numbers."""
_NOISE = "Around 1 is usual, and 0 is not private."


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """How training is made private. Give it a target epsilon, a noise multiplier, or both."""

    mechanism: Mechanism = field(default_factory=DPSGD)
    """Which rows of the tables are updated in a step, and with what noise."""

    dense: DenseMechanism = field(default_factory=DenseGaussian)
    """The form in which gradients of dense layers are clipped and noised, with the tables."""

    clip_norm: float = 1.0
    """C: the most that one unit may move the sum of gradients."""

    dense_scale: float = 1.0
    """Noise on dense layers over noise on tables. Dense gradients are divided by it before they are
    clipped, so that they leave more of clip_norm to the tables, and multiplied by it at the end."""

    epsilon: float | None = None
    """The target. Noise is calibrated to it, and no step is taken that would exceed it."""

    delta: float | None = None
    """The delta of epsilon. The default is 1 / (10 x units), rounded down to a power of ten."""

    noise_multiplier: float | None = None
    """sigma: the standard deviation of the noise over C. The default is what epsilon needs. If both
    are given, training ends when epsilon is spent. Zero is allowed, and is not private."""

    unit: Literal["example"] | Users = "example"
    """Whom the guarantee protects."""

    sampling: Sampling = "poisson"
    """poisson: batches are Poisson samples of the loader's data set, whatever its order.
    fixed_order: the data is read in order, pass after pass; each pass costs one event without
    amplification. unamplified: the loader stays as it is; its order must not depend on the data,
    and no batch may hold a unit twice; each step costs one event without amplification."""

    by_day: bool = False
    """Train on one day after the other (`dataset.day_starts`). If every unit lives in one day, the
    run costs what its most expensive day costs, and not the sum of all days."""

    days_per_period: int = 1
    """With by_day: number of days that are trained on together, one such period after the other."""

    expected_batch_size: int | None = None
    """The constant that sums are divided by; by default the loader's batch size times the ranks. It
    counts what is drawn: users, where these are drawn whole."""

    max_batch_size: int | None = None
    """Cut larger Poisson samples to a random part of this size, which costs more privacy."""

    clipping: Clipping = field(default_factory=FlatClipping)
    """How the gradient of a unit is kept within C."""

    calibration: LogitCalibration | None = None
    """A private query after the last step that calibrates the logits of a click model. It is
    charged, and epsilon covers it from the start. None makes no such query."""

    noise_source: Literal["fast", "secure", "row_keyed"] = "fast"
    """Where noise comes from. The three differ in speed and in cryptographic strength; all draw
    exact Gaussians."""

    fixed_key: int | None = None
    """A key for tests and replay, with which anyone can draw the noise again: not private."""

    assume_independent_examples: str | None = None
    """The reason why no example's loss depends on other examples, for a model that cannot be
    probed. It replaces the probe that measures this, and the report shows it."""

    assume_post_processing: str | None = None
    """The reason why all that hooks and layers write to parameters, buffers and released gradients
    is made of released weights alone (a moving average, a projection). The report shows it."""

    taints: tuple[str, ...] = ()
    """Other ways in which private data went into this model, for the report: a vocabulary that was
    read off the data, settings that were tuned on it, and the like."""

    def __post_init__(self) -> None:
        check_names("taints", self.taints, remedy="Write [text], with a sentence for each taint.")
        object.__setattr__(self, "taints", tuple(self.taints))  # lists, from YAML
        _check_parts(self)
        self._check_noise()
        for name in ("expected_batch_size", "max_batch_size"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), remedy="Set it, or leave it out.")
        check_flag("by_day", self.by_day)
        check_whole("days_per_period", self.days_per_period, expected=_PERIOD)
        if self.days_per_period > 1 and not self.by_day:
            raise Refused(
                f"Expected {_PERIOD}, found {self.days_per_period} with by_day=False. Set by_day, "
                "or leave days_per_period out."
            )
        if self.sampling != "poisson" and (
            self.max_batch_size is not None or self.by_day or isinstance(self.unit, Users)
        ):
            raise Refused(
                f"Expected sampling='poisson' with max_batch_size, by_day or users, found "
                f"{self.sampling!r}. Leave sampling out, or leave these out."
            )
        self._check_mechanism()
        _check_calibration(self)
        if self.max_batch_size is not None and self._counts_examples_of_users:
            raise Refused(
                "Expected no max_batch_size where users' examples are drawn one by one, found "
                f"{self.max_batch_size}: there is no event for it. Draw whole users."
            )

    def _check_mechanism(self) -> None:
        name, selection = type(self.mechanism).__name__, selection_of(self.mechanism)
        special = self.max_batch_size is not None or self._counts_examples_of_users
        if special and not events.is_gaussian(self.mechanism.event(1.0)):
            raise Refused(
                f"Expected plain Poisson samples with {name}, found max_batch_size or users whose "
                "examples are drawn one by one: there is no event for both. Leave max_batch_size "
                "out, or draw whole users."
            )
        if selection is None or not isinstance(selection.frequencies, Histogram):
            return
        if selection.renew and not self.by_day:
            raise Refused(
                f"Expected by_day=True where {name} renews its selection, found False: there are "
                "no periods to renew it for. Set by_day, or leave renew out."
            )
        if self.sampling == "unamplified":
            raise Refused(
                f"Expected a data set that can be read in order where {name} counts ids, found "
                "sampling='unamplified'. Use sampling='poisson', or PublicFrequencies."
            )
        if isinstance(selection.frequencies, GumbelHistogram) and isinstance(self.unit, Users):
            raise Refused(
                "Expected unit='example' with GumbelHistogram, found users: what it costs when a "
                "count moves by more than one is not known. Use NoisyHistogram."
            )

    def _check_noise(self) -> None:
        if not (is_number(self.clip_norm) and float(self.clip_norm) == math.inf):
            check_number("clip_norm", self.clip_norm, above=0, remedy="The default is 1.0.")
        check_number("dense_scale", self.dense_scale, least=1e-6, most=1e6, remedy="Try 2 or 4.")
        if self.epsilon is None and self.noise_multiplier is None:
            raise Refused("Expected epsilon or noise_multiplier, found neither. Set one of them.")
        if self.epsilon is not None:
            check_number("epsilon", self.epsilon, above=0, remedy="Between 1 and 10 is usual.")
        if self.delta is not None:
            check_number(
                "delta", self.delta, above=0, below=1, most=None, remedy="Or leave it out."
            )
        if self.epsilon is not None and not self.mechanism.is_private:
            raise Refused(
                f"Expected a private mechanism for epsilon={self.epsilon}, found "
                f"{type(self.mechanism).__name__}, which is not differentially private. Set "
                "noise_multiplier instead."
            )
        if self.noise_multiplier is not None:
            check_number("noise_multiplier", self.noise_multiplier, least=0, remedy=_NOISE)
        if math.isinf(self.clip_norm) and self.noise_multiplier != 0:
            raise Refused(
                f"Expected a finite clip_norm with noise, found {self.clip_norm}: the noise would "
                "be infinite. Set noise_multiplier to 0 to compare with plain training."
            )
        if self.noise_multiplier and not _LEAST <= self.noise_multiplier * self.clip_norm <= _MOST:
            raise Refused(
                f"Expected noise_multiplier x clip_norm from {_LEAST:g} to {_MOST:g}, found "
                f"{self.noise_multiplier} x {self.clip_norm}: float32 has no such noise. Scale "
                "clip_norm."
            )
        if self.epsilon is not None and self.noise_multiplier == 0:
            raise Refused(
                f"Expected noise for epsilon={self.epsilon}, found noise_multiplier=0. Leave one "
                "of them out."
            )

    @property
    def _counts_examples_of_users(self) -> bool:
        return isinstance(self.unit, Users) and self.unit.drawn == "examples"

    @property
    def draws_whole_users(self) -> bool:
        """Whether users are drawn, with all their examples."""
        return isinstance(self.unit, Users) and self.unit.drawn == "users"

    @property
    def unit_lives_in_one_day(self) -> bool:
        """Whether days share no unit, so that their costs need not be added up."""
        return self.by_day and (not isinstance(self.unit, Users) or self.unit.in_one_day)

    @property
    def adjacency(self) -> str:
        """What two neighbouring data sets may differ in."""
        if self.sampling != "poisson":  # one more would shift all that come after it
            return "one example replaced by none, in its place"
        if isinstance(self.unit, Users):
            return f"one user added or removed, with at most {self.unit.max_examples:,} examples"
        return "one example added or removed"

    def schedule(
        self,
        phases: Sequence[Phase],
        steps_per_pass: int | None = None,
        planned_steps: int | None = None,
    ) -> Schedule:
        """How the units of each step are drawn, for the mechanism that prices the steps."""
        examples_per_user = None
        if isinstance(self.unit, Users) and self.unit.drawn == "examples":
            examples_per_user = self.unit.max_examples
        return Schedule(
            tuple(phases),
            self.sampling,
            examples_per_user,
            self.max_batch_size,
            steps_per_pass,
            planned_steps,
        )

    def make_key(self) -> RunKey:
        """The secret that sampling and noise are drawn from: a new one, or the fixed one."""
        return RunKey() if self.fixed_key is None else RunKey.fixed(self.fixed_key)

    def make_source(self, key: RunKey) -> NoiseSource:
        """The source that draws noise from a key."""
        return _SOURCES[self.noise_source](key)

    def assumptions(self) -> list[str]:
        """What the guarantee rests on and nobody measured, for the report."""
        found = []
        if self.sampling == "unamplified":
            found.append(
                "That the loader's order, and which examples share a batch, depend on no example's "
                "data."
            )
        if self.assume_independent_examples is not None:
            found.append(
                "That no example's loss depends on other examples: "
                f"{self.assume_independent_examples}"
            )
        if self.assume_post_processing is not None:
            found.append(
                "That what else is written to the model is made of released weights alone: "
                f"{self.assume_post_processing}"
            )
        return found

    def faults(self) -> list[str]:
        """Why a run of this plan is not private, if it is not."""
        found = []
        if not self.mechanism.is_private:
            found.append(f"{type(self.mechanism).__name__} is not differentially private.")
        if self.noise_multiplier == 0:
            found.append("noise_multiplier=0: not private.")
        if self.calibration is not None and self.calibration.noise_multiplier == 0:
            found.append("A calibration with noise_multiplier=0: not private.")
        if self.fixed_key is not None:
            found.append("Fixed noise key: not private.")
        return found


def _check_parts(plan: PrivacyPlan) -> None:
    """Refuse what the plan is made of, where it is of a wrong kind."""
    check_kind("mechanism", plan.mechanism, Mechanism, remedy="DPSGD() is the default.")
    check_kind("dense", plan.dense, DenseMechanism, remedy="DenseGaussian() is the default.")
    check_kind("clipping", plan.clipping, Clipping, remedy="FlatClipping() is the default.")
    check_choice("sampling", plan.sampling, get_args(Sampling))
    check_choice("noise_source", plan.noise_source, _SOURCES)
    if not isinstance(plan.unit, Users):
        check_choice("unit", plan.unit, ("example",), remedy="Or give Users(max_examples=...).")
    if plan.fixed_key is not None:
        most = 256**KEY_BYTES - 1
        check_whole("fixed_key", plan.fixed_key, 0, most, remedy="Or leave it out.")
    for name in ("assume_independent_examples", "assume_post_processing"):
        reason = getattr(plan, name)
        # A reason of null was meant as none, and the command line makes a text of it.
        if isinstance(reason, str) and (
            reason in ("None", "null") or not any(c.isalpha() for c in reason)
        ):
            raise Refused(f"Expected a reason in {name}, found no reason. {_REASON}")
        if reason is not None:
            check_text(name, getattr(plan, name), expected=f"a reason in {name}", remedy=_REASON)


def examples_per_unit(plan: PrivacyPlan) -> int:
    """Most examples that one unit has in the data that is used."""
    return plan.unit.max_examples if isinstance(plan.unit, Users) else 1


def _check_calibration(plan: PrivacyPlan) -> None:
    """Refuse a calibration for which there is no honest event, or no data to read."""
    settings = plan.calibration
    if settings is None:
        return
    check_kind("calibration", settings, LogitCalibration, remedy="LogitCalibration() is one.")
    if plan.sampling == "unamplified":
        raise Refused(
            "Expected a data set that can be read in order for a calibration, found "
            "sampling='unamplified'. Use sampling='poisson', or leave calibration out."
        )
    if settings.noise_multiplier == 0 and plan.epsilon is not None:
        raise Refused(
            f"Expected noise in the calibration for epsilon={plan.epsilon:g}, found "
            "noise_multiplier=0. Leave one of them out."
        )
    noise = (settings.noise_multiplier or 0.0) * examples_per_unit(plan)
    if noise >= _MOST_ON_COUNTS:
        raise Refused(
            f"Expected noise of less than {_MOST_ON_COUNTS:,} on the calibration's counts, found "
            f"{noise:,.0f}. Use a smaller noise_multiplier, or a smaller max_examples."
        )

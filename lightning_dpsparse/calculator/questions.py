"""From options to a run: the plan that they describe, which `resolve` prices as in training."""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from dataclasses import dataclass, fields, replace

from jsonargparse import ArgumentError, ArgumentParser

from lightning_dpsparse.accounting.calibration import default_delta, delta_warning
from lightning_dpsparse.accounting.privacy_loss import FINE
from lightning_dpsparse.calculator.options import MECHANISMS
from lightning_dpsparse.command_line import in_one_line
from lightning_dpsparse.engine.mechanism import Mechanism
from lightning_dpsparse.engine.step_inputs import Table
from lightning_dpsparse.mechanisms import TABLE_MECHANISMS
from lightning_dpsparse.mechanisms.logit_calibration import LogitCalibration
from lightning_dpsparse.plan import PrivacyPlan, Users
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.run_plan import RunPlan, resolve
from lightning_dpsparse.sampling.poisson import Phase, day_phases
from lightning_dpsparse.sampling.schedule import Sampling

_THRESHOLDS = ("threshold", "false_positives", "half_survival")
"""AdaFEST asks for one of these settings. No price depends on which, or on its value."""

_ALIKE = 0.1
"""Largest difference of steps that are said to have as many examples, as a part of them."""


@dataclass(frozen=True)
class Population:
    """Users, and the examples that they have within their cap."""

    num_users: int
    num_examples: int

    @property
    def examples_per_user(self) -> float:
        """The mean number of a user's examples."""
        return self.num_examples / self.num_users


@dataclass(frozen=True)
class Question:
    """A run that somebody thinks of."""

    mechanism: Mechanism
    has_threshold: bool
    """Whether the user gave the mechanism a threshold, which the answer then shows."""
    tables: tuple[Table, ...]
    """One table that stands for all of them."""
    has_rows: bool
    """Whether the table's number of rows is known."""
    num_units: int
    """Number of units to draw from: of users, where users are drawn."""
    batch: int
    steps: int
    delta: float
    sampling: Sampling
    unit: Users | None
    """The users that are protected; None protects examples."""
    max_batch: int | None
    num_days: int
    users: Population | None = None
    """How many users and examples there are, if that was said."""
    calibration: LogitCalibration | None = None
    """The query after the last step; None makes none."""

    @property
    def largest_batch(self) -> int:
        """The most units that a batch can have: those of one day."""
        return self.num_units // self.num_days

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in which a unit is drawn once, as expected."""
        return -(-self.num_units // self.batch)

    def drawn_otherwise(self) -> Question | None:
        """The same users by the other drawing, with as many examples in a step.

        None if it is not known how many users there are, if there is no event for it, or if no
        whole batch has about as many examples.
        """
        if self.unit is None or self.users is None:
            return None
        users, per_user = self.users, self.users.examples_per_user
        try:
            if self.unit.drawn == "users":
                unit = replace(self.unit, drawn="examples")
                units, batch = users.num_examples, self.batch * per_user
            else:
                unit = replace(self.unit, drawn="users")
                units, batch = users.num_users, self.batch / per_user
            size = min(max(1, round(batch)), units // self.num_days)
            if abs(size - batch) > _ALIKE * batch:
                return None
            other = replace(self, unit=unit, num_units=units, batch=size)
            other.resolve(noise_multiplier=1.0)  # refuses what has no event
        except Refused:
            return None
        return other

    def resolve(
        self,
        *,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
        grid: float = FINE,
    ) -> RunPlan:
        """The run with this noise, or with the noise that epsilon needs."""
        plan = PrivacyPlan(
            mechanism=self.mechanism,
            epsilon=epsilon,
            delta=self.delta,
            noise_multiplier=noise_multiplier,
            unit="example" if self.unit is None else self.unit,
            sampling=self.sampling,
            by_day=self.num_days > 1,
            max_batch_size=self.max_batch,
            calibration=self.calibration,
        )
        in_order = self.sampling == "fixed_order"
        return resolve(
            plan,
            self._phases(),
            self.num_units if self.users is None else self.users.num_users,
            float(self.batch),
            self.steps,
            math.ceil(self.num_units / self.batch) if in_order else None,
            self.tables,
            grid=grid,
            allow_any_delta=True,  # `asked` has warned of a large one
        )

    def _phases(self) -> list[Phase]:
        if self.num_days > 1:
            bounds = [self.num_units * day // self.num_days for day in range(self.num_days + 1)]
            names = [f"day {day + 1}" for day in range(self.num_days)]
            return day_phases(bounds, self.batch, self.steps, names)
        rate = self.batch / self.num_units if self.sampling == "poisson" else 1.0
        return [Phase(0, self.num_units, rate)]


def asked(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Question:
    """The run that the options describe. What cannot be meant ends the command with a message."""
    unit = _unit(options, parser)
    users = None if options.users is None else Population(options.users, options.examples)
    draws_users = unit is not None and unit.drawn == "users"
    num_units = options.users if users is not None and draws_users else options.examples
    what = "users" if draws_users else "examples"
    if options.batch > num_units:
        parser.error(
            f"argument --batch: expected at most {num_units} {what}, found {options.batch}"
        )
    if options.batch > num_units // options.days:
        parser.error(
            f"argument --batch: expected at most the {num_units // options.days} {what} "
            f"of one of {options.days} days, found {options.batch}"
        )
    protected = options.examples if users is None else users.num_users
    delta = default_delta(protected) if options.delta is None else options.delta
    mechanism = _mechanism(options, parser)
    warning = delta_warning(delta, protected)
    if warning is not None:  # training would refuse what is far too large
        print(f"{parser.prog}: argument --delta: {warning}", file=sys.stderr)
    return Question(
        mechanism,
        bool(_names(options) & set(_THRESHOLDS)),
        _tables(options, parser),
        options.rows is not None,
        num_units,
        options.batch,
        options.steps or -(-num_units // options.batch) * options.epochs,
        delta,
        options.sampling,
        unit,
        options.max_batch,
        options.days,
        users,
        None
        if options.calibration is None
        else LogitCalibration(noise_multiplier=options.calibration or None),
    )


def _unit(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Users | None:
    """The users that are protected; None if these are examples."""
    most, draw, users = options.examples_per_user, options.draw, options.users
    if most is None:
        for name, value in (("draw", draw), ("users", users)):
            if value is not None and value != "examples":
                parser.error(f"argument --{name}: expected --examples-per-user with it, found none")
        return None
    unit = Users(max_examples=most, drawn=draw or "users", in_one_day=options.days > 1)
    if users is None and draw is None:
        parser.error(
            "argument --examples-per-user: expected --users, the number of users, or --draw, which "
            "says what --examples counts, found neither"
        )
    if users is not None and not users <= options.examples <= users * most:
        parser.error(
            f"argument --users: expected {options.examples} examples to be 1 to {most} for each "
            f"user, found {users} users; --examples counts those within --examples-per-user"
        )
    if options.max_batch is not None and unit.drawn == "examples":
        parser.error("--max-batch and --examples-per-user: there is no accounting for both")
    return unit


def _mechanism(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Mechanism:
    """The mechanism, with the settings that were given."""
    name = MECHANISMS[options.mechanism]
    kind: type[Mechanism] = getattr(importlib.import_module(TABLE_MECHANISMS[name]), name)
    if not kind.is_private:
        raise Refused(
            f"Expected a private mechanism, found {name}, which is not differentially private "
            "however much noise it adds: it has no epsilon. Choose another one."
        )
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]  # they all are
    settings = list(options.set)
    for option, field_name in (("noise-ratio", "noise_ratio"), ("map-clip-norm", "map_clip_norm")):
        value = getattr(options, field_name)
        if value is None:
            continue
        if field_name not in known:
            parser.error(f"argument --{option}: {name} has no such setting")
        settings.append(f"{field_name}={value!r}")
    if known.issuperset(_THRESHOLDS) and not _names(options) & set(_THRESHOLDS):
        settings.append("threshold=0.0")
    given = [setting.partition("=")[0] for setting in settings]
    twice = sorted({name for name in given if given.count(name) > 1})
    if twice:
        parser.error(f"argument --set: expected each setting once, found {twice} several times")
    reader = ArgumentParser(exit_on_error=False)
    reader.add_class_arguments(kind, "set")
    try:
        read = reader.parse_args([f"--set.{setting}" for setting in settings])
    except ArgumentError as error:
        parser.error(f"argument --set: {name}: {in_one_line(str(error))}")
    made: Mechanism = reader.instantiate_classes(read).set
    return made


def _names(options: argparse.Namespace) -> set[str]:
    """Names of the settings that were given."""
    return {setting.partition("=")[0] for setting in options.set}


def _tables(options: argparse.Namespace, parser: argparse.ArgumentParser) -> tuple[Table, ...]:
    """One table with all rows and features: no price depends on how tables share them."""
    if options.rows is None and "false_positives" in _names(options):
        parser.error(
            "argument --rows: expected a number, by which false_positives are counted, found none"
        )
    features = tuple(f"feature {i}" for i in range(options.features))
    return (Table("all tables", options.rows or 1, features),)

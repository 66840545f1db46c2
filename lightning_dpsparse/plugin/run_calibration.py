"""The calibration of a private run: one query after the last step, charged before it is made.

When training ends, the module's logits on all training data are counted in a histogram, which gets
noise and is charged as one Gaussian event (`mechanisms/logit_calibration`). The line that is fitted
to it, or one for each task, goes into the module's last layers. It runs right after the last step,
so that the validation and the checkpoints that follow see the calibrated model. A run that ends
before its schedule, by a time limit or a callback, calibrates before `on_train_end`. One that ends
in an error or by a signal does not: whoever goes on with it will.

How many examples share a batch, and in which place of it an example stands, must not show in its
logit, or a unit would move the cells of others. So all batches have one size, filled up with
examples that do not count. To see that, half of the first batch is read again, in other places
and beside others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from tqdm import tqdm

from lightning_dpsparse.budget import Budget
from lightning_dpsparse.checks import is_whole
from lightning_dpsparse.mechanisms.logit_calibration.histogram import (
    LogitHistogram,
    centres,
    check_shares_grid,
    noisy_counts,
)
from lightning_dpsparse.mechanisms.logit_calibration.platt import LogitMap, fit_line, fit_tasks
from lightning_dpsparse.noise.keys import RunKey
from lightning_dpsparse.plan import examples_per_unit
from lightning_dpsparse.plugin.calibrated_module import CalibratedModule
from lightning_dpsparse.plugin.evidence import Evidence
from lightning_dpsparse.plugin.guard import Guard
from lightning_dpsparse.plugin.private_data import SampledData
from lightning_dpsparse.plugin.probe.repeatable import as_if_never_run
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.run_plan import RunPlan
from lightning_dpsparse.sharded.examples import num_examples, take_examples
from lightning_dpsparse.sharded.process_group import (
    from_rank_zero,
    largest_over_ranks,
    sum_over_ranks,
)

# B examples of a batch, T tasks (logits and labels are (B, T) if there are several)

BATCH = 4096
"""Examples that a rank reads at once. Of a size like this, matrix products on CPUs are the same to
the last bit wherever in the batch an example stands."""
_ROUNDING = 1e-3
"""Largest difference of logits that may be rounding, over the size of logits."""

T = TypeVar("T")
Read = tuple[Tensor, Tensor, Tensor | None]
"""Logits, labels and slices of the examples of a batch."""
Lines = tuple[LogitMap, ...]
"""One for each task."""


class RunCalibration:
    """The calibration of one run; it does nothing where the plan has none."""

    def __init__(self, key: RunKey, evidence: Evidence) -> None:
        self._key, self._evidence = key, evidence
        self._module: CalibratedModule | None = None
        self._state: dict[str, Any] | None = None
        self._tried_at = 0
        """Number of steps of the model when it was last tried to calibrate it; zero is never."""
        self.is_late = False
        """Whether the module was calibrated after the last checkpoints of the trainer's own."""

    # ---- before training ------------------------------------------------------------------------

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Remember the calibration of an earlier run."""
        if state is None:
            return
        if not isinstance(state, Mapping) or not is_whole(state.get("step")):
            raise Refused(
                "Expected what a calibration found in the checkpoint, found something else. Go on "
                "from a checkpoint that a private run has saved."
            )
        self._state, self._tried_at = dict(state), int(state["step"])

    def prepare(self, module: LightningModule, run: RunPlan, sampled: SampledData) -> None:
        """Refuse a module or data that cannot be calibrated, before anything is charged."""
        if run.calibration is None:
            return
        self._module = CalibratedModule(module)
        num_tasks = self._module.num_tasks
        self._evidence.calibrated_tasks = num_tasks
        assert run.plan.calibration is not None
        check_shares_grid(run.plan.calibration.stddev(examples_per_unit(run.plan), num_tasks))
        if sampled.every_example is None:
            raise Refused(
                "Expected a data set that can be read in order for a calibration, found another. "
                "Leave calibration out."
            )

    def open(
        self,
        module: LightningModule,
        strategy: Strategy,
        budget: Budget,
        sampled: SampledData,
        guard: Guard,
        moved: Callable[[Any], Any],
        pay_all: Callable[[], None],
        most: int | None,
    ) -> None:
        """Training is about to begin.

        `moved` brings a batch to the device, `pay_all` adds noise that was put off, and `most` is
        how many examples fit into memory at once.
        """
        self._lightning, self._strategy, self._budget = module, strategy, budget
        self._sampled, self._guard = sampled, guard
        self._moved, self._pay_all = moved, pay_all
        self._size = BATCH if most is None else min(BATCH, most)

    # ---- after the last step --------------------------------------------------------------------

    def finish(self, *, is_late: bool = False) -> None:
        """Calibrate the module, if that was not done since its last step. On all ranks.

        It is late if nobody knew that the last step was the last one. A query that fails leaves the
        module as it is, and stays charged.
        """
        self.is_late = self._calibrated() and is_late

    def _calibrated(self) -> bool:
        """Calibrate the module, and return whether it has changed."""
        step = self._budget.step
        if self._module is None or step == self._tried_at:
            return False
        self._tried_at = step
        self._guard.check("before it was calibrated")
        if not from_rank_zero(self._budget.covers_calibration):
            rank_zero_warn(
                "The model was not calibrated: the budget does not cover the query, or the run has "
                "made it before. Raise epsilon, or take fewer steps."
            )
            return False
        self._pay_all()
        from_rank_zero(self._budget.charge_calibration)
        if not self._strategy.is_global_zero:
            self._budget.charge_calibration()
        try:
            lines = self._found(step)
        except Exception as error:  # the model must not be lost with its last touch
            # The words of somebody else's error may hold a value of an example.
            why = error if isinstance(error, Refused) else f"{type(error).__name__} in its pass"
            rank_zero_warn(f"The model was not calibrated: {why}")
            lines = ()
        self._guard.check("in the calibration's pass over the data")
        self._state = {"step": step, **_as_data(lines)}
        if not lines:
            return False
        with self._guard.writing("before it was calibrated"):
            self._module.apply(*lines)
        _announce(lines)
        return not all(line.is_identity for line in lines)

    def kept(self) -> dict[str, Any] | None:
        """What was found, and after how many steps of the model; None if there was no query."""
        return self._state

    # ---- the query ------------------------------------------------------------------------------

    def _found(self, step: int) -> Lines:
        """The lines for the module as it is now."""
        run = self._budget.run
        settings = run.plan.calibration
        assert settings is not None
        assert self._module is not None
        num_tasks = self._module.num_tasks
        counts = self._counted()
        stddev = settings.stddev(examples_per_unit(run.plan), num_tasks)

        def fit() -> Lines:
            noisy = noisy_counts(counts, stddev, run.plan.make_source(self._key), step).numpy()
            points, fit_slope = centres(settings).numpy(), settings.fit_slope
            if num_tasks > 1:
                return fit_tasks(noisy, points, stddev, fit_slope=fit_slope)
            return (fit_line(noisy, points, stddev, fit_slope=fit_slope),)

        return from_rank_zero(fit)

    def _counted(self) -> Tensor:
        """Count all training data, over all ranks. The counts are secret."""
        settings = self._budget.run.plan.calibration
        assert settings is not None
        assert self._module is not None
        assert self._sampled.every_example is not None
        num_slices, num_tasks = self._module.num_slices, self._module.num_tasks
        device = self._strategy.root_device
        histogram = LogitHistogram(settings, device, num_slices, num_tasks)
        loader, remaining = self._sampled.every_example(self._size)
        quiet = not self._strategy.is_global_zero
        bar = tqdm(total=len(loader), desc="Calibrating", delay=1.0, leave=False, disable=quiet)
        with bar, torch.no_grad(), _evaluating(self._lightning):
            batches = iter(loader)
            for i in range(len(loader)):
                size = min(self._size, remaining)
                remaining -= size
                batch = _together(partial(self._next, batches, size))
                read = _together(partial(self._read, batch))
                if i == 0:
                    self._check_places(batch, read)
                _together(partial(_count, histogram, read, size, num_tasks))
                bar.update()
        sum_over_ranks(histogram.counts_SLK)
        return histogram.counts_SLK

    def _next(self, batches: Iterator[Any], num_left: int) -> Any:
        """The next batch, filled up. It has as many examples as it was asked for, or is refused."""
        batch = next(batches)
        found = num_examples(batch)
        if found != max(num_left, 1):  # a rank whose share has ended reads somebody again
            raise Refused(
                "Expected a batch with as many examples as were asked for, found another number "
                "of them: what fills it up would count for somebody. Have the collate function, "
                "and hooks that move batches, keep every example."
            )
        return _filled(batch, self._size)

    def _read(self, batch: Any) -> Read:
        assert self._module is not None
        return self._module.read(self._moved(batch), self._size)

    def _check_places(self, batch: Any, here: Read) -> None:
        """Refuse what depends on other examples, and note logits that depend on places."""
        if self._size < 2:
            return
        # One half backwards in the place of the other, and in its own place the first one only.
        half = self._size // 2
        index = [*([0] * (self._size - half)), *range(half - 1, -1, -1)]
        there = _together(partial(self._read, take_examples(batch, self._size, index)))
        (largest,) = largest_over_ranks([_difference(here, there, index)])
        if largest > _ROUNDING:
            raise Refused(
                "Expected logits, labels and slices of which each depends on its own example, "
                "found that they change with the others in the batch. Leave out what mixes "
                "examples."
            )
        if largest > 0:
            self._evidence.taint(
                "In the calibration an example's logit depended on its place in the batch in its "
                "last bits: a unit may have moved counts of other units than its own."
            )


def _count(histogram: LogitHistogram, read: Read, size: int, num_tasks: int) -> None:
    """Count the first `size` examples that were read."""
    logits_B, labels_B, slices_B = read
    if num_tasks > 1:
        histogram.add_tasks(logits_B[:size], labels_B[:size])
    else:
        slices = None if slices_B is None else slices_B[:size]
        histogram.add(logits_B[:size], labels_B[:size], slices)


def _difference(here: Read, there: Read, index: list[int]) -> float:
    """How much logits changed that were read again, over their size.

    `there` has the examples of `here` with these numbers. The result is infinite if one of them has
    another label or slice there, or a logit that is no number in one of them alone.
    """
    logits, labels = here[0][index].double(), here[1][index].double()
    logits_there, labels_there = there[0].double(), there[1].double()
    is_same = torch.equal(logits.isfinite(), logits_there.isfinite())
    is_same &= torch.equal(labels.isfinite(), labels_there.isfinite())
    is_same &= torch.equal(labels >= 0.5, labels_there >= 0.5)
    if here[2] is not None and there[2] is not None:
        is_same &= torch.equal(here[2][index], there[2])
    if not is_same:
        return math.inf
    return float(((logits_there - logits).abs() / (1.0 + logits.abs())).nan_to_num(0.0).max())


def _filled(batch: Any, size: int) -> Any:
    """A batch of `size` examples: those that are there, and copies of the first."""
    found = num_examples(batch)
    if found == size:
        return batch
    return take_examples(batch, found, [*range(found), *([0] * (size - found))])


def _together(act: Callable[[], T]) -> T:
    """What `act` gives on this rank. If it fails on one rank, all ranks stop here.

    Without this the others would wait for it in the model's exchange of lookups, or add up what it
    has not counted.
    """
    failure: Exception | None = None
    try:
        result = act()
    except Exception as error:
        failure = error
    (is_failed,) = largest_over_ranks([float(failure is not None)])
    if failure is not None:
        raise failure
    if is_failed:
        raise RuntimeError("another rank could not read its data")
    return result


@contextmanager
def _evaluating(module: LightningModule) -> Iterator[None]:
    """Inside, the module predicts as in validation; afterwards it is as if it never had."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        with as_if_never_run(module)():
            module.eval()
            yield
    finally:
        for part, mode in modes:
            part.training = mode


def _as_data(lines: Lines) -> dict[str, Any]:
    """What a checkpoint keeps of the lines: plain values."""
    if len(lines) <= 1:
        return dict(vars(lines[0])) if lines else {}
    return {
        "slopes": tuple(line.slope for line in lines),
        "biases": tuple(line.bias for line in lines),
    }


def _announce(lines: Lines) -> None:
    where = [f" task {task}" if len(lines) > 1 else "" for task in range(len(lines))]
    idle = [task for task, line in zip(where, lines) if line.is_identity]
    if idle:
        rank_zero_warn(
            f"The calibration changed nothing{' of' if len(lines) > 1 else ''}{','.join(idle)}: "
            "its noise is too large for this many examples. Use a smaller noise_multiplier in it."
        )
    for task, found in zip(where, lines):
        if not found.is_identity:
            slices = f", and biases of {len(found.slice_biases):,} slices"
            rank_zero_info(
                f"Calibrated{task}: slope {found.slope:.4g}, bias {found.bias:+.4g}"
                f"{slices if found.slice_biases else ''}."
            )

"""Everything around the private step that must hold for its epsilon to be true.

`guard.Guard` sees to it that nothing moves but what was released. `deliveries.Deliveries` sees to
it that every batch is one that the plan drew, and is used once. `probe.coupling.Probe` measures
that examples do not depend on each other. The perimeter calls each of them when a batch meets it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_dpsparse.plan import PrivacyPlan
from lightning_dpsparse.plugin import refusals
from lightning_dpsparse.plugin.deliveries import Delivery
from lightning_dpsparse.plugin.guard import Guard
from lightning_dpsparse.plugin.logs import Logs
from lightning_dpsparse.plugin.probe.coupling import Probe, is_due
from lightning_dpsparse.plugin.run_data import RunData
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.examples import tensors
from lightning_dpsparse.sharded.private import PrivateSteps


def is_probed(plan: PrivacyPlan) -> bool:
    """Whether it is measured that examples do not depend on each other.

    It is not where the plan claims no privacy, or where it says that the user knows.
    """
    return not plan.faults() and plan.assume_independent_examples is None


class Perimeter:
    """Watches one private run that has started, step by step."""

    def __init__(
        self,
        plan: PrivacyPlan,
        module: LightningModule,
        trainer: Trainer,
        steps: PrivateSteps,
        data: RunData,
        logs: Logs,
        taint: Callable[[str], None],
    ) -> None:
        self._module, self._trainer, self._steps = module, trainer, steps
        self._data, self._logs = data, logs
        self._is_probed = is_probed(plan)
        self._leaders: Sequence[int] | None = None
        """Positions of examples of which no two belong to one unit; None is all."""
        self.forward: Callable[[Any], Tensor] | None = None
        """The losses of a batch as the loader gave it, for the probe."""
        self._arrived: tuple[Any, list[int]] | None = None
        is_trusted = plan.assume_post_processing is not None
        self.guard = Guard(module, trainer, steps, taint, is_trusted=is_trusted)
        self.guard.check_members()

    # ---- in the order in which a batch meets them ----------------------------------------------

    def note_arrival(self, batch: Any) -> None:
        """The batch is on its device: from here on only training_step may touch it."""
        self._arrived = batch, [tensor._version for tensor in tensors(batch)]

    def before_step(self, batch: Any) -> Delivery:
        """Check all that can be checked before the step is charged."""
        refusals.check_accumulation(self._trainer)
        refusals.check_monitored_schedules(self._trainer, self._logs)
        self.guard.check("since the last step")
        if self._arrived is not None:
            arrived, versions = self._arrived
            if arrived is not batch or [t._version for t in tensors(batch)] != versions:
                raise Refused(
                    "Expected the batch as the loader and the transfer hooks gave it, found that "
                    "a hook replaced it or wrote to it before training_step. Change batches in "
                    "on_after_batch_transfer or in training_step, where it is measured."
                )
        return self._data.deliveries.take()

    def start_step(self, step: int, unit_sizes: Sequence[int] | None, delivery: Delivery) -> None:
        """The step has been charged: ready the engine for its batch."""
        self._leaders = None
        if unit_sizes is not None:
            self._leaders = list(accumulate(unit_sizes, initial=0))[:-1]
        if self._steps.start(step, unit_sizes, delivery.num_examples):
            self.guard.follow()
        self._steps.paths.is_probe_due = self._is_probed and is_due(step)

    def probe(self) -> None:
        """Measure whether the examples of this step depend on each other. On all ranks."""
        assert self.forward is not None
        delivery = self._data.deliveries.under_way
        assert delivery is not None
        found_examples = Probe(
            self._module,
            self._trainer,
            self._steps,
            self.forward,
            delivery,
            self._data.sampled.reader,
            self._leaders,
        ).run()
        if found_examples:
            self._steps.paths.note_probed()

    # ---- between steps --------------------------------------------------------------------------

    def before_save(self) -> None:
        """The weights are about to be written to a file."""
        self.guard.check("before it was saved", everything=True)

    def before_validation(self) -> None:
        """Validation is about to begin: it may read training data, or write to the module."""
        if self._data.is_used_for_validation():
            self._logs.watch_validation()
        self.guard.before_validation()

    def close(self) -> None:
        """Training is over."""
        self.guard.close()

"""Everything around the private step that must hold for its epsilon to be true.

`Guard`: nothing moves but what was released. `Deliveries`: every batch is one that the plan drew,
and is used once. `Probe`: examples do not depend on each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_dpsparse.plan import PrivacyPlan
from lightning_dpsparse.plugin import refusals
from lightning_dpsparse.plugin.deliveries import Deliveries, Delivery
from lightning_dpsparse.plugin.guard import Guard
from lightning_dpsparse.plugin.logs import Logs
from lightning_dpsparse.plugin.probe.coupling import Probe, Reader, is_due
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.examples import tensors
from lightning_dpsparse.sharded.private import PrivateSteps


class Perimeter:
    """Watches one private run, step by step."""

    def __init__(
        self,
        plan: PrivacyPlan,
        module: LightningModule,
        trainer: Trainer,
        deliveries: Deliveries,
        reader: Reader | None,
        logs: Logs,
        taint: Callable[[str], None],
    ) -> None:
        self._plan, self._module, self._trainer = plan, module, trainer
        self._deliveries, self._reader, self._logs = deliveries, reader, logs
        self._taint = taint
        self._guard: Guard | None = None
        self._steps: PrivateSteps | None = None
        self._leaders: Sequence[int] | None = None
        self.forward: Callable[[Any], Tensor] | None = None
        """The losses of a batch as the loader gave it."""
        self._arrived: tuple[Any, list[int]] | None = None

    @property
    def probes(self) -> bool:
        """Where nothing is claimed nothing need be measured."""
        return not self._plan.faults() and self._plan.assume_independent_examples is None

    def open(self, steps: PrivateSteps) -> None:
        """Before the first step."""
        self._steps = steps
        is_trusted = self._plan.assume_post_processing is not None
        self._guard = Guard(self._module, self._trainer, steps, self._taint, is_trusted=is_trusted)
        self._guard.check_members()

    @property
    def guard(self) -> Guard:
        assert self._guard is not None
        return self._guard

    # ---- in the order in which a batch meets them ----------------------------------------------

    def note_arrival(self, batch: Any) -> None:
        """The batch is on its device: from here on only training_step may touch it."""
        self._arrived = batch, [tensor._version for tensor in tensors(batch)]

    def before_step(self, batch: Any) -> Delivery:
        """Nothing has been charged yet."""
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
        return self._deliveries.take()

    def start_step(self, step: int, unit_sizes: Sequence[int] | None, delivery: Delivery) -> None:
        assert self._steps is not None
        self._leaders = None
        if unit_sizes is not None:
            self._leaders = [sum(unit_sizes[:u]) for u in range(len(unit_sizes))]
        if self._steps.start(step, unit_sizes, delivery.num_examples):
            self.guard.follow()
        self._steps.is_probe_due = self.probes and is_due(step)

    def probe(self) -> None:
        """All ranks call it together."""
        assert self._steps is not None
        assert self.forward is not None
        delivery = self._deliveries.under_way
        assert delivery is not None
        found_examples = Probe(
            self._module,
            self._trainer,
            self._steps,
            self.forward,
            delivery,
            self._reader,
            self._leaders,
        ).run()
        if found_examples:
            self._steps.note_path()

    def before_release(self) -> None:
        self.guard.check("in the forward pass")

    def after_release(self) -> None:
        self.guard.note_tables()

    def before_update(self) -> None:
        self.guard.check_gradients()

    def after_update(self) -> None:
        self.guard.note()

    def before_save(self) -> None:
        if self._guard is not None:
            self._guard.check("before it was saved", everything=True)

    def close(self) -> None:
        if self._guard is not None:
            self._guard.close()
            self._guard = None

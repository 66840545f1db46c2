"""The data of a private run: which loader reads it, and who is drawn for each step.

The accounting of a plan holds for batches that are drawn as the plan says. So the user's training
loader is rebuilt over batches that the plan draws (`private_data`), and every batch is followed
from the loader to its step (`deliveries`). What the accountant has to know of the data, such as
its size and the sampling rate, is known once the loader has been rebuilt. Then the user's plan can
be resolved to the plan of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lightning.pytorch import Trainer
from torch import nn

from lightning_dpsparse.noise.keys import RunKey
from lightning_dpsparse.plan import PrivacyPlan
from lightning_dpsparse.plugin.datasets import shares_examples
from lightning_dpsparse.plugin.deliveries import Deliveries, delivered
from lightning_dpsparse.plugin.private_data import RankContext, SampledData, noted, private_loader
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.run_plan import RunPlan, resolve
from lightning_dpsparse.sharded.features import public_tables
from lightning_dpsparse.sharded.process_group import from_rank_zero


class RunData:
    """The training data of one run.

    Args:
        key: The key that draws the batches.
        present_step: Returns the step of the schedule that the run is at, by its ledger.
    """

    def __init__(self, trainer: Trainer, key: RunKey, present_step: Callable[[], int]) -> None:
        self._trainer, self._key, self._present_step = trainer, key, present_step
        self._sampled: SampledData | None = None
        self.deliveries = Deliveries()

    def private(self, loader: object, plan: PrivacyPlan) -> object:
        """The user's training loader, over batches that the plan draws."""
        trainer = self._trainer
        place = RankContext(
            trainer.global_rank,
            trainer.world_size,
            self._key,
            self._present_step,
            trainer.max_steps if trainer.max_steps > 0 else None,
            trainer.max_epochs == 1,
            self.deliveries,
        )
        loader, sampled = private_loader(loader, plan, place)
        if self._sampled is not None and self._sampled.accounted != sampled.accounted:
            raise Refused(
                "Expected one training loader, the same in every epoch, found another: the "
                "accounting was made for the first. Put the data into one data set."
            )
        self._sampled = sampled
        return loader

    def watched(self, loader: object, plan: PrivacyPlan) -> object:
        """The same loader. Everything that it delivers is noted."""
        return delivered(noted(loader, plan, self.deliveries), self.deliveries)

    @property
    def sampled(self) -> SampledData:
        """What the accounting and the step know of the data. The loader must have been rebuilt."""
        assert self._sampled is not None
        return self._sampled

    def resolve(self, plan: PrivacyPlan, module: nn.Module) -> RunPlan:
        """The plan of the run: the user's plan, with this data, this model and its noise."""
        planned = self._trainer.estimated_stepping_batches  # asks the ranks: on all of them
        sampled, tables = self.sampled, public_tables(module)
        plan.mechanism.check_tables(tables)
        dense = (name for name, _ in module.named_parameters())
        plan.clipping.check_parameters([*(table.name for table in tables), *dense])
        return from_rank_zero(  # calibration takes seconds: once is enough
            lambda: resolve(
                plan,
                sampled.phases,
                sampled.num_units,
                sampled.expected_batch,
                None if math.isinf(planned) else int(planned),
                sampled.steps_per_pass,
                tables,
            )
        )

    def unit_sizes(self, step: int) -> Sequence[int] | None:
        """How many examples each user has in this rank's batch; None if units are examples."""
        sampler = self.sampled.sampler
        return None if sampler is None else sampler.draw(step)[1]

    def is_used_for_validation(self) -> bool:
        """Whether a validation loader is known to read training examples."""
        loaders = self._trainer.val_dataloaders
        loaders = loaders if isinstance(loaders, (list, tuple)) else [loaders]
        training = self.sampled.dataset
        return any(shares_examples(training, getattr(x, "dataset", None)) for x in loaders)

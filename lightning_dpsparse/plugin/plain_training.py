"""Training without a plan: nobody charges for its steps, and the weights remember that.

Weights that were trained privately may not go on like this under the same name: every further step
would be unprotected and uncounted. Weights that were never private may, and their history then
tells how many steps were taken on which data set. A private run that goes on from them asks for it
(`lineage`).
"""

from __future__ import annotations

from lightning.pytorch import LightningModule

from lightning_dpsparse.plugin import lineage, refusals
from lightning_dpsparse.plugin.datasets import digest
from lightning_dpsparse.plugin.history import History, history_of


class PlainTraining:
    """Counts the steps of one `fit` without a plan, which is about to begin."""

    def __init__(self, module: LightningModule) -> None:
        self._module, self._before = module, history_of(module)
        refusals.check_private_history(self._before)
        self._first_step = module.trainer.global_step

    def history(self) -> History:
        """The history of the weights as they are now."""
        trainer = self._module.trainer
        data = digest(getattr(trainer.train_dataloader, "dataset", None))
        return lineage.after_steps(self._before, data, trainer.global_step - self._first_step)

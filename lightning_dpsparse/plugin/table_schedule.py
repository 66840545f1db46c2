"""The learning rate of the tables follows the schedule of the dense layers.

The fused optimizer of the tables is FBGEMM's, and no scheduler of Lightning's knows it. A module
configures a scheduler for its own optimizer. Before every step the factor by which that scheduler
has changed the learning rate is applied to the tables' learning rate too.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from lightning_dpsparse.sharded import fused
from lightning_dpsparse.sharded.fused import FusedOptimizer


class TableSchedule:
    """Sets the learning rate of a module's sharded tables."""

    def __init__(self, module: nn.Module, settings: FusedOptimizer) -> None:
        self._settings = settings
        self._tables = fused.combined_fused_optimizer(module)
        self._learning_rate = settings.learning_rate
        fused.set_learning_rate(self._tables, self._learning_rate)

    def follow(self, optimizers: Sequence[Optimizer]) -> None:
        """Scale the tables' learning rate as the module's scheduler scaled its optimizer's."""
        if not self._settings.follow_schedule or not optimizers:
            return
        if not optimizers[0].param_groups:  # configure_optimizers gave none
            return
        group = optimizers[0].param_groups[0]
        # OneCycleLR keeps its peak in the group and overwrites initial_lr.
        base = group.get("max_lr", group.get("initial_lr"))
        factor = float(group["lr"]) / float(base) if base else 1.0
        learning_rate = self._settings.learning_rate * factor
        if learning_rate != self._learning_rate:
            fused.set_learning_rate(self._tables, learning_rate)
            self._learning_rate = learning_rate

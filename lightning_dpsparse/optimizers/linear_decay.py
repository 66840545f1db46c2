"""A learning rate that falls to zero, in a straight line, at the last step.

Under noise a constant learning rate ends in a cloud: the last steps move the weights by noise as
far as the first ones did. With a rate that falls to zero, late noise counts for little, and the
last weights are themselves an average of the last part of the way.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lightning_dpsparse.checks import check_whole
from lightning_dpsparse.refused import Refused

_REMEDY = "Set max_steps or max_epochs, or give LinearDecay its total_steps."


class LinearDecay(LRScheduler):
    """Learning rates fall from what the optimizer has to zero: rate_t = rate_0 (1 - t / T).

    The schedule is public, so it costs no privacy. Tables follow it if
    `FusedOptimizer.follow_schedule` is on, as it is by default.

    Args:
        optimizer: Whose learning rates fall.
        total_steps: T. The models of this package fill in the steps that the trainer plans. A
            module of your own gives `self.trainer.estimated_stepping_batches`, and the interval
            "step" to Lightning, which otherwise would lower the rate once in an epoch.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int | None = None) -> None:
        self.total_steps: int | None = None
        if total_steps is not None:
            self.set_total_steps(total_steps)
        super().__init__(optimizer)

    def set_total_steps(self, steps: float) -> None:
        """Plan for so many steps in all."""
        if steps == math.inf:
            raise Refused(
                "Expected a number of steps for LinearDecay to fall to zero in, found training "
                f"without end. {_REMEDY}"
            )
        check_whole("total_steps", steps, remedy=_REMEDY)
        self.total_steps = int(steps)

    def known_steps(self) -> int:
        """T, if somebody has said it."""
        if self.total_steps is None:
            raise Refused(
                "Expected LinearDecay to know the number of steps, found that nobody said. "
                f"{_REMEDY}"
            )
        return self.total_steps

    @override
    def get_lr(self) -> list[Any]:
        if self.last_epoch == 0:
            return list(self.base_lrs)
        share = max(0.0, 1.0 - self.last_epoch / self.known_steps())
        return [rate * share for rate in self.base_lrs]

    @override
    def state_dict(self) -> dict[str, Any]:
        """How far it has come. A run that goes on may plan another number of steps."""
        state: dict[str, Any] = super().state_dict()
        return {name: value for name, value in state.items() if name != "total_steps"}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there. The next step has the rate of the present plan, not of the old one.

        Restore the optimizer first, as Lightning does: its state has the old rate.
        """
        super().load_state_dict(state_dict)
        if self.total_steps is None:
            return
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

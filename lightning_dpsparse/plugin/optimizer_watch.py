"""What the optimizers hold beside parameters: their state, and their settings.

The state of an optimizer (momenta, sums of squares) may only change in an update, where all that it
sees is released gradients. Its settings may follow schedulers. A learning rate that other code sets
may follow anything, the training loss too: the report says so. `guard` asks in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

Mark = tuple[int, int, int]


def mark_of(value: Tensor) -> Mark:
    """Changes whenever torch writes to the tensor, or another takes its place."""
    return id(value), value._version, value.data_ptr()


_BY_HAND = (
    "The optimizer's learning rate or another setting was changed by code other than a "
    "scheduler's. If training data decided how, that is not accounted for."
)

_OWN_SCHEDULE = (
    "Schedulers are stepped by lr_scheduler_step of the module's own. If training data decides "
    "how, that is not accounted for."
)


class OptimizerWatch:
    """Watches everything in the optimizers of one run but the parameters."""

    def __init__(self, trainer: Trainer, taint: Callable[[str], None]) -> None:
        self._trainer, self._taint = trainer, taint
        if is_overridden("lr_scheduler_step", trainer.lightning_module):
            taint(_OWN_SCHEDULE)
        self.note()

    def optimizers(self) -> list[Optimizer]:
        """The trainer's optimizers, without Lightning's wrapper."""
        return [getattr(o, "optimizer", o) for o in self._trainer.optimizers]

    def note(self) -> None:
        """State and settings are as they should be: at the beginning, and after an update."""
        self._marks = list(self._state())
        self._settings = list(self._all_settings())

    def moved(self) -> bool:
        """Whether state changed since `note`. Settings that changed are noted for the report."""
        now = list(self._all_settings())
        if now != self._settings:
            if not self._is_by_schedule(now):
                self._taint(_BY_HAND)
            self._settings = now
        return list(self._state()) != self._marks

    def _state(self) -> Iterator[Mark]:
        for optimizer in self.optimizers():
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        yield mark_of(value)

    def _all_settings(self) -> Iterator[dict[str, Any]]:
        for optimizer in self.optimizers():
            for group in optimizer.param_groups:
                yield {
                    name: _plain(value)
                    for name, value in group.items()
                    if name not in ("params", "initial_lr", "max_lr", "min_lr")
                }

    def _is_by_schedule(self, now: list[dict[str, Any]]) -> bool:
        """Learning rates must be what a scheduler set last. Momentum may cycle with one."""
        schedulers = [config.scheduler for config in self._trainer.lr_scheduler_configs]
        rates = [_plain(rate) for s in schedulers for rate in getattr(s, "_last_lr", [])]
        for callback in self._trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, BackboneFinetuning):  # which follows the epoch
                rates.append(callback.previous_backbone_lr)
        may_cycle = any(getattr(scheduler, "cycle_momentum", False) for scheduler in schedulers)
        free = ("lr", "momentum", "betas") if may_cycle else ("lr",)
        return all(
            found.get("lr") in (before.get("lr"), *rates)
            and _without(found, free) == _without(before, free)
            for found, before in zip(now, self._settings)  # groups that are new may be set at will
        )


def _without(settings: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}


def _plain(value: Any) -> Any:
    """A setting that can be compared. Tensors go by identity and version: no wait for a device."""
    return mark_of(value) if isinstance(value, torch.Tensor) else value

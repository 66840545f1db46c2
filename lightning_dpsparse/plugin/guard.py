"""Nothing moves but what was released.

Between two releases every parameter and buffer of the module stays as it is. What a step may change
are its trainable parameters, in the optimizer's update, by gradients that were released just now.
Anything else (a running mean that a layer keeps, a weight that a hook writes, a parameter of
somebody else's in the optimizer) would carry data into the model without noise, and is refused.

`tensor_watch` and `optimizer_watch` find out what changed. The guard knows when it may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

from lightning_dpsparse.plugin.optimizer_watch import OptimizerWatch
from lightning_dpsparse.plugin.tensor_watch import TensorWatch
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.private import PrivateSteps

_EVERY_STEP = (
    "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
    "on_train_batch_start", "on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end",
    "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step",
    "on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device",
)  # fmt: skip
"""Hooks in which user code may run between two steps."""


class Guard:
    """Watches a module and its optimizers through a private run.

    Args:
        taint: Is called with what the report should say.
        is_trusted: The plan says that whatever else writes is post-processing. Then nothing is
            compared but gradients and optimizers.
    """

    def __init__(
        self,
        module: LightningModule,
        trainer: Trainer,
        steps: PrivateSteps,
        taint: Callable[[str], None],
        *,
        is_trusted: bool,
    ) -> None:
        self._steps, self._is_trusted = steps, is_trusted
        self._tensors = TensorWatch(
            module, steps.dense.parameters, adds_up_trainable=_has_hooks(module, trainer)
        )
        self._optimizers = OptimizerWatch(trainer, taint)
        self._names = {id(p): name for name, p in steps.dense.parameters.all.items()}
        self._members: list[list[int]] = []
        """Identities of the optimizers' parameters when they were last checked."""
        self.note_tables()
        self._undo = [
            _allow(callback, self.writing)
            for callback in trainer.callbacks  # type: ignore[attr-defined]
            if isinstance(callback, (StochasticWeightAveraging, WeightAveraging))
        ]

    def close(self) -> None:
        """Leave the trainer's callbacks as they were."""
        for undo in self._undo:
            undo()
        self._undo = []

    # ---- what is as it should be ----------------------------------------------------------------

    def note(self) -> None:
        """Everything is as it should be: after an update."""
        self._tensors.note()
        self._optimizers.note()
        self.note_tables()

    def note_tables(self) -> None:
        """The tables are as they should be: after a release."""
        self._tables = self._steps.tables.versions()

    def follow(self) -> None:
        """Parameters were frozen or thawed: from now on other ones may change."""
        self._tensors.note_frozen()
        self._optimizers.note()
        self.note_tables()

    # ---- comparisons ----------------------------------------------------------------------------

    def check(self, when: str, *, everything: bool = False) -> None:
        """Refuse to go on if anything moved since it was noted.

        `everything` is slower, for weights that are about to be saved.
        """
        if self._is_trusted:
            return
        moved = self._tensors.moved(everything=everything)
        if not moved and self._steps.tables.versions() != self._tables:
            moved = ["the tables"]
        if self._optimizers.moved() and not moved:
            moved = ["the optimizer's state"]
        if moved:
            raise Refused(_message(moved, when))

    def check_gradients(self) -> None:
        """Right before an update: what the optimizers are about to use was released just now."""
        self.check("in a hook after the backward pass")
        self.check_members()
        released = self._steps.dense.released
        for optimizer in self._optimizers.optimizers():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    gradient = parameter.grad
                    if gradient is None:
                        continue
                    version = released.get(id(parameter))
                    if version is None or version[0] is not gradient:
                        raise Refused(_gradient_message(self._names[id(parameter)], "another"))
                    if version[1] != gradient._version and not self._is_trusted:
                        raise Refused(_gradient_message(self._names[id(parameter)], "changed"))

    def check_members(self) -> None:
        """Refuse optimizers that hold parameters of somebody else's."""
        optimizers = self._optimizers.optimizers()
        members = [[id(p) for g in o.param_groups for p in g["params"]] for o in optimizers]
        if members == self._members:
            return
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in self._names:
                        raise Refused(
                            f"Expected {type(optimizer).__name__} to hold parameters of the module "
                            f"only, found another, of shape {tuple(parameter.shape)}: its gradient "
                            "would be neither clipped nor noised. Register it on the module."
                        )
        self._members = members

    def before_validation(self) -> None:
        """User code is about to run on the module, once in a while: all values are noted."""
        self.check("before validation")
        self._tensors.note_values()

    def after_validation(self) -> None:
        """Refuse to go on if user code wrote to the module in validation."""
        if not self._is_trusted:
            moved = self._tensors.changed_values()
            if moved:
                raise Refused(_message(moved, "in validation"))
        self.check("in validation")

    @contextmanager
    def writing(self, when: str = "before weights were averaged") -> Iterator[None]:
        """What is written inside is made of released values alone; `when` it is, for messages."""
        self.check(when)
        yield
        self.follow()


def _allow(
    callback: Callback, writing: Callable[[], AbstractContextManager[None]]
) -> Callable[[], None]:
    """Let a callback of Lightning's that only averages weights write. Returns how to undo it."""
    hooks = [name for name in dir(Callback) if name.startswith("on_") or name == "setup"]
    wrapped = [n for n in hooks if getattr(type(callback), n) is not getattr(Callback, n)]

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with writing():
                return method(*args, **kwargs)

        return call

    for name in wrapped:
        setattr(callback, name, wrap(getattr(callback, name)))

    def undo() -> None:
        for name in wrapped:
            delattr(callback, name)

    return undo


def _has_hooks(module: LightningModule, trainer: Trainer) -> bool:
    """Whether code of the user's runs between steps, where `.data` may be written to."""
    ours = ("lightning.", "lightning_dpsparse.")
    if any(
        not type(callback).__module__.startswith(ours)
        for callback in trainer.callbacks  # type: ignore[attr-defined]
    ):
        return True
    overridden = (
        next((vars(kind)[n] for kind in type(module).__mro__ if n in vars(kind)), None)
        for n in _EVERY_STEP
    )
    return any(
        hook is not None and not getattr(hook, "__module__", "").startswith(ours)
        for hook in overridden
    )


def _message(moved: list[str], when: str) -> str:
    named = ", ".join(repr(name) for name in moved[:5]) + (" and others" if moved[5:] else "")
    return (
        f"Expected nothing to change but what a private step releases, found that {named} changed "
        f"{when}: it would carry data into the model without noise. Leave out running statistics "
        "and writes of your own (LayerNorm for batch statistics, no max_norm). If what is written "
        "is made of released weights alone, say why in the plan: assume_post_processing=..."
    )


def _gradient_message(name: str, what: str) -> str:
    found = "one that was not" if what == "another" else "that it was changed since"
    return (
        f"Expected the gradient of {name!r} as the private step released it, found {found}. Leave "
        "gradients alone between backward and the update; if they are only rescaled by what they "
        "are, say so in the plan: assume_post_processing=..."
    )

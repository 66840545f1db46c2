"""Nothing moves but what was released.

Between two releases every parameter and buffer of the module stays as it is. What a step may change
are its trainable parameters, in the optimizer's update, by gradients that were released just now.
Anything else (a running mean that a layer keeps, a weight that a hook writes, a parameter of
somebody else's in the optimizer) would carry data into the model without noise.

Whether a tensor was written to can be told from its version counter, its identity and its memory,
without looking at a value: some 15 microseconds a step for a DLRM. `.data` and some of torch's own
kernels write without counting. So small frozen tensors, and trainable ones where a hook of the
user's runs between steps, are also added up, bit by bit, and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor
from torch.optim import Optimizer

from lightning_dpsparse.plugin.optimizer_watch import Mark, OptimizerWatch, mark_of
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.private import PrivateSteps
from lightning_dpsparse.sharded.shards import dense_buffers

_FEW = 1 << 16
"""Numbers of the smallest frozen tensors, which are added up in every step. All are, before
anything is saved."""

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
        is_trusted: The plan says that whatever else writes is post-processing: nothing is compared
            but gradients and optimizers.
        taint: Called with what the report should say.
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
        self._module, self._trainer, self._steps = module, trainer, steps
        self._is_trusted = is_trusted
        self._looks_at_values = _has_hooks(module, trainer)
        self._buffers = {name: (owner, key) for name, owner, key in dense_buffers(module)}
        self._names = {id(p): name for name, p in steps.parameters.all.items()}
        self._optimized: list[list[int]] = []
        self._watch = OptimizerWatch(trainer, taint)
        self._is_settled = False
        self._undo = [
            self._allow(callback)
            for callback in trainer.callbacks  # type: ignore[attr-defined]
            if isinstance(callback, (StochasticWeightAveraging, WeightAveraging))
        ]
        self.note()

    def close(self) -> None:
        for undo in self._undo:
            undo()
        self._undo = []

    # ---- what is where --------------------------------------------------------------------------

    def _frozen(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._steps.parameters.all.items():
            if name not in self._steps.parameters.trainable:
                yield name, parameter
        for name, (owner, key) in self._buffers.items():
            value = owner._buffers.get(key)
            if value is not None:
                yield name, value

    def _trainable(self) -> Iterable[tuple[str, Tensor]]:
        return self._steps.parameters.trainable.items()

    def note(self) -> None:
        """As it is now is how it should be: at the beginning, and after an update."""
        self._marks = {name: mark_of(value) for name, value in self._all()}
        self._watch.note()
        self.note_tables()
        if not self._is_settled:  # they do not change
            frozen = sorted(self._frozen(), key=lambda item: item[1].numel())
            self._frozen_sums = {name: _sum_of_bits(value) for name, value in frozen}
            room = accumulate(value.numel() for _, value in frozen)
            self._small = {name for (name, _), total in zip(frozen, room) if total <= _FEW}
            self._is_settled = True
        self._sums = (
            {name: _sum_of_bits(value) for name, value in self._trainable()}
            if self._looks_at_values
            else {}
        )

    def note_tables(self) -> None:
        """The tables are as they should be: after a release."""
        self._tables = self._steps.table_versions()

    def _all(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._trainable()
        yield from self._frozen()

    def follow(self) -> None:
        """Parameters were frozen or thawed: what is frozen now is another set."""
        self._is_settled = False
        self.note()

    # ---- comparisons ----------------------------------------------------------------------------

    def check(self, when: str, *, everything: bool = False) -> None:
        """Refuse to go on if anything moved since `note`. Before it is saved: `everything`."""
        if self._is_trusted:
            return
        now = {name: mark_of(value) for name, value in self._all()}
        moved = [] if now == self._marks else _differing(now, self._marks)
        if not moved:
            frozen = ((n, v) for n, v in self._frozen() if everything or n in self._small)
            moved = _changed(frozen, self._frozen_sums)
        if not moved and self._sums:
            moved = _changed(self._trainable(), self._sums)
        if not moved and self._steps.table_versions() != self._tables:
            moved = ["the tables"]
        if self._watch.moved() and not moved:
            moved = ["the optimizer's state"]
        if moved:
            raise Refused(_message(moved, when))

    def check_gradients(self) -> None:
        """Right before an update: what the optimizers are about to use was released just now."""
        self.check("in a hook after the backward pass")
        released = self._steps.released
        ids = [
            [id(p) for g in o.param_groups for p in g["params"]] for o in self._watch.optimizers()
        ]
        if ids != self._optimized:
            self._check_members(self._watch.optimizers())
            self._optimized = ids
        for optimizer in self._watch.optimizers():
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

    def _check_members(self, optimizers: list[Optimizer]) -> None:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in self._names:
                        raise Refused(
                            f"Expected {type(optimizer).__name__} to hold parameters of the module "
                            f"only, found another, of shape {tuple(parameter.shape)}: its gradient "
                            "would be neither clipped nor noised. Register it on the module."
                        )

    def check_members(self) -> None:
        """Before training: nobody else's parameters are in the optimizers."""
        self._check_members(self._watch.optimizers())

    def before_evaluation(self) -> None:
        """User code is about to run on the module, once in a while: all values are noted."""
        self.check("before validation")
        self._before = {name: _sum_of_bits(value) for name, value in self._trainable()}

    def after_evaluation(self) -> None:
        if not self._is_trusted:
            moved = _changed(self._trainable(), self._before)
            if moved:
                raise Refused(_message(moved, "in validation"))
        self.check("in validation")

    # ---- callbacks of Lightning's that only average --------------------------------------------

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """What is written in here is made of released weights alone."""
        self.check("before weights were averaged")
        yield
        self.note()

    def _allow(self, callback: Callback) -> Callable[[], None]:
        hooks = [name for name in dir(Callback) if name.startswith("on_") or name == "setup"]
        wrapped = [n for n in hooks if getattr(type(callback), n) is not getattr(Callback, n)]

        def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                with self._writing():
                    return method(*args, **kwargs)

            return call

        for name in wrapped:
            setattr(callback, name, wrap(getattr(callback, name)))

        def undo() -> None:
            for name in wrapped:
                delattr(callback, name)

        return undo


def _differing(now: dict[str, Mark], then: dict[str, Mark]) -> list[str]:
    return sorted(name for name in now | then if now.get(name) != then.get(name))


def _sum_of_bits(value: Tensor) -> Tensor:
    """A number that changes with any bit, whatever the type. Stays on the device."""
    flat = value.detach().contiguous().view(-1)
    if flat.element_size() in (1, 2, 4, 8) and not flat.is_complex() and flat.dtype != torch.bool:
        sizes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        flat = flat.view(sizes[flat.element_size()])
    return flat.sum() if not flat.is_complex() else torch.view_as_real(flat).sum()


def _changed(values: Iterable[tuple[str, Tensor]], sums: dict[str, Tensor]) -> list[str]:
    pairs = [(name, _sum_of_bits(value), sums.get(name)) for name, value in values]
    known = [(name, now, then) for name, now, then in pairs if then is not None]
    if not known:
        return []
    same = torch.stack([now == then for _, now, then in known])
    if bool(same.all()):  # one wait
        return []
    return sorted(name for (name, _, _), is_same in zip(known, same.tolist()) if not is_same)


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

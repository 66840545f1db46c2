"""The dense parameters of a private run: which of them learn, and that none learns without noise.

Parameters may be frozen and thawed during training, so every step asks which of them learn. A
backward pass of the user's own would leave gradients that are neither clipped nor noised, which the
dense optimizer would then use. It is refused.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.shards import tables_hidden


class DenseParameters:
    """All parameters outside the tables, by name; those that require a gradient are trainable.

    A parameter may be frozen or thawed between two steps, as in gradual unfreezing: from then on it
    is left alone, or clipped and noised with the others.

    Guarantees: a gradient that autograd itself leaves on one of them, by a backward pass of the
    user's own, is an error at once.
    """

    def __init__(self, module: nn.Module) -> None:
        with tables_hidden(module):
            self.all: dict[str, nn.Parameter] = dict(module.named_parameters())
        self.trainable: dict[str, nn.Parameter] = {}
        self._was_trainable: list[bool] = []
        self._handles: list[Any] = []
        self.follow()

    def follow(self) -> bool:
        """Note which parameters are trainable now. Returns whether that has changed."""
        is_trainable = [parameter.requires_grad for parameter in self.all.values()]
        if is_trainable == self._was_trainable:
            return False
        self.close()
        self._was_trainable = is_trainable
        self.trainable = {name: p for name, p in self.all.items() if p.requires_grad}
        for name, parameter in self.trainable.items():
            refuse = partial(_refuse, name)
            self._handles.append(parameter.register_post_accumulate_grad_hook(refuse))
        return True

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _refuse(name: str, parameter: Tensor) -> None:
    parameter.grad = None
    raise Refused(
        f"Expected gradients that a private step released, found one that a backward pass of its "
        f"own left on {name!r}: neither clipped nor noised. Return all losses from training_step, "
        "one per example, and call backward() nowhere."
    )

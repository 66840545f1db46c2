"""Which of a module's dense tensors changed since they were last noted.

Whether a tensor was written to can be told from its version counter, its identity and its memory,
without looking at a value: some 15 microseconds a step for a DLRM. `.data` and some of torch's own
kernels write without counting. So small frozen tensors, and trainable ones where a hook of the
user's runs between steps, are also added up, bit by bit, and compared.

`guard` decides when tensors may change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

import torch
from torch import Tensor, nn

from lightning_dpsparse.plugin.optimizer_watch import Mark, mark_of
from lightning_dpsparse.sharded.dense_parameters import DenseParameters
from lightning_dpsparse.sharded.shards import dense_buffers

_FEW = 1 << 16
"""How many numbers of frozen tensors, the smallest first, are added up in every step. Before
anything is saved, all are."""


class TensorWatch:
    """Watches the parameters and buffers of a module, its tables aside.

    Args:
        adds_up_trainable: Whether trainable parameters are also compared by their values in every
            step.
    """

    def __init__(
        self, module: nn.Module, parameters: DenseParameters, *, adds_up_trainable: bool
    ) -> None:
        self._parameters, self._adds_up_trainable = parameters, adds_up_trainable
        self._buffers = {name: (owner, key) for name, owner, key in dense_buffers(module)}
        self.note_frozen()

    def note(self) -> None:
        """All tensors are as they should be, and frozen ones have not changed."""
        self._marks = {name: mark_of(value) for name, value in self._all()}
        self._sums = self._sums_of_trainable() if self._adds_up_trainable else {}

    def note_frozen(self) -> None:
        """All tensors are as they should be, and other ones than before may be frozen."""
        frozen = sorted(self._frozen(), key=lambda item: item[1].numel())
        self._frozen_sums = {name: _sum_of_bits(value) for name, value in frozen}
        room = accumulate(value.numel() for _, value in frozen)
        self._small = {name for (name, _), total in zip(frozen, room) if total <= _FEW}
        self.note()

    def moved(self, *, everything: bool) -> list[str]:
        """Names of tensors that changed since they were noted.

        With `everything`, large frozen tensors are compared by their values, too.
        """
        now = {name: mark_of(value) for name, value in self._all()}
        moved = [] if now == self._marks else _differing(now, self._marks)
        if not moved:
            frozen = ((n, v) for n, v in self._frozen() if everything or n in self._small)
            moved = _changed(frozen, self._frozen_sums)
        if not moved and self._sums:
            moved = _changed(self._trainable(), self._sums)
        return moved

    def note_values(self) -> None:
        """Add up all trainable parameters once, for `changed_values`."""
        self._before = self._sums_of_trainable()

    def changed_values(self) -> list[str]:
        """Names of trainable parameters whose values changed since `note_values`."""
        return _changed(self._trainable(), self._before)

    def _frozen(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.all.items():
            if name not in self._parameters.trainable:
                yield name, parameter
        for name, (owner, key) in self._buffers.items():
            value = owner._buffers.get(key)
            if value is not None:
                yield name, value

    def _trainable(self) -> Iterable[tuple[str, Tensor]]:
        return self._parameters.trainable.items()

    def _all(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._trainable()
        yield from self._frozen()

    def _sums_of_trainable(self) -> dict[str, Tensor]:
        return {name: _sum_of_bits(value) for name, value in self._trainable()}


def _differing(now: dict[str, Mark], then: dict[str, Mark]) -> list[str]:
    return sorted(name for name in now | then if now.get(name) != then.get(name))


def _sum_of_bits(value: Tensor) -> Tensor:
    """A number that changes with any bit, whatever the type. It stays on the device."""
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
    if bool(same.all()):  # one wait for the device
        return []
    return sorted(name for (name, _, _), is_same in zip(known, same.tolist()) if not is_same)

"""Runs batches through the model, each as if it were the first, and compares what is seen.

An `Observation` holds what a pass showed for every example: losses, inputs of layers, gradients.
Two batches that have an example in common must show the same for it, whoever else is in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dpsparse.plugin.probe import findings
from lightning_dpsparse.plugin.probe.compare import disagreement, first_in
from lightning_dpsparse.plugin.probe.repeatable import Attributes, drawn_outside_torch, same_draws
from lightning_dpsparse.sharded.build import on_every_rank
from lightning_dpsparse.sharded.examples import count_of
from lightning_dpsparse.sharded.observation import Observation, Seen
from lightning_dpsparse.sharded.private import PrivateSteps

# n examples that are looked at on this rank

LOOSE = 10.0
"""How much more may differ where shapes do: kernels then add up in another order."""


class Bench:
    """Observes the model on batches of the probe's.

    Args:
        forward: The losses of a batch as the loader gave it: moved, and through training_step.
        attributes: The module's plain attributes, which every pass finds as they were.
    """

    def __init__(
        self,
        steps: PrivateSteps,
        forward: Callable[[Any], Tensor],
        attributes: Attributes,
        seed: int,
    ) -> None:
        self._steps, self._forward, self._attributes = steps, forward, attributes
        self._seed = seed
        self._seen_of_base: dict[bool, tuple[Observation, list[Seen]]] = {}
        """What the batch that others are compared with showed, by whether draws were all alike."""
        self.drawn_outside: tuple[Any, ...] = ()
        """How far numpy's and Python's generators came in the last pass."""

    def observe(self, batch: Any, *, constant: bool = False, fresh: bool = True) -> Observation:
        """One pass. With `constant`, all numbers of a draw are alike.

        Without `fresh`, the pass finds what the last one left behind.
        """
        if fresh:
            self._attributes.restore()
        with same_draws(self._seed, constant=constant):
            observation = self._steps.observe(lambda: self._forward(batch), count_of(batch))
            self.drawn_outside = drawn_outside_torch()
        return observation

    def compare(
        self, base: Any, other: Any, drawn: list[int], how: str, *, again: bool = False
    ) -> list[str]:
        """Nobody but those drawn may change, in the forward pass or in the backward pass.

        Where sequences are padded to the longest, another batch has other shapes, and so other
        draws for dropout: what is found must be found again with draws that are all alike. `again`
        says that the base is the last comparison's.
        """
        if not again:
            self._seen_of_base = {}
        found = list(self._differences(base, other, drawn, how, constant=False))
        if any(on_every_rank(bool(found))):
            found = list(self._differences(base, other, drawn, how, constant=True))
        return found

    def _differences(
        self, base: Any, batch: Any, drawn: list[int], how: str, *, constant: bool
    ) -> Iterator[str]:
        if constant not in self._seen_of_base:
            first = self.observe(base, constant=constant)
            self._seen_of_base[constant] = first, all_sent_back(first)
        first, before = self._seen_of_base[constant]
        other = self.observe(batch, constant=constant)
        after = all_sent_back(other)
        kept = mask_of(len(first.loss_n), drawn, value=False)
        everybody = mask_of_all_ranks(kept, first.padded_size, default=True)
        looseness = LOOSE if constant else 1.0
        where = first_in(first.forward(), other.forward(), kept, looseness)
        if where:
            yield _coupled_or_reordered(first, other, drawn, kept, where, how)
        for one, two in zip(before, after):
            if first_in([one], [two], everybody if one.is_of_all_ranks else kept, looseness):
                yield findings.coupled(one.where, how)


def _coupled_or_reordered(
    first: Observation, other: Observation, drawn: list[int], kept: Tensor, where: str, how: str
) -> str:
    changed = disagreement(first.forward()[-1], other.forward()[-1]).cpu()
    if bool((changed & kept).any()) and not bool((changed & ~kept).any()) and drawn:
        return findings.reordered()
    return findings.coupled(where, how)


def all_sent_back(seen: Observation) -> list[Seen]:
    """The gradients of all losses together."""
    return seen.backward(torch.ones_like(seen.loss_n, dtype=torch.bool))


def mask_of(size: int, positions: Sequence[int], *, value: bool) -> Tensor:
    """`value` at these positions, and its opposite at all others."""
    mask = torch.full((size,), not value)
    mask[list(positions)] = value
    return mask


def mask_of_all_ranks(mask_n: Tensor, padded: int, *, default: bool) -> Tensor:
    """The masks of all ranks one after the other. Padding is `default`."""
    masks = on_every_rank(mask_n.tolist())
    whole = torch.full((len(masks), padded), default)
    for rank, mask in enumerate(masks):
        assert isinstance(mask, list)
        whole[rank, : len(mask)] = torch.tensor(mask, dtype=torch.bool)
    return whole.flatten()

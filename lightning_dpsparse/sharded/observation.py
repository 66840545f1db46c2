"""What can be seen of one forward and backward pass, example by example.

Clipping bounds what one example does only if no example changes what another one computes. The
probe (`plugin/probe/`) tests that: it changes some examples, and looks here whether anything of the
others has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dpsparse.engine.ghost import DenseCapture
from lightning_dpsparse.engine.step_inputs import take
from lightning_dpsparse.sharded.kernel_read import KernelRead

# n examples of this rank, B examples of all ranks after padding, F features, L lookups


@dataclass(frozen=True)
class Seen:
    """Something that has one entry per example, and where it was seen."""

    where: str
    value: Tensor
    """The entries, of shape (n, ...), or (B, ...) if the examples of all ranks are seen."""
    is_of_all_ranks: bool = False
    may_be_padded: bool = False
    """Whether a different length in another batch means nothing: sequences often are padded to the
    longest of their batch."""


class Observation:
    """One forward pass, through which the losses of any examples can be sent back repeatedly."""

    def __init__(
        self, loss_n: Tensor, reads: Sequence[KernelRead], dense: DenseCapture, padded_size: int
    ) -> None:
        self.loss_n = loss_n
        self.padded_size = padded_size
        """Number of examples of every rank, after padding."""
        self._reads = list(reads)
        first_seen = {
            id(use): (name, use)
            for name, uses in reversed(dense.recorded().items())
            for _, use in reversed(uses)
        }
        self._uses = list(reversed(first_seen.values()))

    def forward(self) -> list[Seen]:
        """The inputs of all dense calls, in the order of the calls, and the losses."""
        inputs = [
            Seen(f"the input of {use.what!r} with {name!r}", value, may_be_padded=True)
            for name, use in self._uses
            for value in use.batched()
        ]
        return [*inputs, Seen("the losses", self.loss_n.detach())]

    def backward(self, is_sent_n: Tensor) -> list[Seen]:
        """The gradients that these examples' losses leave at every dense call and lookup."""
        for _, use in self._uses:
            use.gradient = None
        for read in self._reads:
            read.leaf.grad = None
        # Losses are selected, not multiplied by zero: zero times anything would look independent.
        self.loss_n[is_sent_n].sum().backward(retain_graph=True)
        nothing = self.loss_n.new_zeros(len(self.loss_n), 0)
        found = [
            Seen(
                f"the gradient of {use.what!r} with {name!r}",
                nothing if use.gradient is None else use.gradient,
            )
            for name, use in self._uses
        ]
        return found + [
            Seen(f"the gradient of the lookups of {read.table_names[0]!r}", _by_example(read), True)
            for read in self._reads
        ]


def _by_example(read: KernelRead) -> Tensor:
    """The gradients of a kernel's lookups, (B, ...), in the examples' order."""
    lookup = read.lookup()
    gradient = lookup.gradient
    if not lookup.layout.is_pooled:  # a row per lookup is added up with and without signs
        both_LD = torch.cat([gradient, gradient.abs()], dim=1)
        num_bags = lookup.bags.lengths.numel()
        by_bag = both_LD.new_zeros(num_bags, both_LD.shape[1])
        by_bag.index_add_(0, lookup.bags.bag_L, both_LD)
        gradient = by_bag.view(-1, lookup.num_examples, both_LD.shape[1]).transpose(0, 1).flatten(1)
    if read.order_B is None:
        return gradient
    return take(gradient.t(), torch.argsort(read.order_B)).t()

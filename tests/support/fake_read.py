"""A kernel on paper that keeps what it is asked to apply, and adversarial examples for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from lightning_dpsparse.engine.clipping import AutomaticClipping, FlatClipping, GroupClipping
from lightning_dpsparse.engine.lookups import Bags, Layout, Lookup
from lightning_dpsparse.engine.rows import RowGradient

# Two features on one table of five rows, one on another of three: ids repeat and meet.
LAYOUT = Layout((0, 0, 1), (4, 4), (5, 3))
NAMES = ["shared.weight", "alone.weight"]
CLIPPINGS = [FlatClipping(), AutomaticClipping(), GroupClipping({"shared*": 1.0, "*": 2.0})]


@dataclass
class FakeRead:
    """A kernel on paper: keeps what it is asked to apply."""

    bags: list[list[list[int]]]
    leaf: Tensor
    weighted: bool
    pooled: bool = True
    applied: list[Tensor] = field(default_factory=list)
    table_names = NAMES
    shard_offsets = ((0, 0), (0, 0))
    order_B = None
    state: Any = None

    @property
    def layout(self) -> Layout:
        return replace(LAYOUT, is_pooled=self.pooled)

    def lookup(self) -> Lookup:
        flat = [bag for f in range(3) for bag in (example[f] for example in self.bags)]
        lengths = torch.tensor([len(bag) for bag in flat], dtype=torch.int64)
        ids = torch.tensor([i for bag in flat for i in bag], dtype=torch.int64)
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        weights = 0.5 + (ids % 2).double() if self.weighted else None
        assert self.leaf.grad is not None
        return Lookup(Bags(self.layout, ids, offsets, weights), self.leaf.grad)

    def apply(self, gradients: list[RowGradient]) -> None:
        for gradient, rows, width in zip(gradients, LAYOUT.num_rows, LAYOUT.widths):
            dense = torch.zeros(rows, width, dtype=torch.float64)
            dense[gradient.rows_U] = gradient.values_UD
            self.applied.append(dense)


bag = lambda rows: st.lists(st.integers(0, rows - 1), max_size=4)  # noqa: E731
number = st.floats(-1e3, 1e3, allow_nan=False, width=32)
adversarial = st.sampled_from([0.0, 1e-20, 1.0, 1e8, 1e150, 1e308, math.inf, -math.inf, math.nan])

example = st.tuples(
    st.tuples(bag(5), bag(5), bag(3)),
    st.lists(number, min_size=12, max_size=12),
    st.one_of(st.floats(-10, 10), adversarial),
)

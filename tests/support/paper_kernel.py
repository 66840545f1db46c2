"""A kernel on paper: what a mechanism's state needs of one, without FBGEMM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_dpsparse.engine.lookups import Layout
from lightning_dpsparse.engine.rows import RowGradient
from lightning_dpsparse.engine.state import MechanismState
from lightning_dpsparse.engine.step import StepConfig


@dataclass(eq=False)
class PaperKernel:
    """Keeps what it is asked to apply."""

    layout: Layout
    table_names: Sequence[str]
    shard_offsets: Sequence[tuple[int, int]]
    has_whole_rows: bool = True
    learning_rate: float = 1.0
    weight_decay: float = 0.0
    applied: list[RowGradient] = field(default_factory=list)
    device = torch.device("cpu")

    def weights(self) -> list[Tensor]:
        widths = [self.layout.widths[stack.tables.start] for stack in self.layout.stacks]
        return [torch.zeros(s.num_rows, w) for s, w in zip(self.layout.stacks, widths)]

    def apply(self, gradients: list[RowGradient]) -> None:
        self.applied += gradients

    @contextmanager
    def writing(self) -> Iterator[None]:
        yield


def open_on_paper(config: StepConfig, read: object) -> MechanismState:
    """A mechanism's state for one read on paper, which then knows it."""
    kernel = PaperKernel(read.layout, read.table_names, read.shard_offsets)  # type: ignore[attr-defined]
    kernel.apply = read.apply  # type: ignore[attr-defined, method-assign]
    state = config.open([kernel])
    read.state = state.tables[0]  # type: ignore[attr-defined]
    return state

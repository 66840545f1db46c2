"""A table on paper that LazyDP trains on noise alone, and the law of its rows and their average."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_dpsparse.engine.lookups import Bags, Layout

ROWS, WIDTH, STEPS, STDDEV = 4000, 16, 40, 0.3
LAYOUT = Layout((0,), (WIDTH,), (ROWS,), is_stacked=True)


def learning_rate(step: int) -> float:
    return 0.3 + 0.2 * math.cos(math.pi * step / STEPS)


class PaperKernel:
    """What LazyDP needs of a kernel, for one table."""

    layout, table_names, shard_offsets = LAYOUT, ["t.weight"], [(0, 0)]
    has_whole_rows, device = True, torch.device("cpu")

    def __init__(self, weight_decay: float = 0.0) -> None:
        self.weight = torch.zeros(ROWS, WIDTH)
        self.learning_rate, self.weight_decay = learning_rate(0), weight_decay

    def weights(self) -> list[Tensor]:
        return [self.weight]

    @contextmanager
    def writing(self) -> Iterator[None]:
        yield


def bags_of(rows: Tensor) -> Bags:
    """Every row is read once, in a bag of its own."""
    return Bags(LAYOUT, rows, torch.arange(len(rows) + 1))


def right_law(
    weight_decay: float, first: int, half_life: float | None
) -> tuple[float, float, float]:
    """Variance of a row, of its average from step `first` on, and their covariance: DP-SGD's."""
    s11 = s12 = s22 = total = 0.0
    fade = 1.0 if half_life is None else 0.5 ** (1 / half_life)
    for step in range(STEPS):
        rate = learning_rate(step)
        keep = 1 - rate * weight_decay
        s11, s12 = keep**2 * s11 + (rate * STDDEV) ** 2, keep * s12
        if step >= first:
            total = fade * total + 1
            b = 1 / total
            s22 = (1 - b) ** 2 * s22 + 2 * b * (1 - b) * s12 + b * b * s11
            s12 = (1 - b) * s12 + b * s11
    return s11, s22, s12

"""A table whose rows owe their noise, as LazyDP keeps it."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dpsparse import LazyDP
from lightning_dpsparse.engine.draws import StackNoise
from lightning_dpsparse.engine.lookups import Layout
from lightning_dpsparse.mechanisms.lazydp.clock import Clock
from lightning_dpsparse.mechanisms.lazydp.debts import Debts
from lightning_dpsparse.noise.sources import NoiseSource

WIDTH, STEPS, STDDEV = 16, 60, 0.3
LAYOUT = Layout((0, 1), (WIDTH, WIDTH), (1500, 1500), is_stacked=True)
NAMES, SHARD_OFFSETS = ("a", "b"), ((0, 0), (64, 0))


def indebted(source: NoiseSource, mechanism: LazyDP) -> tuple[Debts, Clock, Tensor]:
    weight, clock = torch.zeros(3000, WIDTH), Clock(torch.device("cpu"))
    noise = StackNoise(source, LAYOUT.stacks[0], NAMES, SHARD_OFFSETS, 0)
    settings = {"aggregate": mechanism.aggregate, "chunk_rows": mechanism.chunk_rows}
    return Debts(weight, noise, clock, **settings), clock, weight

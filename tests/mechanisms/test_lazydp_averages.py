"""Averages of rows that owe noise: the right law together with the rows, and no trace of reads."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from lightning_dpsparse import LazyDP
from lightning_dpsparse.engine.averaging import AverageClock
from lightning_dpsparse.engine.rows import RowGradient
from lightning_dpsparse.engine.state import StepNoise
from lightning_dpsparse.noise.keys import RunKey
from lightning_dpsparse.noise.sources import FastNoise, RowNoise
from tests.support.averaged_tables import ROWS, STEPS, WIDTH, FakeKernel, learning_rate, right_law

NEVER, SOMETIMES, OFTEN, ALWAYS = (range(*ends) for ends in pairwise((0, 1500, 3000, 4500, ROWS)))
GROUPS = {"never": NEVER, "sometimes": SOMETIMES, "often": OFTEN, "always": ALWAYS}


def read_at(step: int) -> Tensor:
    """Rows that are read never, once in twenty steps, in two of three, and always."""
    return torch.tensor(
        [
            *(row for row in SOMETIMES if row % 20 == step % 20),
            *(row for row in OFTEN if (row + step) % 3),
            *ALWAYS,
        ]
    )


def run(
    decay: float = 0.0,
    averages: dict[str, Any] | None = None,
    source: Any = None,
    releases: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor, float | None]:
    """Rows and averages in the end: nothing but noise moves them."""
    kernel = FakeKernel(decay)
    noise = StepNoise(source or FastNoise(RunKey.fixed(5)), 0.3)
    state = LazyDP(chunk_rows=700).open_table(kernel, noise)
    clock, average = AverageClock(**(averages or {})), None
    for step in range(STEPS):
        kernel.learning_rate = learning_rate(step)
        rows = read_at(step)
        state.pay_before(rows)
        for update in state.updates([RowGradient(rows, torch.zeros(len(rows), WIDTH))], step):
            state.apply(update)
        if averages is not None and step >= STEPS // 2:
            average = average or state.open_average(clock)
            average.note_step(clock.tick())
        if step in releases and average is not None:
            average.bring_up_to_date()
    if average is None:
        state.release()
        return kernel.weight, kernel.weight, state.grid
    average.bring_up_to_date()
    return kernel.weight, average.averages[0], state.grid

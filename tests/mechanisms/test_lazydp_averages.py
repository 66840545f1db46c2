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
from lightning_dpsparse.engine.state import Reading, StepNoise, finish
from lightning_dpsparse.mechanisms.lazydp import averages
from lightning_dpsparse.noise.keys import RunKey
from lightning_dpsparse.noise.sources import FastNoise, NoiseSource, SecureNoise
from tests.support.averaged_tables import (
    ROWS,
    STDDEV,
    STEPS,
    WIDTH,
    PaperKernel,
    bags_of,
    learning_rate,
    right_law,
)

NEVER, SOMETIMES, OFTEN, ALWAYS = (range(*ends) for ends in pairwise((0, 1000, 2000, 3000, ROWS)))
GROUPS = {"never": NEVER, "sometimes": SOMETIMES, "often": OFTEN, "always": ALWAYS}


def read_at(step: int) -> Tensor:
    """Rows that are read once in twenty steps, in two of three, and always."""
    sometimes = [row for row in SOMETIMES if row % 20 == step % 20]
    often = [row for row in OFTEN if (row + step) % 3]
    return torch.tensor([*sometimes, *often, *ALWAYS])


def run(
    first: int | None,
    *,
    half_life: float | None = None,
    decay: float = 0.0,
    source: type[NoiseSource] = FastNoise,
    releases: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor, float]:
    """Rows in the end, their averages from step `first` on, and the grid. Only noise moves them."""
    kernel: Any = PaperKernel(decay)
    state = LazyDP(chunk_rows=700).open_table(kernel, StepNoise(source(RunKey.fixed(5)), STDDEV))
    clock, average = AverageClock(half_life), None
    for step in range(STEPS):
        kernel.learning_rate = learning_rate(step)
        bags = bags_of(read_at(step))
        rows = bags.ids_L
        state.before_read(bags, Reading.WHOLE_BATCH)
        state.after_read(bags, torch.zeros(len(rows), WIDTH), Reading.WHOLE_BATCH)
        for update in state.updates([RowGradient(rows, torch.zeros(len(rows), WIDTH))], step):
            state.apply(update)
        if first is not None and step >= first:
            average = average or state.open_average(clock)
            average.note_step(clock.tick())
            if step in releases:
                average.bring_up_to_date()
    assert state.grid is not None
    if average is None:
        finish([state])
        return kernel.weight, kernel.weight, state.grid
    average.bring_up_to_date()
    before = average.averages[0].clone()
    average.bring_up_to_date()  # what was released stays as it is
    assert torch.equal(before, average.averages[0])
    return kernel.weight, average.averages[0], state.grid


@pytest.mark.parametrize(
    ("first", "settings"),
    [
        (20, {}),
        (0, {"half_life": 6.0}),
        (20, {"decay": 0.2}),
        (0, {"half_life": 6.0, "decay": 0.2, "source": SecureNoise}),
        (10, {"releases": (12, 13, 30)}),
        (38, {}),
    ],
    ids=["uniform", "fading", "decaying", "all", "released", "short"],
)
def test_rows_and_averages_have_their_joint_law_however_often_a_row_was_read(
    first: int, settings: dict[str, Any]
) -> None:
    """16,000 pairs a group, made independent standard normals by the right covariance: mean squares
    have a standard error of sqrt(2 / n), the mean product one of sqrt(1 / n). Without the cross
    term, or with T left out, one of them is off by a tenth or more."""
    weight, average, _ = run(first, **settings)
    s11, s22, s12 = right_law(settings.get("decay", 0.0), first, settings.get("half_life"))
    theta = weight.double() / math.sqrt(s11)
    rest = (average.double() - s12 / s11 * weight.double()) / math.sqrt(s22 - s12**2 / s11)
    for name, group in GROUPS.items():
        one, two = theta[list(group)].flatten(), rest[list(group)].flatten()
        n = one.numel()
        assert abs(float(one.square().mean()) - 1) < 5 * math.sqrt(2 / n), name
        assert abs(float(two.square().mean()) - 1) < 5 * math.sqrt(2 / n), name
        assert abs(float((one * two).mean())) < 5 * math.sqrt(1 / n), name
        assert stats.kstest(one.numpy(), "norm").pvalue > 1e-4, name
        assert stats.kstest(two.numpy(), "norm").pvalue > 1e-4, name


@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_averaging_leaves_every_draw_of_the_rows_as_it_is(decay: float) -> None:
    alone, _, _ = run(None, decay=decay)
    averaged, _, _ = run(20, decay=decay)
    assert torch.equal(alone, averaged)


@pytest.mark.parametrize(("first", "half_life"), [(38, None), (39, None), (20, None), (0, 5.0)])
def test_low_bits_do_not_tell_which_rows_were_read(first: int, half_life: float | None) -> None:
    """The average of the last two steps of a row that both of them read is a multiple of half the
    grid, and no other row's would be. All released averages are multiples of the grid, and where
    they lie on it, modulo eight, is uniform: chi square of 16,000 numbers in each group. (The
    average of one step is the row itself, moved by up to a spacing.)"""
    _, average, grid = run(first, half_life=half_life)
    place = average.double() / grid
    assert torch.equal(place, place.round())
    for name, group in GROUPS.items():
        counts = torch.bincount(place[list(group)].flatten().long() % 8, minlength=8)
        assert stats.chisquare(counts.numpy()).pvalue > 1e-4, name


def test_lags_in_a_new_scale_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written anew whenever the scale has doubled, every four steps. Releases are rounded to a
    spacing, and lags to float32."""
    _, average, grid = run(0, half_life=4.0, decay=0.2)
    monkeypatch.setattr(averages, "_LARGEST_SCALE", 2.0)
    _, found, _ = run(0, half_life=4.0, decay=0.2)
    assert (found - average).abs().max() <= 1.01 * grid + 1e-6


class Failing(FastNoise):
    """Fails once, at the second draw for averages."""

    left = 2

    def fill_(self, out: Tensor, stream: Any, *rest: Any) -> Tensor:
        if stream.purpose == "average":
            Failing.left -= 1
            if Failing.left == 0:
                raise MemoryError("no memory for noise")
        return super().fill_(out, stream, *rest)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_release_that_was_cut_short_goes_on(
    monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    """Some rows' averages were made, others' not: right away, or after a further step."""
    monkeypatch.setattr(averages, "_CHUNK_ROWS", 700)
    Failing.left = 2
    kernel: Any = PaperKernel()
    state = LazyDP().open_table(kernel, StepNoise(Failing(RunKey.fixed(5)), STDDEV))
    clock = AverageClock()
    average = state.open_average(clock)

    def step(number: int) -> None:
        kernel.learning_rate = learning_rate(number)
        nothing = RowGradient(torch.zeros(0, dtype=torch.int64), torch.zeros(0, WIDTH))
        for update in state.updates([nothing], number):
            state.apply(update)
        average.note_step(clock.tick())

    for number in range(STEPS - 1):
        step(number)
    if not goes_on:
        step(STEPS - 1)
    with pytest.raises(MemoryError):
        average.bring_up_to_date()
    if goes_on:
        step(STEPS - 1)
    average.bring_up_to_date()
    s11, s22, s12 = right_law(0.0, 0, None)
    rest = average.averages[0].double() - s12 / s11 * kernel.weight.double()
    ratio = float(rest.square().mean()) / (s22 - s12**2 / s11)
    assert abs(ratio - 1) < 5 * math.sqrt(2 / rest.numel())


def test_before_a_release_an_average_lacks_what_its_rows_noise_leaves_open() -> None:
    """So it is a secret: `bring_up_to_date` draws what is missing."""
    kernel: Any = PaperKernel()
    state = LazyDP().open_table(kernel, StepNoise(FastNoise(RunKey.fixed(5)), STDDEV))
    clock = AverageClock()
    average = state.open_average(clock)
    for step in range(10):
        nothing = RowGradient(torch.zeros(0, dtype=torch.int64), torch.zeros(0, WIDTH))
        for update in state.updates([nothing], step):
            state.apply(update)
        average.note_step(clock.tick())
    finish([state])
    lag = average.averages[0] / kernel.weight
    assert float(lag.std()) < 1e-5  # a function of the rows
    average.bring_up_to_date()
    lag = (kernel.weight - average.averages[0]) / kernel.weight
    assert float(lag.std()) > 0.1

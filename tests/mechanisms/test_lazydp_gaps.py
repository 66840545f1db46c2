"""What many steps do to a row and its average, in closed form, against every step in 60 digits."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dpsparse.mechanisms.lazydp.clock import Clock
from lightning_dpsparse.mechanisms.lazydp.gap_maps import GapMaps, compose_gaps

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Step:
    """theta <- a theta + s z, then m <- (1 - b) m + b theta."""

    decay: float
    stddev: float
    share: float


def maps_of(steps: list[Step]) -> GapMaps:
    one, zero = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    gaps = GapMaps(one, zero)
    for step in steps:
        gaps.add_noise(step.decay, step.stddev**2)
        gaps.add_average(step.share)
    return gaps


def by_steps(steps: list[Step]) -> tuple[mpmath.mpf, ...]:
    """B, D, r and T from the whole covariance, step by step."""
    with mpmath.workdps(60):
        zero = mpmath.mpf(0)
        decay, kept, share, s11, s12, s22 = mpmath.mpf(1), mpmath.mpf(1), zero, zero, zero, zero
        for step in steps:
            a, s, b = mpmath.mpf(step.decay), mpmath.mpf(step.stddev), mpmath.mpf(step.share)
            decay, s11, s12 = a * decay, a * a * s11 + s * s, a * s12
            keep = 1 - b
            s22 = keep**2 * s22 + 2 * b * keep * s12 + b * b * s11
            s12 = keep * s12 + b * s11
            kept, share = keep * kept, keep * share + b * decay
        if s11 == 0:
            return kept, share, zero, zero
        return kept, share, s12 / s11, s22 - s12**2 / s11


def assert_as_by_steps(steps: list[Step], lengths: list[int], rtol: float, tiny: float) -> None:
    """`tiny` is what the variance T may be off by, relative to r^2 S."""
    gaps = maps_of(steps)
    found = gaps.since(torch.tensor([2 * (len(steps) - n) for n in lengths]))
    for i, n in enumerate(lengths):
        kept, share, slope, spread = by_steps(steps[len(steps) - n :])
        assert math.isclose(found.gain_U[i], kept + share - 1, rel_tol=rtol, abs_tol=1e-14)
        assert math.isclose(found.share_U[i], share, rel_tol=rtol)
        assert math.isclose(found.slope_U[i], slope, rel_tol=rtol, abs_tol=1e-300)
        assert math.isclose(found.spread_U[i], spread, rel_tol=rtol, abs_tol=tiny)


def late(count: int, *, decay: float) -> list[Step]:
    """The last of a million steps, all averaged alike, under a cosine schedule."""
    rates = [0.05 + 0.1 * (1 + math.cos(2 * math.pi * t / count)) for t in range(count)]
    first = 1_000_000 - count
    return [Step(1 - r * decay, 0.01 * r, 1 / (first + t + 1)) for t, r in enumerate(rates)]


@pytest.mark.parametrize(
    ("count", "decay"),
    [(3_000, 0.0), (3_000, 1e-3), pytest.param(100_000, 1e-3, marks=pytest.mark.slow)],
)
def test_gaps_after_a_million_steps(count: int, decay: float) -> None:
    """What two steps leave open is a 10^-12th of the average's variance, and not lost: relative to
    itself the error is that of float64 times the number of steps, at most."""
    lengths = [n for n in (2, 3, 10, 255, 256, 257, 1_000, 3_000, 10_000, 100_000) if n <= count]
    assert_as_by_steps(late(count, decay=decay), lengths, rtol=1e-16 * (100 + count), tiny=0.0)


def test_one_step_leaves_nothing_open() -> None:
    """The average of one step is a function of where the row was and is."""
    found = maps_of(late(700, decay=1e-3)).since(torch.tensor([2 * 699, 2 * 699 + 1, 2 * 700]))
    assert found.spread_U.tolist() == [0.0, 0.0, 0.0]
    assert found.slope_U[0] == 1e-6
    assert found.gain_U[2] == 0.0
    assert found.share_U[2] == 0.0


def test_an_event_is_a_composition_with_it_to_the_bit() -> None:
    """Also without noise or decay, and where an average becomes its row; over several blocks."""
    draw = random.Random(0)
    gaps, composed = maps_of([]), maps_of([])
    for _ in range(3 * 512):
        decay, variance = draw.choice([1.0, draw.random()]), draw.choice([0.0, 1e-3, draw.random()])
        share = draw.choice([0.0, 1.0, draw.random()])
        if draw.random() < 0.5:
            gaps.add_noise(decay, variance)
            event = (decay, 1.0, 0.0, variance, 0.0, 0.0)
        else:
            gaps.add_average(share)
            event = (1.0, 1.0 - share, share, 0.0, 0.0, 0.0)
        composed._write(compose_gaps(composed._open_maps, event))
    assert torch.equal(gaps._maps, composed._maps)
    assert torch.equal(gaps._tails, composed._tails)


def test_gaps_to_every_event_are_those_to_the_last_one() -> None:
    """Asked for many rows, each position is composed once, and once more after an event."""
    gaps, many = maps_of([]), torch.zeros(5_000, dtype=torch.int64)
    for step in late(20, decay=1e-3):
        gaps.add_noise(step.decay, step.stddev**2)
        assert torch.equal(gaps.since(many).slope_U[:1], gaps.since(many[:1]).slope_U)
        gaps.add_average(step.share)
        assert torch.equal(gaps.since(many).slope_U[:1], gaps.since(many[:1]).slope_U)


def test_prefix_sums_would_not_do() -> None:
    """T from differences of sums of c^2, c^2 W and c^2 W^2 is a quarter off already after 3,000
    steps, for a gap of two."""
    steps = late(3_000, decay=0.0)
    first = 1_000_000 - 3_000
    sums = [0.0, 0.0, 0.0]
    prefix = [tuple(sums)]
    for t, step in enumerate(steps):
        weight = float(first + t)  # 1 / B before the step's average, without decay
        for k in range(3):
            sums[k] += step.stddev**2 * weight**k
        prefix.append(tuple(sums))
    s0, s1, s2 = (now - then for now, then in zip(prefix[-1], prefix[-3]))
    spread = (s2 - s1 * s1 / s0) / 1e12
    right = float(by_steps(steps[-2:])[3])
    assert abs(spread / right - 1) > 0.1
    exact = maps_of(steps).since(torch.tensor([2 * 2998])).spread_U[0]
    assert abs(float(exact) / right - 1) < 1e-12


shares = st.one_of(st.just(1.0), st.floats(0.0, 1.0), st.just(0.0))
noise = st.one_of(st.just(0.0), st.floats(1e-12, 1.0))  # squares of less leave float64
any_step = st.builds(Step, st.floats(0.3, 1.0), noise, shares)


@given(st.lists(any_step, min_size=1, max_size=30), st.data())
@settings(max_examples=100, deadline=None)
def test_any_schedule(steps: list[Step], data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(steps)))
    assert_as_by_steps(steps, [length], rtol=1e-9, tiny=1e-15)


def test_rows_share_positions() -> None:
    """More rows than positions: every position is looked at once."""
    gaps = maps_of(late(20, decay=1e-3))
    position = torch.arange(500) % 41
    found, each = gaps.since(position), gaps.since(torch.arange(41))
    assert torch.equal(found.spread_U, each.spread_U[position])
    assert torch.equal(found.share_U, each.share_U[position])


@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_an_average_that_begins_late_knows_what_rows_owed_before(decay: float) -> None:
    clock, before, after = Clock(CPU), 30, 25
    for step in range(before + after):
        rate = 0.1 + 0.01 * step
        if step == before:
            clock.follow_averages()
        clock.tick(step, 0.3, rate, decay)
        if step >= before:
            clock.note_average(1 / (step - before + 1))
    steps = [
        Step(
            1 - (0.1 + 0.01 * t) * decay,
            0.3 * (0.1 + 0.01 * t),
            1 / (t - before + 1) if t >= before else 0.0,
        )
        for t in range(before + after)
    ]
    assert clock.gaps is not None
    for position, length in ((0, 55), (10, 45), (29, 26), (30, 25), (32, 24), (80, 0)):
        found = clock.gaps.since(torch.tensor([position]))
        kept, share, slope, spread = by_steps(steps[len(steps) - length :])
        assert math.isclose(found.gain_U, kept + share - 1, abs_tol=1e-14)
        assert math.isclose(found.share_U, share, rel_tol=1e-12, abs_tol=1e-15)
        assert math.isclose(found.slope_U, slope, rel_tol=1e-9, abs_tol=1e-15)
        assert math.isclose(found.spread_U, spread, rel_tol=1e-9, abs_tol=1e-18)


def test_a_clock_that_starts_anew_follows_on() -> None:
    clock = Clock(CPU)
    clock.follow_averages()
    clock.tick(0, 1.0, 0.5)
    clock.note_average(1.0)
    clock.start_anew()
    clock.tick(1, 1.0, 0.5)
    clock.note_average(0.25)
    assert clock.gaps is not None
    found = clock.gaps.since(torch.tensor([0, 1, 2]))
    assert found.slope_U.tolist() == [0.25, 0.0, 0.0]
    assert found.share_U.tolist() == [0.25, 0.25, 0.0]

"""What a row owes, in closed form, equals what it would have gone through step by step."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dpsparse.mechanisms.lazydp.clock import Clock

CPU = torch.device("cpu")


def ticking(schedule: list[tuple[float, float, float]]) -> Clock:
    clock = Clock(CPU)
    for step, (stddev, learning_rate, weight_decay) in enumerate(schedule):
        clock.tick(100 + step, stddev, learning_rate, weight_decay)
    return clock


def slept(schedule: list[tuple[float, float, float]], since: int) -> tuple[float, float]:
    """Decay and standard deviation of a row that slept from `since` on, one step at a time."""
    decay, variance = 1.0, 0.0
    for stddev, learning_rate, weight_decay in schedule[since:]:
        keep = 1 - learning_rate * weight_decay
        decay, variance = keep * decay, keep**2 * variance + (learning_rate * stddev) ** 2
    return decay, math.sqrt(variance)


def assert_as_slept(schedule: list[tuple[float, float, float]], atol: float = 0.0) -> None:
    clock = ticking(schedule)
    since = torch.arange(len(schedule) + 1, dtype=torch.int32)
    expected = [slept(schedule, int(s)) for s in since]
    decays, stddevs = (torch.tensor(x, dtype=torch.float64) for x in zip(*expected))
    torch.testing.assert_close(clock.stddev(since), stddevs, rtol=1e-7, atol=atol)
    decay = clock.decay(since)
    if decay is None:
        assert (decays == 1).all()
    else:
        torch.testing.assert_close(decay, decays, rtol=1e-9, atol=1e-300)


numbers = st.floats(0.0, 1.0)


@given(st.lists(st.tuples(numbers, numbers, st.floats(0.0, 0.9)), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_any_schedule_of_noise_learning_rate_and_decay(
    schedule: list[tuple[float, float, float]],
) -> None:
    assert_as_slept(schedule, atol=1e-14)  # beside learning rates of one


def test_a_cosine_schedule_owes_the_learning_rates_of_the_steps_slept_through() -> None:
    """Under it, the learning rate at payment would be wrong by orders of magnitude."""
    steps = 500  # beyond what the clock's memory begins with
    schedule = [(0.7, 0.5 * (1 + math.cos(math.pi * t / steps)), 0.0) for t in range(steps)]
    assert_as_slept(schedule)


def test_a_step_with_a_tiny_learning_rate_is_not_lost_beside_large_ones() -> None:
    """Its noise is tiny too, and must be there: so is what it hides."""
    assert_as_slept([(1.0, 1.0, 0.0)] * 300 + [(1.0, 1e-9, 0.0)] * 3)


def test_strong_decay_never_leaves_the_range_of_numbers() -> None:
    """A falls by e^-693 in all: without a new base 1 / A^2 would be infinite."""
    assert_as_slept([(0.3, 1.0, 0.5)] * 1000)


def test_the_steps_of_a_row_add_up_to_what_it_owes() -> None:
    clock = ticking([(0.5 + 0.1 * t, 0.3 / (1 + t), 0.4) for t in range(12)])
    since = torch.tensor([0, 12, 3, 11], dtype=torch.int32)
    owed = clock.steps_since(since)
    position, step, coefficient = owed.position_K, owed.step_K, owed.coefficient_K
    assert position.bincount(minlength=4).tolist() == [12, 0, 9, 1]
    assert step[position == 2].tolist() == list(range(103, 112))
    total = torch.zeros(4, dtype=torch.float64).index_add_(0, position, coefficient**2)
    torch.testing.assert_close(total.sqrt(), clock.stddev(since))
    assert (coefficient < 0).all()  # noise is part of a gradient, and gradients are descended


def test_decay_that_would_flip_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="learning rate x weight decay below 1, found 2"):
        Clock(CPU).tick(0, 1.0, 2.0, 0.5)

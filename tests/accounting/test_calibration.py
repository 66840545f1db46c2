"""Noise for a target, and steps for a budget."""

from __future__ import annotations

import pytest

from lightning_dpsparse.accounting import events
from lightning_dpsparse.accounting.calibration import (
    calibrate,
    default_delta,
    epsilon_of,
    most_steps,
)
from lightning_dpsparse.accounting.privacy_loss import COARSE


def cost(noise: float, grid: float) -> float:
    return epsilon_of([(events.poisson_gaussian(1024 / 1e6, noise), 10_000)], 1e-6, grid)


def test_calibrated_noise_meets_the_target_and_no_less_does() -> None:
    noise = calibrate(cost, 1.0)
    assert noise == pytest.approx(0.7931, abs=2e-4)
    assert cost(noise, 1e-4) <= 1.0 < cost(noise - 2e-4, 1e-4)


def test_a_coarse_answer_is_on_the_safe_side() -> None:
    noise = calibrate(cost, 1.0, grid=COARSE)
    assert 0.7931 < noise < 0.80


def test_targets_that_no_noise_meets_are_named() -> None:
    with pytest.raises(ValueError, match="Expected a budget that some noise can meet"):
        calibrate(lambda noise, grid: 5.0, 1.0)
    with pytest.raises(ValueError, match="Expected a budget that needs noise"):
        calibrate(lambda noise, grid: 0.5, 1.0)


@pytest.mark.parametrize(
    ("size", "expected"), [(1, 0.1), (9, 0.01), (10, 0.01), (11, 1e-3), (10**6, 1e-7)]
)
def test_default_delta_is_a_tenth_of_one_over_n_rounded_down(size: int, expected: float) -> None:
    assert default_delta(size) == expected
    assert default_delta(size) <= 1 / (10 * size)


@pytest.mark.parametrize("planned", [None, 5, 100])
@pytest.mark.parametrize("affordable", [0, 1, 3, 64, 77])
def test_most_steps_is_the_last_yes(planned: int | None, affordable: int) -> None:
    found = most_steps(lambda n: n <= affordable, planned)
    assert found == (affordable if planned is None else min(affordable, planned))

"""Whether a plan can learn, by public numbers: known good ones, known bad ones, and every recipe."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lightning_dpsparse.mechanisms.adafest import AdaFEST
from lightning_dpsparse.plan import PrivacyPlan, Users
from lightning_dpsparse.prospects import LEAST, noise_warning, signal_to_noise
from lightning_dpsparse.run_plan import RunPlan, resolve
from lightning_dpsparse.sampling.poisson import Phase

DLRM = 67_018  # parameters of the demo's dense layers, and one row of each of 26 tables
LOG, USERS = 400_000, 38_645
EXAMPLES_OF = Users(max_examples=16, drawn="examples")
WHOLE = Users(max_examples=16)


def met(plan: PrivacyPlan, units: int, batch: int, steps: int | None) -> RunPlan:
    return resolve(plan, [Phase(0, units, batch / units)], units, float(batch), steps)


def with_noise(noise: float, batch: int, steps: int, unit: Users | None = None) -> RunPlan:
    plan = PrivacyPlan(noise_multiplier=noise, delta=1e-7, unit=unit or "example")
    return met(plan, LOG if unit is not WHOLE else USERS, batch, steps)


@pytest.mark.parametrize(
    ("run", "parameters"),
    [
        (with_noise(7.4, 512, 782, EXAMPLES_OF), DLRM),  # AUC 0.506
        (with_noise(7.4, 1024, 391, EXAMPLES_OF), DLRM),  # 0.504
        (with_noise(7.7, 5300, 76), DLRM),  # 0.520
        (with_noise(15.4, 5300, 76), DLRM),  # 0.504
        (met(PrivacyPlan(epsilon=0.1), 100_000, 64, 1563), DLRM),
        (met(PrivacyPlan(epsilon=0.1), 1_000_000, 64, 15625), DLRM),
        (met(PrivacyPlan(epsilon=1.0), 1_000, 64, 16), 1_000),
    ],
    ids=str,
)
def test_plans_that_cannot_learn_are_warned_of(run: RunPlan, parameters: int) -> None:
    warning = noise_warning(run, parameters)
    assert warning is not None
    assert "Expected at least 30 times as much signal as noise over the run, found" in warning
    assert "larger batches" in warning
    assert ("drawn='users'" in warning) is (run.plan.unit == EXAMPLES_OF)
    assert ("a larger epsilon" in warning) is (run.plan.epsilon is not None)


@pytest.mark.parametrize(
    "run",
    [
        with_noise(3.85, 5300, 76),  # AUC 0.637
        with_noise(1.61, 5300, 76, EXAMPLES_OF),  # 0.663
        with_noise(7.34, 42_396, 40, EXAMPLES_OF),  # 0.663
        with_noise(0.514, 512, 76, WHOLE),  # 0.668
        with_noise(0.853, 4096, 40, WHOLE),  # 0.702
        with_noise(0.511, 8192, 245),  # the demo, 0.722
    ],
    ids=str,
)
def test_plans_that_learn_are_not(run: RunPlan) -> None:
    assert noise_warning(run, DLRM) is None


def test_the_ratio_is_what_the_formula_says() -> None:
    run = with_noise(2.0, 1000, 100)
    assert signal_to_noise(run, 400) == pytest.approx(1000 * 10 / (2.0 * 20))
    assert signal_to_noise(with_noise(2.0, 1000, 100, EXAMPLES_OF), 400) == pytest.approx(250)
    # A user stands for up to 16 examples, whose sum is four times as long.
    assert signal_to_noise(with_noise(2.0, 1000, 100, WHOLE), 400) == pytest.approx(1000)
    assert signal_to_noise(run, 0) == pytest.approx(5000)  # a model without dense layers


def test_only_the_noise_on_gradients_counts() -> None:
    """AdaFEST's other query, for its choice of rows, has noise of its own."""
    chosen = AdaFEST(threshold=1.0, noise_ratio=1.0)
    plan = PrivacyPlan(mechanism=chosen, noise_multiplier=2.0, delta=1e-7)
    assert signal_to_noise(met(plan, LOG, 1000, 100), 400) == pytest.approx(250 / math.sqrt(2))


def test_without_noise_or_without_end_there_is_nothing_to_say() -> None:
    assert signal_to_noise(with_noise(0.0, 8, 2), 10**9) == math.inf
    endless = replace(with_noise(50.0, 8, 2), planned_steps=None)
    assert signal_to_noise(endless, 10**9) is None
    assert noise_warning(endless, 10**9) is None


def test_a_warning_comes_below_the_line() -> None:
    at = with_noise(1.0, 30, 100)  # 300 / sqrt(d)
    assert LEAST == 30.0
    assert noise_warning(at, 100) is None
    assert noise_warning(at, 101) is not None

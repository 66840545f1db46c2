"""Whether a plan can learn, by public numbers: plans that were tried, and every recipe."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentParser

from lightning_dpsparse.accounting.privacy_loss import COARSE
from lightning_dpsparse.engine.step_inputs import Table
from lightning_dpsparse.mechanisms.adafest import AdaFEST
from lightning_dpsparse.plan import PrivacyPlan, Users
from lightning_dpsparse.prospects import LEAST, noise_warning, signal_to_noise
from lightning_dpsparse.recipe_files import shipped_recipes
from lightning_dpsparse.run_plan import RunPlan, resolve
from lightning_dpsparse.sampling.poisson import Phase, day_phases

LOG, USERS = 400_000, 38_645
EXAMPLES_OF = Users(max_examples=16, drawn="examples")
WHOLE = Users(max_examples=16)


def met(plan: PrivacyPlan, units: int, batch: int, steps: int | None) -> RunPlan:
    return resolve(plan, [Phase(0, units, batch / units)], units, float(batch), steps)


def with_noise(noise: float, batch: int, steps: int, unit: Users | None = None) -> RunPlan:
    plan = PrivacyPlan(noise_multiplier=noise, delta=1e-7, unit=unit or "example")
    return met(plan, LOG if unit is not WHOLE else USERS, batch, steps)


@pytest.mark.parametrize(
    "run",
    [
        with_noise(7.4, 512, 782, EXAMPLES_OF),  # AUC 0.506
        with_noise(7.4, 1024, 391, EXAMPLES_OF),  # 0.504
        with_noise(15.4, 5300, 76),  # 0.504
        met(PrivacyPlan(epsilon=0.1), 100_000, 64, 1563),
        met(PrivacyPlan(epsilon=1.0), 1_000, 64, 16),
        with_noise(20.0, 512, 76, WHOLE),
    ],
    ids=range(6),
)
def test_plans_that_cannot_learn_are_warned_of(run: RunPlan) -> None:
    warning = noise_warning(run)
    assert warning is not None
    assert "Expected at least 4,000 times as much signal as noise over the run, found" in warning
    assert "larger batches" in warning
    assert ("drawn='users'" in warning) is (run.plan.unit == EXAMPLES_OF)
    assert ("a larger epsilon" in warning) is (run.plan.epsilon is not None)
    assert ("512 users" in warning) is (run.plan.unit == WHOLE)


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
    ids=range(6),
)
def test_plans_that_learn_are_not(run: RunPlan) -> None:
    assert noise_warning(run) is None


def test_the_ratio_is_what_the_formula_says() -> None:
    assert signal_to_noise(with_noise(2.0, 1000, 100)) == pytest.approx(1000 * 10 / 2.0)
    assert signal_to_noise(with_noise(2.0, 1000, 100, EXAMPLES_OF)) == pytest.approx(5000)
    # A user stands for up to 16 examples, whose sum is four times as long.
    assert signal_to_noise(with_noise(2.0, 1000, 100, WHOLE)) == pytest.approx(20_000)


def test_only_the_noise_on_gradients_counts() -> None:
    """AdaFEST's other query, for its choice of rows, has noise of its own."""
    chosen = AdaFEST(threshold=1.0, noise_ratio=1.0)
    plan = PrivacyPlan(mechanism=chosen, noise_multiplier=2.0, delta=1e-7)
    assert signal_to_noise(met(plan, LOG, 1000, 100)) == pytest.approx(5000 / math.sqrt(2))


def test_without_noise_or_without_end_there_is_nothing_to_say() -> None:
    assert signal_to_noise(with_noise(0.0, 8, 2)) == math.inf
    for steps in (None, -1):
        endless = replace(with_noise(50.0, 8, 2), planned_steps=steps)
        assert signal_to_noise(endless) is None
        assert noise_warning(endless) is None


def test_a_warning_comes_below_the_line() -> None:
    assert LEAST == 4_000.0
    assert noise_warning(with_noise(1.0, 400, 100)) is None
    assert noise_warning(with_noise(1.0, 399, 100)) is not None


SIZES = {
    "audit_one_run": 20_000,
    "dlrm_adafest_lsg": 2_000_000,
    "dlrm_dpsgd": 1_000_000,
    "dlrm_lazydp": 2_000_000,
    "dlrm_lsg": 2_000_000,
    "pctr_adafest": 2_000_000,
    "pctr_adafest_plus": 2_000_000,
    "pctr_exponential": 2_000_000,
    "pctr_fest": 2_000_000,
    "pctr_streaming": 18 * 200_000,
    "pctr_streaming_criteo": 18 * 180_000_000,  # about: a day of Criteo's 1TB logs
    "sasrec_movielens_adafest": 795_000,  # about: windows of four fifths of the users
    "sasrec_synthetic_adafest": 157_000,
    "two_tower_movielens_adafest": 795_000,
    "two_tower_movielens_dpsgd": 795_000,
    "two_tower_movielens_lazydp": 795_000,
    "two_tower_synthetic": 314_000,
}
"""Number of examples that each recipe with a private plan trains on."""


def plan_of(recipe: dict[str, Any]) -> PrivacyPlan | None:
    settings = recipe["trainer"]["strategy"]["init_args"].get("privacy")
    if settings is None:
        return None
    reader = ArgumentParser(exit_on_error=False)
    reader.add_class_arguments(PrivacyPlan, "plan")
    made: PrivacyPlan = reader.instantiate_classes(reader.parse_object({"plan": settings})).plan
    return made


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_no_recipe_is_warned_of(name: str) -> None:
    recipe = yaml.safe_load(shipped_recipes()[name].read_text())
    plan, batch = plan_of(recipe), recipe["data"]["init_args"]["batch_size"]
    if plan is None or not plan.mechanism.is_private:
        assert name not in SIZES
        return
    size, trainer = SIZES[name], recipe["trainer"]
    length = -(-size // batch)
    steps = trainer.get("max_steps") or length * trainer["max_epochs"]
    phases = [Phase(0, size, min(1.0, batch / size))]
    if plan.by_day:
        phases = day_phases([size * day // 18 for day in range(19)], batch, steps, ["day"] * 18)
    tables = [Table("t", 338_782, tuple(f"f{i}" for i in range(26)))]
    run = resolve(plan, phases, size, float(batch), steps, None, tables, grid=COARSE)
    assert noise_warning(run) is None
    ratio = signal_to_noise(run)
    assert ratio is not None
    if not name.startswith("audit"):  # which is there to be attacked, and takes four steps
        assert ratio > 10 * LEAST

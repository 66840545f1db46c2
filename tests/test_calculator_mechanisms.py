"""calibrate and account price every mechanism as training does."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import pytest

import lightning_dpsparse
from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.cli import main
from lightning_dpsparse.engine.mechanism import Mechanism
from lightning_dpsparse.engine.step_inputs import Table
from lightning_dpsparse.mechanisms import TABLE_MECHANISMS
from lightning_dpsparse.mechanisms.adafest import AdaFEST
from lightning_dpsparse.mechanisms.exponential import ExponentialSelection
from lightning_dpsparse.mechanisms.fest import FEST, AdaFESTPlus
from lightning_dpsparse.mechanisms.lazydp import LazyDP
from lightning_dpsparse.mechanisms.selection import NoisyHistogram, Selection
from lightning_dpsparse.plan import PrivacyPlan, Users
from lightning_dpsparse.run_plan import RunPlan, resolve
from lightning_dpsparse.sampling.poisson import Phase, day_phases
from tests.support.calculator import RUN, answer

SMALL = ["--examples", "100000", "--batch", "1000", "--steps", "50"]
NOISE, BATCHES, UNITS = 1.5, 50, 100_000
COUNTED = ["selection.rows_per_table=9", "selection.frequencies=NoisyHistogram"]
COUNTED += ["selection.frequencies.noise_multiplier=40"]
SELECTION = Selection(rows_per_table=9, frequencies=NoisyHistogram(noise_multiplier=40.0))
USERS = Users(max_examples=3, drawn="users")

EVERY_MECHANISM: list[tuple[list[str], list[str], dict[str, Any]]] = [
    (["dpsgd"], [], {}),
    (["lazydp"], [], {"mechanism": LazyDP()}),
    (["adafest"], ["half_survival=2"], {"mechanism": AdaFEST(half_survival=2.0)}),
    (["fest"], COUNTED, {"mechanism": FEST(selection=SELECTION)}),
    (
        ["adafestplus"],
        [*COUNTED, "noise_ratio=3", "threshold=1"],
        {"mechanism": AdaFESTPlus(selection=SELECTION, noise_ratio=3.0, threshold=1.0)},
    ),
    (
        ["exponentialselection"],
        ["num_rows=64"],
        {"mechanism": ExponentialSelection(num_rows=64)},
    ),
    (
        ["exponentialselection", "--examples-per-user", "3", "--draw", "users"],
        ["num_rows=64", "noise_ratio=2"],
        {"mechanism": ExponentialSelection(num_rows=64, noise_ratio=2.0), "unit": USERS},
    ),
    (["dpsgd", "--sampling", "fixed_order"], [], {"sampling": "fixed_order"}),
    (["dpsgd", "--sampling", "unamplified"], [], {"sampling": "unamplified"}),
    (["lazydp", "--days", "4"], [], {"mechanism": LazyDP(), "by_day": True}),
]


def resolved(settings: dict[str, Any], **given: float) -> RunPlan:
    """The run as training would resolve it."""
    plan = PrivacyPlan(**settings, **given)
    phases, per_pass = [Phase(0, UNITS, 1_000 / UNITS)], None
    if plan.sampling != "poisson":
        phases = [Phase(0, UNITS, 1.0)]
        per_pass = 100 if plan.sampling == "fixed_order" else None
    if plan.by_day:
        bounds = [UNITS * day // 4 for day in range(5)]
        phases = day_phases(bounds, 1_000, BATCHES, ["a", "b", "c", "d"])
    tables = [Table("t", 10_000, tuple(f"f{i}" for i in range(26)))]
    return resolve(plan, phases, UNITS, 1_000.0, BATCHES, per_pass, tables)


@pytest.mark.parametrize(("options", "fields", "settings"), EVERY_MECHANISM, ids=str)
def test_every_mechanism_is_priced_as_training_prices_it(
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    fields: list[str],
    settings: dict[str, Any],
) -> None:
    asked = [*SMALL, "--mechanism", *options, *(f"--set={field}" for field in fields)]
    run = resolved(settings, noise_multiplier=NOISE)
    ledger = Ledger()
    run.charge(ledger, 0, BATCHES)
    found = answer(capsys, "account", "--noise-multiplier", str(NOISE), *asked)
    assert found["epsilon"] == ledger.epsilon(run.delta)
    main(["account", "--noise-multiplier", str(NOISE), *asked])
    captured = capsys.readouterr()
    assert f"epsilon {found['epsilon']:.4f}" in captured.out
    assert captured.err == ""


@pytest.mark.parametrize("at", [3, 5])
def test_calibrate_finds_the_noise_of_training(capsys: pytest.CaptureFixture[str], at: int) -> None:
    (name,), fields, settings = EVERY_MECHANISM[at]
    asked = [*SMALL, "--mechanism", name, *(f"--set={field}" for field in fields), "--no-table"]
    found = answer(capsys, "calibrate", "--epsilon", "3", *asked)
    assert found["noise_multiplier"] == resolved(settings, epsilon=3.0).noise_multiplier


def test_every_public_mechanism_for_tables_is_offered() -> None:
    public = {
        name
        for name in lightning_dpsparse.__all__
        if isinstance(getattr(lightning_dpsparse, name), type)
        and issubclass(getattr(lightning_dpsparse, name), Mechanism)
    }
    assert public == set(TABLE_MECHANISMS)


def test_what_else_is_released_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    fields = [f"--set={field}" for field in COUNTED]
    main(["account", "--noise-multiplier", "1", *SMALL, "--mechanism", "fest", *fields])
    assert "a selection of rows: Gaussian, noise multiplier 40" in capsys.readouterr().out
    exponential = ["--mechanism", "exponentialselection", "--set", "num_rows=16"]
    main(["account", "--noise-multiplier", "1", *SMALL, *exponential])
    assert "on each choice of a row epsilon" in capsys.readouterr().out
    chosen = ["--mechanism", "adafest", "--set", "false_positives=10", "--rows", "10000"]
    found = answer(capsys, "account", "--noise-multiplier", "1", *SMALL, *chosen)
    stddev = found["contribution_noise_multiplier"]
    beyond = 1 - NormalDist().cdf(found["threshold"] / stddev)
    assert 10_000 * beyond == pytest.approx(10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--mechanism", "eana"], "found EANA, which is not differentially private"),
        (["--mechanism", "none"], "argument --mechanism: invalid choice"),
        (["--mechanism", "exponentialselection"], "argument --set: ExponentialSelection: the"),
        (["--set", "width=3"], "argument --set: DPSGD: unrecognized arguments"),
        (["--set", "chunk_rows=x"], "argument --set: DPSGD: set.chunk_rows: expected int, found x"),
        (["--noise-ratio", "3"], "argument --noise-ratio: DPSGD has no such setting"),
        (["--mechanism", "adafest", "--noise-ratio", "-3"], "Expected noise_ratio > 0"),
        (["--mechanism", "adafest", "--set", "false_positives=2"], "argument --rows: expected"),
        (["--mechanism", "fest"], "argument --set: FEST: the following arguments are required"),
        (["--draw", "users"], "argument --draw: expected --examples-per-user"),
        (["--days", "2000"], "argument --batch: expected at most the 500 examples of one of"),
        (["--days", "2", "--sampling", "fixed_order"], "Expected sampling='poisson' with"),
        (["--max-batch", "0"], "Expected max_batch_size >= 1"),
        (["--examples-per-user", "0"], "Expected max_examples >= 1"),
    ],
)
def test_mistakes_are_named(
    capsys: pytest.CaptureFixture[str], change: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["account", "--noise-multiplier", "1", *RUN, *change])
    assert message in f"{capsys.readouterr().err} {end.value.code}"

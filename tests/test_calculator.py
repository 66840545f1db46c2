"""calibrate, account and report on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest

import lightning_dpsparse
from lightning_dpsparse import report
from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.accounting.privacy_loss import COARSE
from lightning_dpsparse.calculator.words import calibration_in_words
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
from lightning_dpsparse.report.facts import make_facts
from lightning_dpsparse.run_plan import RunPlan, resolve
from lightning_dpsparse.sampling.poisson import Phase, day_phases

RUN = ["--examples", "1000000", "--batch", "1024", "--steps", "10000", "--delta", "1e-6"]


def answer(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    main([*args, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_calibrate_finds_the_noise_and_shows_larger_batches(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = answer(capsys, "calibrate", "--epsilon", "1", *RUN)
    assert found["noise_multiplier"] == pytest.approx(0.7931, abs=5e-4)
    assert [row["batch"] for row in found["table"]] == [256, 1024, 4096, 16384, 65536]
    assert [row["steps"] for row in found["table"]] == [40000, 10000, 2500, 625, 156]
    per_example = [row["noise_per_example"] for row in found["table"]]
    assert per_example == sorted(per_example, reverse=True)
    assert per_example[0] > 10 * per_example[-1]


def test_calibrate_splits_adafests_noise(capsys: pytest.CaptureFixture[str]) -> None:
    extra = ["--mechanism", "adafest", "--noise-ratio", "5", "--no-table"]
    found = answer(capsys, "calibrate", "--epsilon", "1", *RUN, *extra)
    assert found["contribution_noise_multiplier"] == pytest.approx(4.044, abs=3e-3)
    assert found["gradient_noise_multiplier"] == pytest.approx(0.8088, abs=5e-4)


def test_a_calibration_is_priced_with_the_steps(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--examples", "10000", "--batch", "100", "--steps", "100", "--no-table"]
    without = answer(capsys, "calibrate", "--epsilon", "1", *small)["noise_multiplier"]
    found = answer(capsys, "calibrate", "--epsilon", "1", *small, "--calibration")
    assert 1.0 < found["noise_multiplier"] / without < 1.01  # one percent of the budget
    assert "without amplification" in found["calibration"]
    dear = answer(capsys, "calibrate", "--epsilon", "1", *small, "--calibration", "6")
    assert dear["noise_multiplier"] > 1.03 * without
    noise = str(dear["noise_multiplier"])
    run = ["--noise-multiplier", noise, *small[:-1], "--calibration", "6"]
    assert answer(capsys, "account", *run)["epsilon"] == pytest.approx(1.0, abs=2e-3)
    main(["account", *run])
    said = capsys.readouterr().out
    assert "beside a calibration of logits: Gaussian, noise multiplier 6" in said


def test_thresholds_are_shown_for_what_they_do(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--examples", "10000", "--batch", "100", "--steps", "100", "--mechanism", "adafest"]
    rows = ["--rows", "1000", "--features", "4", "--map-clip-norm", "2"]
    found = answer(capsys, "account", "--noise-multiplier", "1", *small, *rows)
    stddev = 2 * found["contribution_noise_multiplier"]
    for row in found["thresholds"]:
        assert row["threshold"] == row["half_survival"]  # C1 / sqrt(4 rows) is one
        beyond = 1 - NormalDist().cdf(row["threshold"] / stddev)
        assert row["false_positives"] == pytest.approx(1000 * beyond, abs=1e-9)
    main(["account", "--noise-multiplier", "1", *small, *rows])
    assert "threshold   half_survival   false_positives" in capsys.readouterr().out


def test_account_is_calibrates_inverse(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "account", "--noise-multiplier", "0.7931", *RUN)
    assert found["epsilon"] == pytest.approx(1.0, abs=1e-3)
    assert found["rdp_epsilon"] > found["epsilon"]
    by_delta = [epsilon for _, epsilon in found["epsilon_for_delta"]]
    assert by_delta == sorted(by_delta)


@pytest.mark.parametrize(
    ("extra", "noise", "epsilon"),
    [
        (["--examples-per-user", "4", "--draw", "examples"], "1.0", 2.56),
        (["--examples-per-user", "4", "--draw", "users"], "1.0", 0.57),
        (["--max-batch", "1024"], "0.7931", 13.42),
    ],
)
def test_account_knows_users_and_truncation(
    capsys: pytest.CaptureFixture[str], extra: list[str], noise: str, epsilon: float
) -> None:
    found = answer(capsys, "account", "--noise-multiplier", noise, *RUN, *extra)
    assert found["epsilon"] == pytest.approx(epsilon, abs=6e-3)


def test_calibrate_says_what_more_epochs_cost(capsys: pytest.CaptureFixture[str]) -> None:
    demo = ["--examples", "2000000", "--batch", "8192", "--delta", "1e-8"]
    found = answer(capsys, "calibrate", "--epsilon", "8", *demo, "--epochs", "1")
    assert found["steps"] == 245  # an epoch of recipes/dlrm_lazydp.yaml
    rows = found["epochs"]
    assert [row["epochs"] for row in rows] == [1, 2, 4, 8, 16]
    assert [row["steps"] for row in rows] == [245 * row["epochs"] for row in rows]
    # What training calibrates to on the fine grid, which is lower by a percent at most.
    assert rows[0]["noise_multiplier"] == pytest.approx(0.511, rel=0.01)
    assert rows[2]["noise_multiplier"] == pytest.approx(0.554, rel=0.01)
    for row in rows:
        noise, epochs = row["noise_multiplier"], row["epochs"]
        assert row["noise_of_a_step"] == pytest.approx(noise / 8192)
        assert row["noise_of_the_run"] == pytest.approx(noise / 8192 / row["steps"] ** 0.5)
        times = noise / rows[0]["noise_multiplier"]
        assert row["step_over_one_epoch"] == pytest.approx(times)
        assert row["run_over_one_epoch"] == pytest.approx(times / epochs**0.5)
    main(["calibrate", "--epsilon", "8", *demo, "--epochs", "1"])
    text = capsys.readouterr().out
    assert "Four epochs cost 8.5% more noise per step than one." in text
    assert "noise is 46% less" in text


LOG = ["--examples", "400000", "--users", "38645", "--examples-per-user", "16"]


def test_calibrate_compares_both_ways_to_draw_users(capsys: pytest.CaptureFixture[str]) -> None:
    """At equal examples in a step, each priced as training prices it."""
    found = answer(capsys, "calibrate", "--epsilon", "8", *LOG, "--batch", "4096", "--epochs", "4")
    assert (found["delta"], found["steps"], found["drawn"]) == (1e-6, 40, "users")
    users, examples = found["drawings"]
    assert (users["batch"], examples["batch"]) == (4096, 42396)
    assert users["examples_per_step"] == pytest.approx(examples["examples_per_step"], rel=1e-4)
    for row, drawn, units in ((users, "users", 38_645), (examples, "examples", 400_000)):
        assert row["drawn"] == drawn
        plan = PrivacyPlan(epsilon=8.0, unit=Users(max_examples=16, drawn=drawn))
        phase = Phase(0, units, row["batch"] / units)
        run = resolve(plan, [phase], 38_645, float(row["batch"]), 40, grid=COARSE)
        assert row["noise_multiplier"] == run.noise_multiplier
    per_user = 400_000 / 38_645
    each = users["noise_multiplier"] / 4096
    assert users["noise_per_example"] == pytest.approx([each / per_user**0.5, each])
    alone = examples["noise_multiplier"] / 42396
    assert examples["noise_per_example"] == pytest.approx([alone, alone])
    same = answer(
        capsys, "calibrate", "--epsilon=8", *LOG, "--batch=42396", "--steps=40", "--draw=examples"
    )["drawings"]
    assert same == found["drawings"]


@pytest.mark.parametrize(
    ("examples", "words"),
    [
        (3e-3, "3 times less noise if a user's examples pull in different directions, as they"),
        (3e-3, "1.3 times more noise if all pull in one direction: draw users."),
        (1e-2, "2.5 times less noise if all pull in one direction: draw users."),
        (5e-4, "2 times more noise if a user's examples pull in different directions, as they"),
        (5e-4, "8 times more noise if all pull in one direction: draw examples."),
    ],
)
def test_the_better_drawing_is_named(examples: float, words: str) -> None:
    shared = {"batch": 9, "examples_per_step": 9.0, "noise_multiplier": 1.0}
    rows = [
        {"drawn": "users", **shared, "noise_per_example": [1e-3, 4e-3]},
        {"drawn": "examples", **shared, "noise_per_example": [examples, examples]},
    ]
    found = {"noise_multiplier": 1.0, "epsilon": 1.0, "delta": 1e-6, "steps": 9}
    text = calibration_in_words({**found, "sampling_rate": 0.1, "drawings": rows})
    assert words in text


def test_account_compares_both_ways_too(capsys: pytest.CaptureFixture[str]) -> None:
    options = [*LOG, "--batch", "4096", "--steps", "40"]
    found = answer(capsys, "account", "--noise-multiplier", "2", *options)
    users, examples = (row["epsilon"] for row in found["drawings"])
    assert users == found["epsilon"]
    other = [*LOG, "--batch", "42396", "--steps", "40", "--draw", "examples"]
    assert examples == answer(capsys, "account", "--noise-multiplier", "2", *other)["epsilon"]
    assert examples > 10 * users
    main(["account", "--noise-multiplier", "2", *options])
    assert f"{examples:.4f}" in capsys.readouterr().out


def test_drawings_without_an_event_are_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--mechanism", "exponentialselection", "--set", "num_rows=16"]
    options = [*LOG, "--batch", "512", "--steps", "4", *chosen]
    assert answer(capsys, "account", "--noise-multiplier", "2", *options)["drawings"] == []


def test_calibrate_warns_of_a_plan_that_cannot_learn(capsys: pytest.CaptureFixture[str]) -> None:
    hopeless = ["--epsilon", "0.1", "--examples", "100000", "--batch", "64", "--epochs", "1"]
    main(["calibrate", *hopeless, "--no-table", "--json"])
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    expected = 64 * 1563**0.5 / found["noise_multiplier"]
    assert found["signal_to_noise"] == pytest.approx(expected)
    assert "times as much signal as noise over the run, found 2,132: with a" in captured.err
    assert found["warning"] in captured.err
    main(["calibrate", *hopeless[2:], "--epsilon", "8", "--no-table", "--json"])
    assert capsys.readouterr().err == ""


def test_the_tables_price_a_small_epsilon_as_training_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a coarse grid four epochs of this run would ask for twice the noise."""
    small = ["--examples", "100000", "--batch", "64", "--epochs", "4"]
    found = answer(capsys, "calibrate", "--epsilon", "0.1", *small)
    assert found["epochs"][2]["noise_multiplier"] == found["noise_multiplier"]
    run = resolve(PrivacyPlan(epsilon=0.1), [Phase(0, 100_000, 256 / 1e5)], 100_000, 256.0, 1563)
    assert found["table"][2]["batch"] == 256
    assert found["table"][2]["noise_multiplier"] == run.noise_multiplier


def test_people_get_words(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--examples", "10000", "--batch", "100", "--steps", "100"]
    main(["calibrate", "--epsilon", "2", *small])
    text = capsys.readouterr().out
    assert "noise_multiplier 0." in text
    assert "at delta 1e-05" in text
    assert "prefer large batches" in text
    main(["account", "--noise-multiplier", "1", *small, "--mechanism", "adafest"])
    text = capsys.readouterr().out
    assert "by Renyi accounting" in text
    assert "on the contribution map 5.0990" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--batch", "0"], "argument --batch: expected a whole number of at least 1, found '0'"),
        (["--batch", "2000000"], "expected at most 1000000 examples"),
        (["--delta", "2"], "argument --delta: expected a number between 0 and 1"),
        (["--epsilon", "-1"], "argument --epsilon: expected more than 0"),
        (
            ["--max-batch", "5", "--examples-per-user", "2", "--draw", "examples"],
            "there is no accounting for both",
        ),
        (["--examples-per-user", "2"], "expected --users, the number of users, or --draw"),
        (["--users", "9000"], "argument --users: expected --examples-per-user"),
        (["--users", "9", "--examples-per-user", "2"], "to be 1 to 2 for each user, found 9 users"),
        (["--epochs", "2"], "argument --epochs: not allowed with argument --steps"),
    ],
)
def test_nonsense_is_named(
    capsys: pytest.CaptureFixture[str], change: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        main(["calibrate", "--epsilon", "1", *RUN, *change])
    assert message in capsys.readouterr().err


def test_report_shows_the_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = PrivacyPlan(noise_multiplier=1.0, taints=("tuned on the data",))
    run = resolve(plan, [Phase(0, 10_000, 0.01)], 10_000, 100.0, 50)
    ledger = Ledger()
    run.charge(ledger, 0, 50)
    facts = make_facts(run, ledger, ranks=2)
    report.write(facts, tmp_path / "logs" / "version_0")
    (tmp_path / "logs" / "version_0" / report.HTML_NAME).unlink()
    main(["report", str(tmp_path)])
    text = capsys.readouterr().out
    assert facts["guarantee"]["sentence"] in text
    assert "taint: tuned on the data" in text
    assert (tmp_path / "logs" / "version_0" / report.HTML_NAME).exists()
    assert answer(capsys, "report", str(tmp_path)) == facts
    with pytest.raises(SystemExit, match=r"error: Expected privacy_report.json in .*, found none"):
        main(["report", str(tmp_path / "logs" / "version_0" / "none")])


@pytest.mark.parametrize(("delta", "said"), [("1e-6", "training refuses it"), ("5e-7", "is 50%")])
def test_a_large_delta_is_warned_of(
    capsys: pytest.CaptureFixture[str], delta: str, said: str
) -> None:
    main(["account", "--noise-multiplier", "1", *RUN[:-1], delta, "--json"])
    assert said in capsys.readouterr().err
    main(["account", "--noise-multiplier", "1", *RUN[:-1], "1e-7", "--json"])
    assert capsys.readouterr().err == ""


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

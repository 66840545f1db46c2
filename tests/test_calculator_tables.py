"""What calibrate and account compare: epochs, batch sizes, ways to draw users."""

from __future__ import annotations

import json

import pytest

from lightning_dpsparse.accounting.privacy_loss import COARSE
from lightning_dpsparse.calculator.words import calibration_in_words
from lightning_dpsparse.cli import main
from lightning_dpsparse.plan import PrivacyPlan, Users
from lightning_dpsparse.run_plan import resolve
from lightning_dpsparse.sampling.poisson import Phase
from tests.support.calculator import answer


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
        (1.02e-3, "has about as much noise if a user's examples pull in different directions"),
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


def test_both_ways_are_charged_for_a_calibration(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["account", "--noise-multiplier=2", *LOG, "--batch=4096", "--steps=40", "--calibration=2"]
    found = answer(capsys, *run)
    users, examples = (row["epsilon"] for row in found["drawings"])
    assert users == found["epsilon"]
    other = [*run, "--batch=42396", "--draw=examples"]
    assert examples == answer(capsys, *other)["epsilon"]


def test_steps_that_no_whole_user_fits_into_are_not_compared(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A batch of five examples has half a user."""
    options = [*LOG, "--batch", "5", "--steps", "4", "--draw", "examples"]
    assert answer(capsys, "account", "--noise-multiplier", "2", *options)["drawings"] == []


def test_epochs_of_whole_batches_are_not_recommended(capsys: pytest.CaptureFixture[str]) -> None:
    """Without sampling, T steps need sqrt(T) times the noise."""
    main(["calibrate", "--epsilon=8", "--examples=1000000", "--batch=1000000", "--epochs=1"])
    text = capsys.readouterr().out
    assert "Four epochs cost 100% more noise per step than one." in text
    assert "Over the run, noise is no less" in text
    assert "prefer several epochs" not in text


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

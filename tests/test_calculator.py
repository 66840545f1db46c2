"""calibrate, account and report on the command line."""

from __future__ import annotations

from pathlib import Path
from statistics import NormalDist

import pytest

from lightning_dpsparse import report
from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.cli import main
from lightning_dpsparse.plan import PrivacyPlan
from lightning_dpsparse.report.facts import make_facts
from lightning_dpsparse.run_plan import resolve
from lightning_dpsparse.sampling.poisson import Phase
from tests.support.calculator import RUN, answer


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

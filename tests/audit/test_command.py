"""`lightning-dpsparse audit`, as people call it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
from lightning.pytorch import LightningModule, Trainer

from lightning_dpsparse.audit.one_run import one_run_audit
from lightning_dpsparse.audit.secret_sharer import SecretSharer
from lightning_dpsparse.cli import main
from lightning_dpsparse.data import SyntheticData
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.private import PrivateSteps
from tests.support.command import run_captured, run_command
from tests.support.ranks import Ranks

ROOT = Path(__file__).parents[2]


def test_one_run_says_claim_and_measurement_and_joins_a_report(tmp_path: Path) -> None:
    done = run_command("audit", "one-run", "--canaries", "20000", "--seed", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "claimed ε ≤ 1.3, measured ε ≥ 0." in done.stdout
    (folder,) = (tmp_path / "runs" / "lightning_logs").iterdir()
    facts = json.loads((folder / "privacy_report.json").read_text())
    (found,) = facts["audits"]
    assert found["passed"]
    assert 0 < found["measured_epsilon"] < found["claimed_epsilon"]
    assert "one run, white box, 20,000 canaries" in (folder / "privacy_report.html").read_text()


def audit_in(folder: Path) -> str:
    """Runs inside a rank: what the command prints there."""
    before, printed = Path.cwd(), io.StringIO()
    os.chdir(folder)
    try:
        with redirect_stdout(printed):
            main(["audit", "one-run", "--canaries", "2000"])
    finally:
        os.chdir(before)
    return printed.getvalue()


@pytest.mark.slow
def test_one_run_on_two_ranks_speaks_once(two_ranks: Ranks, tmp_path: Path) -> None:
    first, second = two_ranks.run(audit_in, tmp_path)
    assert first.count("measured ε ≥") == 1
    assert second.count("measured ε ≥") == 0


@pytest.mark.slow
def test_one_run_under_torchrun_speaks_once(tmp_path: Path) -> None:
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "lightning_dpsparse"]
    done = subprocess.run(
        [sys.executable, *words, "audit", "one-run", "--canaries", "2000"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("measured ε ≥") == 1


def audit_without_payment() -> None:
    with mock.patch.object(PrivateSteps, "before_release"):
        main(["audit", "one-run", "--canaries", "2000"])


def test_a_broken_run_fails_loudly(tmp_path: Path) -> None:
    done = run_captured(audit_without_payment, cwd=tmp_path)
    assert done.returncode == 1
    assert "AUDIT FAILED" in done.stderr
    (folder,) = (tmp_path / "runs" / "lightning_logs").iterdir()
    assert "AN AUDIT FAILED" in (folder / "privacy_report.html").read_text()


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter is intended")
@pytest.mark.parametrize("name", ["one-run", "secret-sharer"])
def test_help_and_missing_recipes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["audit", name, "--help"])
    assert "--config" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"error: Expected the path of a recipe.* 'nowhere.yaml'"):
        main(["audit", name, "--config", "nowhere.yaml"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["one-run", "--canaries", "many"], "--canaries: expected a whole number of at least 2"),
        (["one-run", "--canaries", "0"], "--canaries: expected a whole number of at least 2"),
        (["one-run", "--confidence", "95"], "--confidence: expected a number between 0 and 1"),
        (["one-run", "--seed", "-1"], "--seed: expected a whole number of at least 0"),
        (["secret-sharer", "--repeats", "1,x"], "--repeats: expected a whole number of at least 1"),
        (["secret-sharer", "--references", "1"], "--references: expected a whole number of at"),
        ([], "the following arguments are required: {one-run,secret-sharer}"),
    ],
)
def test_bad_options_are_named(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["audit", *words])
    assert message in capsys.readouterr().err


def test_a_report_that_is_not_there_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"error: Expected privacy_report.json in .*, found none"):
        main(["audit", "one-run", "--report", str(tmp_path)])


def test_an_audit_called_from_python_checks_its_options() -> None:
    trainer = Trainer(strategy="dpsparse", accelerator="cpu", devices=1, logger=False)
    for options in ({"num_canaries": 1}, {"num_canaries": 10, "confidence": 1.0}):
        with pytest.raises(Refused, match="num_canaries of at least 2 and confidence between"):
            one_run_audit(trainer, LightningModule(), SyntheticData(), **options)
    for options, message in (
        ({"repeats": []}, "at least one number of repeats"),
        ({"seed": -1}, "Expected seed >= 0, found -1"),
    ):
        with pytest.raises(Refused, match=message):
            SecretSharer(**options)

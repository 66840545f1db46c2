"""Whole private runs: a target met and shown, a budget that ends them, evidence that is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_dpsparse import DPSGD, EANA, PrivacyPlan, PrivacyReport
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.report import read as read_report
from tests.support.journals import charged_in
from tests.support.private_runs import (
    BATCH,
    NOISY,
    REPLAYED,
    TARGET,
    Watching,
    fit,
    ledger_of,
    marked_loader,
    saved_ledger,
)
from tests.support.ranks import Ranks
from tests.support.tiny_model import make_trainer


@pytest.mark.parametrize("world", [1, 2])
def test_a_target_is_met_and_shown(
    world: int, one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    ranks = one_rank if world == 1 else two_ranks
    results = ranks.run(fit, world, TARGET, tmp_path, max_epochs=2)
    for result in results:
        assert result["steps"] == 10
        assert ledger_of(result).steps == 10
        assert result["epsilons"] == sorted(result["epsilons"])
        assert result["epsilons"][-1] <= 3.0
        assert result["noise"] == results[0]["noise"]
    exact = ledger_of(results[0]).epsilon(1e-3)
    assert 2.98 < exact <= 3.0
    assert exact <= results[0]["epsilons"][-1] + 1e-6


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_min_epochs_cannot_overspend(
    world: int, one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    plan = PrivacyPlan(epsilon=3.0, delta=1e-3, noise_multiplier=1.0)
    ranks = one_rank if world == 1 else two_ranks
    result = ranks.run(fit, world, plan, tmp_path, min_epochs=30, max_epochs=30, save_every=1000)[0]
    ledger = ledger_of(result)
    assert 5 < ledger.steps < 150
    assert result["steps"] == len(result["drawn"]) == ledger.steps
    assert ledger.epsilon(1e-3) <= 3.0
    more = ledger.copy()
    more.charge(ledger.entries[0].event)
    assert more.epsilon(1e-3) > 3.0
    checkpoint = next(tmp_path.glob("budget-spent*.ckpt"))
    assert saved_ledger(checkpoint) == ledger
    assert read_report(checkpoint)["ran"]["steps"] == ledger.steps


def overspend(folder: Path) -> None:
    """Whoever lifts the trainer's limit meets the engine's."""

    class Greedy(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            trainer.fit_loop.epoch_loop.max_steps = 1000

    plan = PrivacyPlan(epsilon=3.0, delta=1e-3, noise_multiplier=1.0)
    fit(1, plan, folder, max_epochs=30, callbacks=[Greedy()])


def test_the_engine_refuses_the_step_that_would_overspend(one_rank: Ranks, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="found the budget spent after"):
        one_rank.run(overspend, tmp_path)


def test_a_failed_step_is_charged(one_rank: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="this step fails"):
        one_rank.run(fit, 1, NOISY, tmp_path, module=Watching(fail_at=3))
    assert charged_in(tmp_path / "privacy").steps == 4


@pytest.mark.parametrize("weights_only", [False, True])
def test_every_checkpoint_has_its_ledger_and_report(
    one_rank: Ranks, tmp_path: Path, weights_only: bool
) -> None:
    one_rank.run(fit, 1, NOISY, tmp_path, save_every=2, weights_only=weights_only)
    name = "weights-step=4.ckpt" if weights_only else "step=4.ckpt"
    assert saved_ledger(tmp_path / name).steps == 4
    facts = read_report(tmp_path / name)
    assert facts["ran"]["steps"] == 4
    assert facts["guarantee"]["epsilon"] == pytest.approx(
        saved_ledger(tmp_path / name).epsilon(1e-3)
    )


def test_no_secret_is_in_a_checkpoint(one_rank: Ranks, tmp_path: Path) -> None:
    one_rank.run(fit, 1, REPLAYED, tmp_path, save_every=2)
    secret = (4).to_bytes(16, "big")
    for path in (tmp_path / "step=2.ckpt").rglob("*"):
        if path.is_file():
            assert secret not in path.read_bytes()


def test_taints_are_found(one_rank: Ranks, tmp_path: Path) -> None:
    facts = one_rank.run(tainted, tmp_path)[0]
    assert facts["taints"] == [
        "vocabulary counted on the data",
        "Training may have been stopped early by a metric of training data.",
        "Logged without noise: train_loss.",
    ]
    written = read_report(tmp_path)
    assert written["taints"] == facts["taints"]
    assert (tmp_path / "privacy_report.html").stat().st_size > 1000
    json.dumps(facts, allow_nan=False)


class Telling(Watching):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss.detach().sum(), batch_size=1)
        return loss


def tainted(folder: Path) -> dict[str, Any]:
    stopper = pl.callbacks.EarlyStopping("train_loss", strict=False, check_on_train_epoch_end=True)
    plan = PrivacyPlan(noise_multiplier=1.0, delta=1e-3, taints=("vocabulary counted on the data",))
    callbacks = [stopper, PrivacyReport()]
    facts: dict[str, Any] = fit(
        1, plan, folder, module=Telling(), callbacks=callbacks, with_facts=True
    )["facts"]
    return facts


@pytest.mark.parametrize("mechanism", [DPSGD(), EANA()])
def test_the_monitor_marks_what_is_not_private(
    one_rank: Ranks, tmp_path: Path, mechanism: Any
) -> None:
    quiet, loud = (one_rank.run(monitored, tmp_path, mechanism, d)[0] for d in (False, True))
    assert set(quiet) - {"epsilon"} == {"noise_multiplier", "noise_stddev"}
    assert quiet["noise_stddev"] == pytest.approx(1.0 * 0.5 / BATCH)
    extra = {"nonprivate/units_clipped", "nonprivate/rows_read"}
    assert set(loud) - set(quiet) == extra
    assert loud["nonprivate/units_clipped"] == 1.0  # C is below every example's norm
    assert 0 < loud["nonprivate/rows_read"] < 1


def monitored(folder: Path, mechanism: Any, diagnostics: bool) -> dict[str, float]:
    from lightning_dpsparse import PrivacyMonitor

    plan = PrivacyPlan(mechanism=mechanism, noise_multiplier=1.0, delta=1e-3, clip_norm=0.5)
    trainer = make_trainer(
        1,
        privacy=plan,
        callbacks=[PrivacyMonitor(diagnostics=diagnostics)],
        default_root_dir=str(folder),
    )
    trainer.fit(Watching(), marked_loader(1))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_callbacks_need_a_plan(one_rank: Ranks, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Expected DPSparseStrategy with a privacy plan"):
        one_rank.run(fit, 1, None, tmp_path, callbacks=[PrivacyReport()])

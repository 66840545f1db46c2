"""Runs that calibrate: when they do, what is charged, and how they go on."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dpsparse import PrivacyReport
from lightning_dpsparse import report as reports
from lightning_dpsparse.accounting.calibration import epsilon_of
from lightning_dpsparse.plugin.private_run import CHECKPOINT_KEY
from tests.support.calibration_runs import (
    QUERY,
    SIZE,
    STEP,
    Clicked,
    Clicking,
    calibrated,
    charges,
    clicks_loader,
    plan,
)
from tests.support.journals import charged_in
from tests.support.private_runs import ledger_of
from tests.support.ranks import Ranks
from tests.support.tiny_model import loader, make_trainer, snapshot

# ---- when ----------------------------------------------------------------------------------------


def test_validation_and_checkpoints_after_the_last_step_see_the_calibrated_model(
    one_rank: Ranks, tmp_path: Path
) -> None:
    result = one_rank.run(_validated, tmp_path)[0]
    weight = result["state"]["dense"]["head.out.weight"]
    assert len(result["validated"]) == 2  # after each epoch
    assert not torch.equal(result["validated"][0], weight)
    assert torch.equal(result["validated"][1], weight)
    meta = torch.load(tmp_path / "step=10.ckpt" / "meta.pt", weights_only=True)[CHECKPOINT_KEY]
    assert meta["calibration"] == result["found"]
    assert meta["calibration"]["step"] == 10
    earlier = torch.load(tmp_path / "step=5.ckpt" / "meta.pt", weights_only=True)[CHECKPOINT_KEY]
    assert earlier["calibration"] is None
    # What the last checkpoint holds is what the run ended with.
    again = one_rank.run(_loaded, tmp_path / "step=10.ckpt")[0]
    assert torch.equal(again, weight)


def _validated(folder: Path) -> dict[str, Any]:
    module = Clicking()
    loaders = {"train_dataloaders": clicks_loader(1), "val_dataloaders": loader(8, 8, 1)}
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    trainer = make_trainer(
        1,
        privacy=plan(),
        callbacks=[saver],
        enable_checkpointing=True,
        max_epochs=2,
        num_sanity_val_steps=0,
        default_root_dir=str(folder),
    )
    trainer.fit(module, **loaders)
    run = trainer.strategy.private_run  # type: ignore[attr-defined]
    found = run.calibration.kept()
    return {"state": snapshot(module), "validated": module.validated, "found": found}


def _loaded(path: Path) -> Any:
    module = Clicking()
    make_trainer(1).test(module, loader(8, 8, 1), ckpt_path=path, verbose=False)
    return module.head.out.weight.detach().clone()


class StopsAt(Callback):
    """Ends training after some steps, as a time limit would."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.should_stop = trainer.global_step >= self.steps


def test_a_run_that_is_stopped_calibrates_and_says_so_in_its_report(
    one_rank: Ranks, tmp_path: Path
) -> None:
    callbacks = [StopsAt(3), PrivacyReport(str(tmp_path / "report"))]
    result = one_rank.run(
        calibrated, 1, plan(), tmp_path, callbacks=callbacks, max_epochs=4, save_every=1
    )[0]
    assert result["steps"] == 3
    assert result["found"]["step"] == 3
    assert charges(result) == [(STEP, 3), (QUERY, 1)]
    facts = reports.read(tmp_path / "report")
    assert facts["guarantee"]["epsilon"] == epsilon_of([(STEP, 3), (QUERY, 1)], 1e-5)
    (saved,) = tmp_path.rglob("calibrated-step=3.ckpt")
    meta = torch.load(saved / "meta.pt", weights_only=True)[CHECKPOINT_KEY]
    assert meta["calibration"] == result["found"]


def test_a_run_that_spends_its_budget_calibrates_within_it(one_rank: Ranks, tmp_path: Path) -> None:
    target = epsilon_of([(STEP, 6), (QUERY, 1)], 1e-5) + 1e-6
    result = one_rank.run(calibrated, 1, plan(epsilon=target), tmp_path, max_epochs=4)[0]
    assert charges(result) == [(STEP, 6), (QUERY, 1)]
    assert result["found"]["step"] == 6
    assert result["epsilons"][-1] <= target + 1e-6


# ---- charged -------------------------------------------------------------------------------------


def test_the_query_is_charged_once_beside_the_steps(one_rank: Ranks, tmp_path: Path) -> None:
    result = one_rank.run(calibrated, 1, plan(), tmp_path, with_facts=True)[0]
    assert charges(result) == [(STEP, 5), (QUERY, 1)]
    expected = epsilon_of([(STEP, 5), (QUERY, 1)], 1e-5)
    assert ledger_of(result).epsilon(1e-5) == expected
    assert result["facts"]["guarantee"]["epsilon"] == expected
    assert result["facts"]["ran"]["calibration_settings"]["noise_multiplier"] == 2.0
    said = [entry["event"] for entry in result["facts"]["ledger"]]
    assert "noise multiplier 2, without amplification; once, beside the steps" in said[1]
    assert result["epsilons"][-1] >= expected - 1e-6  # the progress bar is a bound throughout
    assert [e.count for e in charged_in(tmp_path / "privacy").entries] == [5, 1]


class Guarded(Clicked):
    """Notes what the journal says when all data is read, and may fail or die then."""

    def __init__(self, folder: Path, *, broken: bool = False, deadly: bool = False) -> None:
        super().__init__()
        self.folder, self.broken, self.deadly = folder, broken, deadly
        self.journals: list[list[Any]] = []

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if len(indices) == SIZE:
            ledger = charged_in(self.folder / "privacy")
            self.journals.append([(e.event, e.count) for e in ledger.entries])
            if self.deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.broken:
                raise RuntimeError("the data is broken")
        return [self.examples[i] for i in indices]


def _watched(folder: Path, **settings: Any) -> tuple[dict[str, Any], list[Any]]:
    data = Guarded(folder, **settings)
    result = calibrated(1, plan(), folder, data=data, save_every=5)
    return result, data.journals


def test_the_journal_has_the_charge_before_the_data_is_read(
    one_rank: Ranks, tmp_path: Path
) -> None:
    _, journals = one_rank.run(_watched, tmp_path)[0]
    assert len(journals) == 1
    assert (QUERY, 1) in journals[0]


def test_a_process_that_is_killed_in_the_query_has_paid_for_it(
    one_rank: Ranks, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="died"):
        one_rank.run(_watched, tmp_path, deadly=True)
    found = [(e.event, e.count) for e in charged_in(tmp_path / "privacy").entries]
    assert (QUERY, 1) in found


def test_a_query_that_breaks_off_is_charged_and_leaves_the_model(
    one_rank: Ranks, tmp_path: Path
) -> None:
    result, said = one_rank.run(_broken, tmp_path)[0]
    assert any("was not calibrated: RuntimeError" in words for words in said)
    assert not any("the data is broken" in words for words in said)  # it may be about somebody
    assert charges(result) == [(STEP, 5), (QUERY, 1)]
    assert result["found"] == {"step": 5}
    assert (tmp_path / "step=5.ckpt").is_dir()


def _broken(folder: Path) -> tuple[dict[str, Any], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result, _ = _watched(folder, broken=True)
    return result, [str(w.message) for w in caught]


class BrokenForOne(Clicked):
    """Cannot be read to its end on the second rank."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if len(indices) == 96 and indices[-1] > SIZE * 0.8:
            raise RuntimeError("the data is broken")
        return [self.examples[i] for i in indices]


def test_ranks_give_up_together(two_ranks: Ranks, tmp_path: Path) -> None:
    """Otherwise the first would wait for the second."""
    found = two_ranks.run(calibrated, 2, plan(), tmp_path, data=BrokenForOne, max_physical_batch=96)
    for result in found:
        assert result["found"] == {"step": 5}
        assert charges(result) == [(STEP, 5), (QUERY, 1)]


# ---- gone on with --------------------------------------------------------------------------------


def test_going_on_from_a_checkpoint_pays_for_another_query(one_rank: Ranks, tmp_path: Path) -> None:
    first = one_rank.run(calibrated, 1, plan(), tmp_path, save_every=1)[0]
    again = one_rank.run(calibrated, 1, plan(), tmp_path, resume=tmp_path / "step=3.ckpt")[0]
    assert again["found"] != first["found"]
    assert charges(again) == [(STEP, 5), (QUERY, 1), (STEP, 2), (QUERY, 1)]
    assert again["steps"] == 5


def test_going_on_from_the_calibrated_end_does_nothing(one_rank: Ranks, tmp_path: Path) -> None:
    first = one_rank.run(calibrated, 1, plan(), tmp_path, save_every=5)[0]
    one_rank.run(_nothing_left, tmp_path / "step=5.ckpt", tmp_path)
    ledger = charged_in(tmp_path / "privacy")
    assert [(e.event, e.count) for e in ledger.entries] == charges(first)


def _nothing_left(path: Path, folder: Path) -> None:
    module = Clicking()
    trainer = make_trainer(1, privacy=plan(), default_root_dir=str(folder))
    trainer.fit(module, clicks_loader(1), ckpt_path=path)
    assert module.drawn == []


def test_a_calibrated_module_that_takes_no_step_is_not_calibrated_again(
    one_rank: Ranks, tmp_path: Path
) -> None:
    """Training begins, and ends before its first step: the target covers a query, but no step."""
    target = epsilon_of([(STEP, 5), (QUERY, 1), (QUERY, 1)], 1e-5) + 1e-6
    first, second = one_rank.run(_twice, tmp_path, target)[0]
    assert charges(first) == charges(second) == [(STEP, 5), (QUERY, 1)]
    assert first["found"] == second["found"]
    for name, value in first["state"]["dense"].items():
        assert torch.equal(value, second["state"]["dense"][name])


def _twice(folder: Path, target: float) -> list[dict[str, Any]]:
    module = Clicking()
    privacy = plan(epsilon=target)
    return [calibrated(1, privacy, folder, module=module, max_epochs=n) for n in (1, 2)]

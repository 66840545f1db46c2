"""Logs by origin: what user code shows of training data is listed, whatever it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_dpsparse import AdaFEST, PrivacyMonitor, PrivacyPlan, PrivacyReport
from tests.support.private_runs import BATCH, Marked, Watching, marked_loader
from tests.support.ranks import Ranks
from tests.support.tiny_model import Bags, collate, make_trainer

NOISY = PrivacyPlan(noise_multiplier=1.0, delta=1e-3)
ADAFEST = PrivacyPlan(mechanism=AdaFEST(threshold=1.0), noise_multiplier=1.0, delta=1e-3)


class Logs(Watching):
    """Says something of the batch in `show`."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.show(loss.detach().sum())
        return loss

    def show(self, value: Tensor) -> None:
        raise NotImplementedError


class ValidityOfBatch(Logs):
    def show(self, value: Tensor) -> None:
        self.log("validity_of_batch", value, batch_size=1)


class RowsUpdated(Logs):
    def show(self, value: Tensor) -> None:
        self.log("rows_updated", value, batch_size=1)


class Epsilon(Logs):
    """Under our own name."""

    def show(self, value: Tensor) -> None:
        self.log("epsilon", value, prog_bar=True, batch_size=1)


class OnlyProgressBar(Logs):
    def show(self, value: Tensor) -> None:
        self.log("shown", value, prog_bar=True, logger=False, batch_size=1)


class ByDict(Logs):
    def show(self, value: Tensor) -> None:
        self.log_dict({"val_one": value, "val_two": value}, batch_size=1, on_epoch=True)


class StraightToLogger(Logs):
    def show(self, value: Tensor) -> None:
        self.logger.log_metrics({"val_sent": float(value)}, step=0)


class ThroughExperiment(Logs):
    def show(self, value: Tensor) -> None:
        self.logger.experiment.log_metrics({"val_sent": float(value)}, step=0)


class Hyperparameters(Logs):
    def show(self, value: Tensor) -> None:
        self.logger.log_hyperparams({"mean": float(value)})


class CallbackMetrics(Logs):
    def show(self, value: Tensor) -> None:
        self.trainer.callback_metrics["val_written"] = value


class AtEpochEnd(Watching):
    def on_train_epoch_end(self) -> None:
        self.log("val_epoch", torch.tensor(self.losses).mean())


class FromCallback(Callback):
    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.log("val_output", outputs["loss"].sum(), batch_size=1)


class FromBatchStart(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.log("clicks", batch.labels.sum(), batch_size=1)


def taints(
    folder: Path, module: Watching, callbacks: tuple[Any, ...] = (), plan: PrivacyPlan = NOISY
) -> tuple[list[str], dict[str, Any]]:
    trainer = make_trainer(
        1,
        privacy=plan,
        max_epochs=2,
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        callbacks=list(callbacks),
        default_root_dir=str(folder),
    )
    trainer.fit(module, marked_loader(1))
    facts = trainer.strategy.private_run.facts()  # type: ignore[attr-defined]
    return facts["taints"], dict(trainer.callback_metrics)


LEAKS = [
    (ValidityOfBatch, "Logged without noise: validity_of_batch."),
    (RowsUpdated, "Logged without noise: rows_updated."),
    (Epsilon, "Logged without noise: epsilon."),
    (OnlyProgressBar, "Logged without noise: shown."),
    (ByDict, "Logged without noise: val_one, val_two."),
    (AtEpochEnd, "Logged without noise: val_epoch."),
    (StraightToLogger, "Sent to a logger by code other than this package's: val_sent."),
    (ThroughExperiment, "through the logger's experiment"),
    (Hyperparameters, "log_hyperparams"),
    (CallbackMetrics, "val_written"),
]


@pytest.mark.parametrize(("kind", "said"), LEAKS, ids=lambda x: getattr(x, "__name__", ""))
def test_what_a_module_shows_is_listed(
    one_rank: Ranks, tmp_path: Path, kind: Any, said: str
) -> None:
    found = one_rank.run(taints, tmp_path, kind())[0][0]
    assert len(found) == 1
    assert said in found[0]


@pytest.mark.parametrize(
    ("kind", "name"), [(FromCallback, "val_output"), (FromBatchStart, "clicks")]
)
def test_what_a_callback_shows_is_listed(
    one_rank: Ranks, tmp_path: Path, kind: Any, name: str
) -> None:
    found = one_rank.run(taints, tmp_path, Watching(), (kind(),))[0][0]
    assert found == [f"Logged without noise: {name}."]


def with_rates(folder: Path) -> Any:
    module = Watching(schedule="cosine")
    callbacks = (LearningRateMonitor(), PrivacyMonitor(), PrivacyReport())
    return taints(folder, module, callbacks, plan=ADAFEST)


def test_what_this_package_and_lightning_show_of_released_things_is_exempt(
    one_rank: Ranks, tmp_path: Path
) -> None:
    found, shown = one_rank.run(with_rates, tmp_path)[0]
    assert found == []
    assert {"epsilon", "noise_multiplier"} <= set(shown)
    assert any(name.startswith("rows_updated") for name in shown)


def with_diagnostics(folder: Path) -> Any:
    return taints(folder, Watching(), (PrivacyMonitor(diagnostics=True),))


def test_diagnostics_are_listed(one_rank: Ranks, tmp_path: Path) -> None:
    (found,), _ = one_rank.run(with_diagnostics, tmp_path)[0]
    assert "nonprivate/units_clipped" in found


def validated(folder: Path, on: str) -> Any:
    from torch.utils.data import DataLoader, Subset

    data = Marked()
    train = DataLoader(data, BATCH, collate_fn=collate, shuffle=True)
    val = {"training": Subset(data, range(6)), "other": Bags(12, seed=3)}[on]
    trainer = make_trainer(1, privacy=NOISY, max_epochs=1, default_root_dir=str(folder))
    trainer.fit(Watching(), train, DataLoader(val, 6, collate_fn=collate))
    return trainer.strategy.private_run.facts()["taints"]  # type: ignore[attr-defined]


def test_validation_on_training_data_is_listed(one_rank: Ranks, tmp_path: Path) -> None:
    assert one_rank.run(validated, tmp_path, "training")[0] == ["Logged without noise: val."]
    assert one_rank.run(validated, tmp_path, "other")[0] == []


class Stops(Logs):
    def show(self, value: Tensor) -> None:
        self.trainer.should_stop = len(self.losses) == 3


def test_a_stop_before_the_end_is_listed(one_rank: Ranks, tmp_path: Path) -> None:
    (found,), _ = one_rank.run(taints, tmp_path, Stops())[0]
    assert "stopped before its planned end" in found


# ---- schedules that follow training -------------------------------------------------------------


class FollowsLoss(Logs):
    """A learning rate that a training metric drives."""

    def show(self, value: Tensor) -> None:
        self.log("val_loss", value, batch_size=1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        schedule = {"scheduler": plateau, "monitor": "val_loss", "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": {**schedule, "strict": False}}


def test_a_schedule_that_follows_training_is_refused(one_rank: Ranks, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Expected .*schedule"):
        one_rank.run(taints, tmp_path, FollowsLoss())


class SetsRateInStep(Logs):
    def show(self, value: Tensor) -> None:
        for group in self.optimizers().param_groups:
            group["lr"] = 0.1 / (1.0 + float(value))


class SetsRateBetween(Watching):
    def on_train_batch_end(self, *args: Any) -> None:
        self.optimizers().param_groups[0]["lr"] *= 0.5 + 0.1 * float(self.losses[-1] > 5)


class SetsMomentum(Logs):
    def show(self, value: Tensor) -> None:
        self.optimizers().param_groups[0]["momentum"] = float(value > 0) * 0.5


def test_a_rate_that_a_batch_decides_is_refused(one_rank: Ranks, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Expected a step to depend on its own batch"):
        one_rank.run(taints, tmp_path, SetsRateInStep())


class StepsByLoss(Watching):
    """A schedule that monitors what is public, and is stepped with what is not."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        schedule = {"scheduler": plateau, "monitor": "epsilon", "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": {**schedule, "strict": False}}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(self.losses[-1])


def test_a_schedule_that_the_module_steps_itself_is_listed(one_rank: Ranks, tmp_path: Path) -> None:
    found, _ = one_rank.run(taints, tmp_path, StepsByLoss())[0]
    assert any("lr_scheduler_step of the module's own" in taint for taint in found)


def test_momentum_that_cycles_with_a_schedule_is_not_listed(
    one_rank: Ranks, tmp_path: Path
) -> None:
    assert one_rank.run(taints, tmp_path, Cycles())[0][0] == []


class Cycles(Watching):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


@pytest.mark.parametrize("kind", [SetsRateBetween, SetsMomentum])
@pytest.mark.parametrize("schedule", ["", "cosine"])
def test_settings_that_are_changed_by_hand_are_listed(
    one_rank: Ranks, tmp_path: Path, kind: Any, schedule: str
) -> None:
    (found,), _ = one_rank.run(taints, tmp_path, kind(schedule=schedule))[0]
    assert "setting was changed by code other than a scheduler's" in found


# ---- what is saved with the weights -------------------------------------------------------------


class SavesMore(Watching):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["clicks_seen"] = sum(self.losses)


class SavesIntoWeights(Watching):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["clicks_seen"] = torch.tensor(self.losses)


class HasExtraState(Watching):
    def get_extra_state(self) -> Any:
        return {"losses": self.losses}

    def set_extra_state(self, state: Any) -> None: ...


class Remembers(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"clicks_seen": 3}


def saved(folder: Path, module: Watching, callbacks: tuple[Any, ...] = ()) -> list[str]:
    trainer = make_trainer(
        1, privacy=NOISY, callbacks=list(callbacks), default_root_dir=str(folder)
    )
    trainer.fit(module, marked_loader(1))
    trainer.save_checkpoint(folder / "end.ckpt")
    found: list[str] = trainer.strategy.private_run.facts()["taints"]  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(
    ("module", "callbacks", "name"),
    [
        (SavesMore, (), "clicks_seen"),
        (SavesIntoWeights, (), "clicks_seen"),
        (HasExtraState, (), "_extra_state"),
        (Watching, (Remembers,), "Remembers"),
    ],
)
def test_what_user_code_saves_is_listed(
    one_rank: Ranks, tmp_path: Path, module: Any, callbacks: Any, name: str
) -> None:
    found = one_rank.run(saved, tmp_path, module(), tuple(c() for c in callbacks))[0]
    assert found == [f"Saved in checkpoints by code other than this package's: {name}."]


def test_a_plain_checkpoint_has_no_taint(one_rank: Ranks, tmp_path: Path) -> None:
    assert one_rank.run(saved, tmp_path, Watching())[0] == []

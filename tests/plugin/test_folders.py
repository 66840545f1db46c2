"""Every run has a folder of its own, for its owner's eyes, and replaces no other run's report."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, WandbLogger

from lightning_dpsparse import PrivacyReport
from lightning_dpsparse.plugin.folders import local_path
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.report import HTML_NAME, JSON_NAME
from tests.support.private_runs import NOISY, fit
from tests.support.ranks import Ranks


def report_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / JSON_NAME).read_text())
    return found


def run(folder: Path, **settings: Any) -> str:
    """Train a new model privately; returns the name of the run."""
    found = fit(1, NOISY, folder, callbacks=[PrivacyReport()], **settings)
    return str(found["ledger"]["run"])


# ---- reports -------------------------------------------------------------------------------------


def test_without_a_logger_a_second_run_gets_a_folder_of_its_own(
    one_rank: Ranks, tmp_path: Path
) -> None:
    first, second = (one_rank.run(run, tmp_path)[0] for _ in range(2))
    assert report_in(tmp_path)["run"] == first
    assert report_in(tmp_path / second)["run"] == second


def run_with_csv(folder: Path) -> str:
    return run(folder, logger=CSVLogger(folder, name="logs", version="always"))


def test_a_logger_with_one_version_for_all_replaces_no_report(
    one_rank: Ranks, tmp_path: Path
) -> None:
    first, second = (one_rank.run(run_with_csv, tmp_path)[0] for _ in range(2))
    folder = tmp_path / "logs" / "always"
    assert report_in(folder)["run"] == first
    assert report_in(folder / second)["run"] == second


def run_with_mlflow(folder: Path) -> tuple[str, str]:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    logger = MLFlowLogger("clicks", tracking_uri=f"file:{folder}/tracked", save_dir=str(folder))
    return run(folder, logger=logger), str(logger.run_id)


@pytest.mark.filterwarnings("ignore")
def test_mlflow_gets_the_report_of_each_run(one_rank: Ranks, tmp_path: Path) -> None:
    for _ in range(2):
        name, tracked = one_rank.run(run_with_mlflow, tmp_path)[0]
        (artifacts,) = tmp_path.glob(f"tracked/*/{tracked}/artifacts/privacy")
        assert report_in(artifacts)["run"] == name
        assert (artifacts / HTML_NAME).is_file()
        (own,) = tmp_path.glob(f"tracked/*/{tracked}/{JSON_NAME}")
        assert report_in(own.parent)["run"] == name


def run_with_wandb(folder: Path) -> tuple[str, str]:
    # Its service takes long to start on a busy machine.
    patience = {"WANDB_X_SERVICE_WAIT": "300", "WANDB_INIT_TIMEOUT": "300"}
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", **patience)
    import wandb

    logger = WandbLogger(project="clicks", save_dir=str(folder))
    name = run(folder, logger=logger), str(logger.version)
    wandb.finish()
    return name


@pytest.mark.filterwarnings("ignore")
def test_wandb_gets_the_report_of_each_run(one_rank: Ranks, tmp_path: Path) -> None:
    for _ in range(2):
        name, tracked = one_rank.run(run_with_wandb, tmp_path)[0]
        assert report_in(tmp_path / "clicks" / tracked)["run"] == name
        (transactions,) = tmp_path.glob(f"wandb/offline-run-*-{tracked}/run-{tracked}.wandb")
        assert f"privacy-report-{name}".encode() in transactions.read_bytes()


class Unreachable(MLFlowLogger):
    """A tracker whose server takes metrics, and no files."""

    @property
    def experiment(self) -> Any:
        found = super().experiment

        class NoArtifacts:
            def __getattr__(self, name: str) -> Any:
                if name == "log_artifact":
                    raise ConnectionError("the server is gone")
                return getattr(found, name)

        return NoArtifacts()


def run_unreachable(folder: Path) -> str:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    logger = Unreachable("clicks", tracking_uri=f"file:{folder}/tracked", save_dir=str(folder))
    with pytest.warns(UserWarning, match="did not take the privacy report"):
        return run(folder, logger=logger)


@pytest.mark.filterwarnings("ignore")
def test_a_tracker_that_cannot_be_reached_does_not_end_training(
    one_rank: Ranks, tmp_path: Path
) -> None:
    one_rank.run(run_unreachable, tmp_path)


def fail(folder: Path) -> None:
    from tests.support.private_runs import Watching

    with pytest.raises(RuntimeError, match="this step fails"):
        fit(1, NOISY, folder, callbacks=[PrivacyReport()], module=Watching(fail_at=3))


def test_a_run_that_fails_leaves_a_report_of_what_it_spent(one_rank: Ranks, tmp_path: Path) -> None:
    one_rank.run(fail, tmp_path)
    assert report_in(tmp_path)["ran"]["steps"] == 4


# ---- who may read --------------------------------------------------------------------------------


def run_and_save(folder: Path) -> None:
    os.umask(0)  # the most generous
    callback = ModelCheckpoint(folder / "logs" / "always" / "checkpoints", every_n_train_steps=2)
    fit(
        1,
        NOISY,
        folder,
        callbacks=[PrivacyReport(), callback],
        enable_checkpointing=True,
        logger=CSVLogger(folder, name="logs", version="always"),
    )
    os.umask(0o022)


def test_the_folders_of_a_run_are_for_its_owner(one_rank: Ranks, tmp_path: Path) -> None:
    one_rank.run(run_and_save, tmp_path)
    ours = [tmp_path / "privacy", tmp_path / "logs" / "always"]
    for folder in ours:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in (p for folder in ours for p in folder.rglob("*") if p.suffix != ".csv"):
        expected = 0o700 if path.is_dir() else 0o600
        # The logger's own files lie in a folder that nobody else can enter.
        if path.name not in ("hparams.yaml",):
            assert stat.S_IMODE(path.stat().st_mode) == expected, path


# ---- where they may be ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["s3://bucket/run", "gs://bucket/run", "hdfs://host/run"])
def test_object_stores_are_refused(one_rank: Ranks, tmp_path: Path, path: str) -> None:
    with pytest.raises(Refused, match="a folder on a file system"):
        local_path(path, "default_root_dir")
    with pytest.raises(Refused, match="the path of a checkpoint"):
        one_rank.run(save_to, tmp_path, path)


def save_to(folder: Path, path: str) -> None:
    from tests.support.private_runs import marked_loader
    from tests.support.tiny_model import SmallModule, make_trainer

    trainer = make_trainer(1, default_root_dir=str(folder))
    trainer.fit(SmallModule(), marked_loader(1))
    trainer.save_checkpoint(path)

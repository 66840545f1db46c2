r"""Where a run keeps its files: one folder for every run, and no file of another run's replaced.

| what | where |
|---|---|
| journals | `privacy` in the trainer's `default_root_dir`, one file for a line of runs |
| report | the folder of the run's first logger, such as `lightning_logs/version_0`; without a \
logger the `default_root_dir` |
| report, if another run has left one there | a folder in it, with the name of the run |

Trackers such as MLflow or W&B keep all runs in one place. There a run's folder is the one that
Lightning puts its checkpoints in: the tracker's project, then the tracker's run.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from lightning.fabric.loggers import CSVLogger as FabricCSVLogger
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from lightning_dpsparse import report
from lightning_dpsparse.durable.files import FOLDER_MODE, make_folder
from lightning_dpsparse.refused import Refused

_JOURNALS = "privacy"
CAN_GO_ON_KEY = "can_go_on"
"""Where a manifest says whether training can go on from a checkpoint: not from weights alone."""
LAUNCH_KEY = "launch"
"""Where a manifest says which launch of a job has saved a checkpoint, if a launcher names them."""


def local_path(path: str | os.PathLike[str], what: str) -> Path:
    """A path on a file system. Addresses of object stores are refused: nothing can be synced there.

    >>> local_path("file:///tmp/run", "default_root_dir")
    PosixPath('/tmp/run')
    """
    text = os.fspath(path).removeprefix("file://")
    if "://" in text:
        raise Refused(
            f"Expected {what} to be a folder on a file system, found {text!r}. Train into a local "
            "or mounted folder, and copy checkpoints from there."
        )
    return Path(text)


def journal_folder(trainer: Trainer) -> Path:
    """Where the journals of all runs of a trainer's root folder are."""
    return local_path(trainer.default_root_dir, "default_root_dir") / _JOURNALS


def checkpoint_folders(trainer: Trainer) -> list[Path]:
    """Folders in which this trainer, or earlier ones of the same root folder, save checkpoints.

    On rank 0.
    """
    root = local_path(trainer.default_root_dir, "default_root_dir")
    callbacks = trainer.checkpoint_callbacks
    own = [c.dirpath for c in callbacks if isinstance(c, ModelCheckpoint) and c.dirpath is not None]
    found = [root, root / "checkpoints", *root.glob("lightning_logs/version_*/checkpoints")]
    of_logger = logger_folder(trainer)
    if of_logger is not None:  # every start has a folder of its own, one beside the other
        found += of_logger.parent.glob("*/checkpoints")
    found += [local_path(path, "dirpath") for path in own]
    return [folder for folder in dict.fromkeys(found) if folder.is_dir()]


def near_checkpoint(path: Path) -> list[Path]:
    """Folders that the journal of a checkpoint may be in, if both were moved together."""
    return [parent / _JOURNALS for parent in path.absolute().parents]


def logger_folder(trainer: Trainer) -> Path | None:
    """The folder that the first logger has for this run; None without a logger. On rank 0."""
    logger: Logger | None = trainer.logger
    if logger is None:
        return None
    if isinstance(logger, (TensorBoardLogger, CSVLogger, FabricCSVLogger)):
        return local_path(logger.log_dir, "the folder of the logger")
    root = logger.save_dir if logger.save_dir is not None else trainer.default_root_dir
    version = logger.version
    words = (logger.name, version if isinstance(version, str) else f"version_{version}")
    return local_path(root, "save_dir of the logger").joinpath(*(str(word) for word in words))


def make_report_folder(trainer: Trainer, run: str) -> Path:
    """The folder of a run's report. On rank 0.

    A folder that belongs to the run alone can be read by its owner only from now on.
    """
    of_logger = logger_folder(trainer)
    root = local_path(trainer.default_root_dir, "default_root_dir")
    folder = make_folder(free_folder(of_logger or root, run))
    if of_logger is not None:
        make_folder(of_logger)
        with suppress(PermissionError):  # somebody else's: then it is as they wanted it
            of_logger.chmod(FOLDER_MODE)
    return folder


def free_folder(folder: Path, run: str) -> Path:
    """This folder, or one in it if it holds the report of another run."""
    try:
        other = report.read(folder).get("run")
    except Refused:  # no report, or a damaged one
        other = run if not (folder / report.JSON_NAME).exists() else None
    return folder if other == run else folder / run

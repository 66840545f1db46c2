"""The privacy report goes where people look for a run: into its tracker.

MLflow and W&B keep files with a run as *artifacts*. A report that lies only on the disk of the
machine that trained is soon lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_warn

_FOLDER = "privacy"


def attach(trainer: Trainer, files: Sequence[Path], run: str) -> None:
    """Keep files with the run of every tracker among the trainer's loggers. On rank 0.

    A tracker that cannot be reached does not end training: the files are on disk, too.
    """
    for logger in trainer.loggers:
        try:
            _attach(logger, files, run)
        except Exception as error:
            rank_zero_warn(
                f"{type(logger).__name__} did not take the privacy report "
                f"({type(error).__name__}: {error}). It is in {files[0].parent}."
            )


def _attach(logger: Logger, files: Sequence[Path], run: str) -> None:
    if isinstance(logger, MLFlowLogger):
        for file in files:
            logger.experiment.log_artifact(logger.run_id, str(file), _FOLDER)
    elif isinstance(logger, WandbLogger):
        import wandb

        artifact = wandb.Artifact(f"privacy-report-{run}", type="privacy-report")
        for file in files:
            artifact.add_file(str(file))
        logger.experiment.log_artifact(artifact)

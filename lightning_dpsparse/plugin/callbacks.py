"""Callbacks that go with the strategy: predictions in a file, private metrics, and the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter, Callback
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_dpsparse.plugin.folders import free_folder
from lightning_dpsparse.plugin.private_run import PrivateRun
from lightning_dpsparse.plugin.trackers import attach
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.report import HTML_NAME, JSON_NAME
from lightning_dpsparse.report import write as write_report


class PredictionWriter(BasePredictionWriter):
    """Writes what `predict` returns, in the order of the data set, as one .npy file.

    Args:
        output: Where the predictions go.
    """

    def __init__(self, output: str = "predictions.npy") -> None:
        interval: Literal["epoch"] = "epoch"
        super().__init__(write_interval=interval)
        self.output = Path(output)

    @override
    def write_on_epoch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        index = torch.tensor([i for batches in batch_indices for batch in batches for i in batch])
        values = torch.cat([p.detach().cpu() for p in predictions]) if len(predictions) else index
        mine = self.output.with_suffix(f".rank{trainer.global_rank}.npz")
        self.output.parent.mkdir(parents=True, exist_ok=True)
        np.savez(mine, index=index.numpy(), values=values.numpy())
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            self._join(trainer.world_size)

    def _join(self, world_size: int) -> None:
        paths = [self.output.with_suffix(f".rank{rank}.npz") for rank in range(world_size)]
        parts = [dict(np.load(path)) for path in paths]
        index = np.concatenate([part["index"] for part in parts]).astype(np.int64)
        values = np.concatenate([part["values"] for part in parts])
        np.save(self.output, values[np.argsort(index)])
        for path in paths:
            path.unlink()
        print(f"{len(values):,} predictions written to {self.output}")


class PrivacyMonitor(Callback):
    """Logs what the private step does, beside the epsilon that the strategy always logs.

    Where the rows that a step updates are private themselves (FEST, AdaFEST and the like), every
    `log_every_n_steps`: `rows_updated` of the mean step since, in all and for each table, and
    `gradient_reduction`, how many times fewer numbers than DP-SGD's that is.

    Args:
        diagnostics: Also log the share of clipped units and of rows that were read. These are made
            from private data without noise: their names begin with `nonprivate/`, and the report
            lists them as a taint.
    """

    def __init__(self, diagnostics: bool = False) -> None:
        self.diagnostics = diagnostics

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        run = private_run(trainer)
        run.watch(diagnostics=self.diagnostics)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        run = private_run(trainer)
        assert run.stepper is not None
        values = {  # of public settings
            "noise_multiplier": run.budget.run.noise_multiplier,
            "noise_stddev": run.stepper.state.noise.stddev,
        }
        if trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            sizes = run.stepper.measurements.gradient_size()
            by_table = {name: size for name, size in sizes.items() if "/" in name}
            values |= {name: size for name, size in sizes.items() if "/" not in name}
            with run.logs.ours():
                for logger in trainer.loggers if by_table else ():
                    # Past Lightning's own log, which takes a millisecond for every value.
                    logger.log_metrics(by_table, step=trainer.global_step - 1)
        with run.logs.ours():
            pl_module.log_dict(values, on_step=True, on_epoch=False, batch_size=1)
        diagnostics = {
            f"nonprivate/{k}": value for k, value in run.stepper.measurements.diagnostics().items()
        }
        pl_module.log_dict(diagnostics, on_step=True, on_epoch=False, batch_size=1)


class PrivacyReport(Callback):
    """Writes `privacy_report.json` and `.html` at every checkpoint and when training ends.

    At the end, of whatever kind, MLflow and W&B get a copy as an artifact of their run. The report
    of another run is never replaced: if there is one, a folder with the run's name is made beside.

    Args:
        folder: Where. By default beside the run's logs. (Every checkpoint has a copy of its own.)
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._write(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer, is_end=True)

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if getattr(trainer.strategy, "private_run", None) is None:
            return  # refused before there was a run: nothing was spent
        try:
            self._write(trainer, is_end=True)
        except (OSError, Refused) as error:  # the exception must be heard, not this
            rank_zero_warn(f"The privacy report could not be written: {error}")

    def _write(self, trainer: Trainer, *, is_end: bool = False) -> None:
        run = private_run(trainer)
        if not trainer.is_global_zero or not run.has_started:
            return
        assert run.folder is not None
        folder, name = run.folder, run.budget.ledger.run
        if self.folder is not None:
            folder = free_folder(Path(self.folder), name)
        write_report(run.facts(), folder)
        if is_end:
            with run.logs.ours():
                attach(trainer, [folder / JSON_NAME, folder / HTML_NAME], name)


def private_run(trainer: Trainer) -> PrivateRun:
    """The private run of a trainer; refused without one."""
    run = getattr(trainer.strategy, "private_run", None)
    if not isinstance(run, PrivateRun):
        raise Refused(
            "Expected DPSparseStrategy with a privacy plan, found "
            f"{type(trainer.strategy).__name__} without. Set privacy, or leave this callback out."
        )
    return run

"""The strategy's checkpoints: directories of shards, with the ledger and the weights' history."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from tqdm import tqdm
from typing_extensions import override

from lightning_dpsparse.plan import PrivacyPlan
from lightning_dpsparse.plugin import lineage, refusals
from lightning_dpsparse.plugin.datasets import digest
from lightning_dpsparse.plugin.lineage import History
from lightning_dpsparse.plugin.private_run import CHECKPOINT_KEY, PrivateRun
from lightning_dpsparse.report import write as write_report
from lightning_dpsparse.sharded import checkpoint as sharded_checkpoint
from lightning_dpsparse.sharded.shared_rows import share_a_row


class ShardedCheckpoints(DDPStrategy):
    """What a strategy with sharded tables saves and loads, and what it remembers of weights."""

    privacy: PrivacyPlan | None = None
    _run: PrivateRun | None = None
    _carried: dict[str, Any] | None = None
    """What the checkpoint that was loaded last says of its private run."""
    _history: History = ()
    """Of the weights that plain training began with."""
    _first_step = 0
    _weights: frozenset[str] = frozenset()
    """Names of what the module's state dict held when it was last asked."""

    @property
    def module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def private_run(self) -> PrivateRun | None:
        """What the callbacks of this package talk to."""
        return self._run

    # ---- history --------------------------------------------------------------------------------

    @property
    def _lightning_module(self) -> LightningModule | None:
        return self.__dict__.get("_module")

    @_lightning_module.setter
    def _lightning_module(self, module: LightningModule | None) -> None:
        """Lightning hands the module over before it forgets which trainer had it last."""
        if module is not None and isinstance(module, LightningModule):
            before = lineage.earlier_trainer(module)
            if before:
                lineage.keep_history(module, (*lineage.history_of(module), *before))
        self.__dict__["_module"] = module

    def _begin_plain_training(self) -> None:
        """Private weights may not be trained on without privacy and keep their name."""
        self._history = lineage.history_of(self.module)
        refusals.check_private_history(self._history)
        self._first_step = self.module.trainer.global_step

    def _current_history(self) -> History:
        if self._run is not None and self._run.has_started:
            return self._run.history()
        trainer = self.module.trainer
        if trainer.state.fn != TrainerFn.FITTING:
            return lineage.history_of(self.module)
        data = digest(getattr(trainer.train_dataloader, "dataset", None))
        return lineage.after_steps(self._history, data, trainer.global_step - self._first_step)

    # ---- files ----------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The one point that every checkpoint passes: noise that was put off lands before it."""
        if self._run is not None and self._run.has_started:
            self._run.perimeter.before_save()
        self._pay_all()
        state = super().lightning_module_state_dict()
        self._weights = frozenset(state)
        return state

    def _pay_all(self) -> None:
        if self._run is not None and self._run.stepper is not None:
            self._run.stepper.before_release(self._payment_bar if self.is_global_zero else None)

    @staticmethod
    def _payment_bar(work: Sequence[Any]) -> Iterable[Any]:
        return tqdm(work, "Noise for all rows", delay=1.0, leave=False, unit="chunk")

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None
    ) -> None:
        """Write a directory: every rank its shards, rank 0 the rest."""
        path = Path(self.broadcast(str(filepath)))
        if self.is_global_zero and path.is_file():
            path.unlink()
        self.barrier()
        meta = dict(checkpoint)
        if self._run is not None and self._run.has_started:
            self._run.evidence.note_saved(checkpoint, self._weights)
            meta[CHECKPOINT_KEY] = self._run.checkpoint()
        elif self._carried is not None:
            meta[CHECKPOINT_KEY] = self._carried
        meta[sharded_checkpoint.HISTORY_KEY] = lineage.to_data(self._current_history())
        sharded_checkpoint.save(path, self.module, meta.pop("state_dict"), meta)
        if self.is_global_zero and self._run is not None and self._run.has_started:
            write_report(self._run.facts(), path)

    @override
    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = Path(self.broadcast(str(checkpoint_path)))
        is_fitting = self.module.trainer.state.fn == TrainerFn.FITTING
        checkpoint = sharded_checkpoint.load(
            path,
            self.module,
            strict=self.module.strict_loading,
            with_optimizer=is_fitting,
            weights_only=weights_only,
        )
        self._carried = checkpoint.get(CHECKPOINT_KEY)
        lineage.keep_history(self.module, lineage.history_in(checkpoint))
        if is_fitting:
            refusals.check_private_resume(self._carried, self.privacy)
        else:
            selected = (self._carried or {}).get("selection") or {}
            # Other ids may be read from one row.
            share_a_row(self.module, selected.get("rows"), selected.get("row_for_others"))
        if self._run is not None:
            self._run.restore(checkpoint)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing left to do: `load_checkpoint` read the shards in place."""

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        if self.is_global_zero:
            shutil.rmtree(filepath, ignore_errors=True)

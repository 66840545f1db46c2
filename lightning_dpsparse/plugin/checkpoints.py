"""What a strategy with sharded tables saves and loads, and what it remembers of weights.

A checkpoint is a directory: every rank writes its shards, and rank 0 the rest. Beside the weights
lie their history (`history`) and, for a private run, what that run kept: its ledger, its selected
rows and its evidence. Where weights are averaged, others read the average (`averaging`). A copy of
the privacy report goes into every directory. Before anything is written, noise that a mechanism has
put off is added. The directory appears under its name when it is whole and has reached the disk,
and the journal remembers it then.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_dpsparse.durable import drafts
from lightning_dpsparse.plugin import lineage, refusals, resuming
from lightning_dpsparse.plugin.averaging import STATE_KEY, Averaging
from lightning_dpsparse.plugin.folders import (
    CAN_GO_ON_KEY,
    LAUNCH_KEY,
    local_path,
    near_checkpoint,
)
from lightning_dpsparse.plugin.history import (
    History,
    history_as_data,
    history_in,
    history_of,
    keep_history,
    spent_by,
)
from lightning_dpsparse.plugin.launches import launch_name
from lightning_dpsparse.plugin.plain_training import PlainTraining
from lightning_dpsparse.plugin.private_run import CHECKPOINT_KEY, PrivateRun
from lightning_dpsparse.plugin.private_training import PrivateTraining
from lightning_dpsparse.plugin.ranks_together import RanksTogether
from lightning_dpsparse.plugin.restored_values import check_restored
from lightning_dpsparse.plugin.shared_folders import check_folders
from lightning_dpsparse.plugin.trainer_internals import (
    choose_what_is_restored,
    explain_failed_restoring,
)
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.report import write as write_report
from lightning_dpsparse.sharded import checkpoint as sharded_checkpoint
from lightning_dpsparse.sharded.process_group import from_rank_zero
from lightning_dpsparse.sharded.shared_rows import share_a_row
from lightning_dpsparse.sharded.whole_files import HISTORY_KEY


class ShardedCheckpoints(RanksTogether):
    """Saves and loads sharded tables, with the history of the weights."""

    _run: PrivateRun | None = None
    """The private run of the last `fit`; None without a plan."""
    _training: PrivateTraining | None = None
    """Takes the steps of that run, from its start to its end."""
    _plain: PlainTraining | None = None
    """Counts the steps of a `fit` without a plan, from its start on."""
    _carried: dict[str, Any] | None = None
    """What the private run behind the checkpoint that was loaded last kept."""
    resume: Literal["auto"] | None
    """Whether the run goes on from the newest checkpoint that it finds."""
    trust_checkpoints: bool
    """Whether checkpoints may be read as pickles."""
    averaging: Averaging
    """What is averaged of the weights."""
    _has_told_of_objects = False
    _weights: frozenset[str] = frozenset()
    """Names of what the module's state dict held when it was last asked."""

    @property
    def private_run(self) -> PrivateRun | None:
        """The private run of the last `fit`: what the callbacks of this package talk to."""
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
                keep_history(module, (*history_of(module), *before))
        self.__dict__["_module"] = module

    def _current_history(self) -> History:
        """The history of the module's weights as they are now."""
        if self._run is not None and self._run.has_started:
            return self._run.evidence.history(self._run.budget.ledger)
        if self._plain is None or self.module.trainer.state.fn != TrainerFn.FITTING:
            return history_of(self.module)
        return self._plain.history()

    # ---- where training begins ------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        explain_failed_restoring(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        check_folders(trainer, is_private=self.privacy is not None)
        from_rank_zero(lambda: resuming.clean_up(trainer))
        if spent_by(self.module) is None:  # else the module goes on in memory
            choose = partial(
                resuming.choose_checkpoint, trainer, self._run, is_auto=self.resume == "auto"
            )
            choose_what_is_restored(trainer, choose)

    # ---- averages -------------------------------------------------------------------------------

    def _show_average(self, is_shown: bool) -> None:
        """During `fit`, let the module hold the average of its weights, or the weights."""
        if self.module.trainer.state.fn != TrainerFn.FITTING or self.averaging.model is None:
            return
        perimeter = None if self._run is None else self._run.perimeter
        with nullcontext() if perimeter is None else perimeter.guard.writing():
            self.averaging.show(average=is_shown)

    # ---- files ----------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The one point that every checkpoint passes: noise that was put off lands before it."""
        if self._training is not None:
            self._training.before_save()
        state = super().lightning_module_state_dict()
        self._weights = frozenset(state)
        return state

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None
    ) -> None:
        """Write a directory: every rank writes its shards, and rank 0 the rest.

        After an error a checkpoint is one more attempt: if it fails, the error must still be heard.
        """
        if self._is_alone:
            rank_zero_warn("No checkpoint was saved: not all ranks have come to the same point.")
            return
        try:
            with self.taking_long():
                self._save_together(checkpoint, filepath)
        except Refused as refusal:
            if not self.module.trainer.interrupted:
                raise
            rank_zero_warn(f"No checkpoint was saved. {refusal}")

    def _save_together(self, checkpoint: dict[str, Any], filepath: _PATH) -> None:
        path = local_path(self.broadcast(str(filepath)), "the path of a checkpoint")
        meta = dict(checkpoint)
        run = self._run if self._run is not None and self._run.has_started else None
        if run is not None:
            run.evidence.note_saved(checkpoint, self._weights)
            meta[CHECKPOINT_KEY] = run.checkpoint()
        elif self._carried is not None:
            meta[CHECKPOINT_KEY] = self._carried
        meta[HISTORY_KEY] = history_as_data(self._current_history())
        can_go_on = "optimizer_states" in checkpoint  # absent when the user asked for weights only

        def finish(folder: Path) -> dict[str, Any]:
            about = {
                "global_step": int(checkpoint["global_step"]),
                CAN_GO_ON_KEY: can_go_on,
                LAUNCH_KEY: launch_name(),
            }
            if run is None:
                return about
            write_report(run.facts(), folder)
            ledger = run.budget.ledger
            return {**about, "run": ledger.run, "steps_charged": ledger.steps}

        model, weights, about_average = self.averaging.split(meta.pop("state_dict"))
        meta |= about_average
        objects = sharded_checkpoint.save(path, self.module, model, meta, finish, weights)
        if objects and not self._has_told_of_objects:
            self._has_told_of_objects = True
            rank_zero_warn(
                "Checkpoints of this run hold objects that are no plain values, and will be read "
                "only where trust_checkpoints=True: "
                f"{', '.join(f'{place} ({kind})' for place, kind in objects.items())}. Name their "
                "classes to torch.serialization.add_safe_globals, or leave them out."
            )
        if run is not None and can_go_on:
            from_rank_zero(lambda: run.ledger.note_checkpoint(path))

    @override
    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = local_path(self.broadcast(str(checkpoint_path)), "the path of a checkpoint")
        is_fitting = self.module.trainer.state.fn == TrainerFn.FITTING
        self.averaging.forget()
        checkpoint = sharded_checkpoint.load(
            path,
            self.module,
            strict=self.module.strict_loading,
            with_optimizer=is_fitting,
            trust=self.trust_checkpoints,
            note_average=lambda: self.averaging.note_average(self.module),
        )
        self.averaging.restore(checkpoint.get(STATE_KEY))
        checkpoint.setdefault("pytorch-lightning_version", lightning.pytorch.__version__)
        self._carried = checkpoint.get(CHECKPOINT_KEY)
        keep_history(self.module, history_in(checkpoint))
        if is_fitting:
            check_restored(checkpoint, self.module.trainer)
            refusals.check_private_resume(self._carried, self.privacy)
        else:
            selected = (self._carried or {}).get("selection") or {}
            # The rows that were not selected may all be read from one row.
            share_a_row(self.module, selected.get("rows"), selected.get("row_for_others"))
        if self._run is not None and self._carried is not None:
            self._run.restore(self._carried, near_checkpoint(path))
        elif self._run is not None:
            self._run.evidence.declare_public(
                "The data behind the checkpoint that training began from, which has no ledger."
            )
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing left to do: `load_checkpoint` read the shards in place."""

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        if self.is_global_zero:
            drafts.remove(local_path(filepath, "the path of a checkpoint"))

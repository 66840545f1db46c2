"""The Lightning strategy that users name: sharded tables, trained privately if a plan says so.

Lightning calls a strategy at every point where training may be done in another way. Without a plan
all of it is `sharded_strategy`. With a plan, a `PrivateRun` is made for every `fit`, and from its
first step on the calls go to `private_training`. So the hooks here only decide between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dpsparse.budget import WRITE_AHEAD
from lightning_dpsparse.checks import check_choice, check_flag, check_whole
from lightning_dpsparse.plan import PrivacyPlan
from lightning_dpsparse.plugin.averaging import Averaging
from lightning_dpsparse.plugin.checkpoints import ShardedCheckpoints
from lightning_dpsparse.plugin.history import keep_history
from lightning_dpsparse.plugin.optimizer_noise import check_noise_fits, tell_noise
from lightning_dpsparse.plugin.plain_training import PlainTraining
from lightning_dpsparse.plugin.private_run import PrivateRun
from lightning_dpsparse.plugin.private_training import PrivateTraining
from lightning_dpsparse.plugin.refusals import check_linear_decay
from lightning_dpsparse.plugin.trainer_internals import (
    before_training_ends,
    begin_next_epoch,
    is_last_step,
)
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.fused import FusedOptimizer
from lightning_dpsparse.sharded.placement import Placement


class DPSparseStrategy(ShardedCheckpoints):
    """Train a LightningModule whose embedding tables are sharded over all ranks.

    Tables are those of every `EmbeddingBagCollection` and `EmbeddingCollection` in it.

    The module stays plain: tables and layers in `configure_model`, a dense optimizer in
    `configure_optimizers`, and a `training_step` that returns one loss per example (or a mean).

    Args:
        privacy: The privacy plan. None is plain TorchRec training.
        placement: Where the tables go. By default TorchRec's planner decides.
        fused_optimizer: How the tables learn.
        max_physical_batch: Most examples that a rank takes through the model at once in a private
            step; larger batches are cut into parts, and clipped, noised and applied as one.
        uneven_loaders: What to do with loaders that give ranks different numbers of batches.
        resume: "auto" goes on with the run whose journal or checkpoints are in the trainer's
            default_root_dir, from its newest whole checkpoint. Without it, a private run goes on
            by itself only if torchrun or SLURM have started it again.
        write_ahead: Number of steps that the journal charges for in advance. A run that crashes is
            charged at most so many that it did not take; a larger number needs fewer syncs.
        trust_checkpoints: Read checkpoints as pickles, which can run code of whoever wrote them.
            By default only plain values and tensors are read.
        process_group_backend: "gloo" or "nccl". By default what fits the device.
        timeout: How long a rank waits for the others.
        start_method: How Lightning starts the other processes of this host.
    """

    strategy_name = "dpsparse"

    def __init__(
        self,
        privacy: PrivacyPlan | None = None,
        placement: Placement | None = None,
        fused_optimizer: FusedOptimizer | None = None,
        max_physical_batch: int | None = None,
        uneven_loaders: Literal["raise", "truncate"] = "raise",
        resume: Literal["auto"] | None = None,
        write_ahead: int = WRITE_AHEAD,
        trust_checkpoints: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        super().__init__(
            privacy,
            placement,
            fused_optimizer,
            uneven_loaders,
            process_group_backend,
            timeout,
            start_method,
        )
        if max_physical_batch is not None:
            expected = "max_physical_batch of at least 1, and a privacy plan"
            check_whole("max_physical_batch", max_physical_batch, expected=expected)
            if privacy is None:
                raise Refused(f"Expected {expected}, found no plan. Use a smaller batch_size.")
        check_whole("write_ahead", write_ahead, remedy="A step is charged before it begins.")
        if resume is not None:
            remedy = "To go on from one checkpoint, pass ckpt_path to fit."
            check_choice("resume", resume, ["auto"], remedy=remedy)
        check_flag("trust_checkpoints", trust_checkpoints)
        self.max_physical_batch, self.resume = max_physical_batch, resume
        self.write_ahead, self.trust_checkpoints = write_ahead, trust_checkpoints
        self.averaging = Averaging()

    def amend_plan(self, **changes: Any) -> None:
        """Change settings of the plan for the runs to come, as an audit does that adds examples.

        A run that has been set up keeps the plan that it was set up with.
        """
        if self.privacy is None:
            raise Refused("Expected a privacy plan to change, found none. Set privacy.")
        self.privacy = replace(self.privacy, **changes)

    # ---- before training ------------------------------------------------------------------------

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        # The run first: configure_optimizers may ask how long training is and so load data.
        plan, ahead = self.privacy, self.write_ahead
        self._run = None if plan is None else PrivateRun(plan, trainer, ahead)
        self._plain = self._training = None
        self.averaging.begin(self.module)
        super().setup_optimizers(trainer)
        check_noise_fits(self.optimizers, plan)
        check_linear_decay(trainer)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        run = self._run
        if run is None or not self.module.trainer.training:
            return super().process_dataloader(dataloader)
        loader = super().process_dataloader(run.data.private(dataloader, run.plan))
        return run.data.watched(loader, run.plan)

    @override
    def on_train_start(self) -> None:
        begin_next_epoch(self.module.trainer)
        remaining = None
        if self._run is None:
            self._plain = PlainTraining(self.module)
            tell_noise(self.optimizers, None)
        else:
            self._run.start(self.module)
            assert self._run.stepper is not None
            tell_noise(self.optimizers, self._run.stepper.state)
            self._run.ledger.end_if_spent(self.module.trainer.global_step)
            if self.averaging.settings is not None:
                self._run.evidence.averaged = self.averaging.settings.describe()
            remaining = self._run.budget.remaining
            move = super().batch_to_device
            self._training = PrivateTraining(
                self._run, self.module, self, move, self.max_physical_batch
            )
            trainer = self.module.trainer
            before_training_ends(
                trainer, lambda: _calibrate(self, trainer.global_step, is_late=True)
            )
        self.averaging.start(self.module, remaining)

    # ---- one step -------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._table_schedule.follow(self.optimizers)
        if self._training is None:
            return super().training_step(*args, **kwargs)
        return self._training.forward(super().training_step, *args, **kwargs)

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        batch = super().batch_to_device(batch, device, dataloader_idx)
        if self._training is not None:
            self._training.note_arrival(batch)
        return batch

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if self._training is None:
            assert self._run is None  # a private run takes no step before it has started
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        loss = self.precision_plugin.pre_backward(closure_loss, self.module)
        self._training.backward(loss)
        return self.precision_plugin.post_backward(loss, self.module)

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        if self._training is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        # As Lightning's own: the closure, then the hooks before an update.
        wrapped = partial(self.precision_plugin._wrap_closure, self.module, optimizer, closure)
        output = self._training.update(optimizer, wrapped, **kwargs)
        if is_last_step(self.module.trainer):  # before validation and checkpoints see the model
            _calibrate(self, self.module.trainer.global_step + 1)  # Lightning counts it later
        return output

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._show_average(True)
        if self._training is not None:
            self._training.before_validation()

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self._training is not None:
            self._training.after_validation()
        self._show_average(False)

    # ---- the end --------------------------------------------------------------------------------

    @override
    def on_train_end(self) -> None:
        if self._run is None:
            keep_history(self.module, self._current_history())
        else:
            assert self._training is not None
            self._training.pay_all()
            self._run.settle()
            _save_if_ended_early(self._run, self.module.trainer)
        self._show_average(True)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._plain is not None:
            keep_history(self.module, self._current_history())
        if self._run is not None:
            self._run.settle()
        try:
            if self._training is not None:
                self._training.pay_all()
            self.averaging.show(average=True)  # unchecked: what went wrong must be heard, not this
        except BaseException:  # the tables remember, and pay before they are used again
            self._training = None
            if self._run is not None:
                self._run.close()
            raise

    @override
    def teardown(self) -> None:
        self._training = None
        self.averaging.close(self._lightning_module)
        if self._run is not None:
            self._run.close()
        super().teardown()


def _calibrate(strategy: DPSparseStrategy, steps: int, *, is_late: bool = False) -> None:
    """Calibrate what a run releases, after so many steps: the average, if there is one."""
    run = strategy._run
    assert run is not None
    if run.budget.run.calibration is None:
        return
    strategy.averaging.note_steps(steps)
    strategy._show_average(True)
    run.calibration.finish(is_late=is_late)
    strategy._show_average(False)


def _save_if_ended_early(run: PrivateRun, trainer: Trainer) -> None:
    """Save the calibrated model, or the last one within the budget, if no checkpoint has it."""
    saved = [getattr(c, "_last_global_step_saved", None) for c in trainer.checkpoint_callbacks]
    assert run.folder is not None
    if run.calibration.is_late and trainer.checkpoint_callbacks:
        path = run.folder / f"calibrated-step={trainer.global_step}.ckpt"
        trainer.save_checkpoint(path)
        rank_zero_info(f"The calibrated model is in {path}.")
    elif run.ledger.ended_early and trainer.global_step not in saved:
        path = run.folder / f"budget-spent-step={trainer.global_step}.ckpt"
        trainer.save_checkpoint(path)
        rank_zero_info(f"The last model within the budget is in {path}.")

"""The Lightning strategy: sharded tables with a fused optimizer, dense layers replicated."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dpsparse.plan import PrivacyPlan
from lightning_dpsparse.plugin import loaders, refusals
from lightning_dpsparse.plugin.checkpoints import ShardedCheckpoints
from lightning_dpsparse.plugin.lineage import keep_history
from lightning_dpsparse.plugin.private_run import PrivateRun
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded import build, fused, shards
from lightning_dpsparse.sharded.fused import FusedOptimizer
from lightning_dpsparse.sharded.placement import Placement
from lightning_dpsparse.sharded.refusals import check_wrappers
from lightning_dpsparse.sharded.split_batch import split_batch


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
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        super().__init__(
            process_group_backend=process_group_backend, timeout=timeout, start_method=start_method
        )
        if max_physical_batch is not None and (privacy is None or max_physical_batch < 1):
            raise Refused(
                f"Expected max_physical_batch of at least 1, and a privacy plan, found "
                f"{max_physical_batch} and {privacy}. Without privacy, use a smaller batch_size."
            )
        self.privacy = privacy
        self.max_physical_batch = max_physical_batch
        self._shown: tuple[float, int] | None = None
        self.placement = placement or Placement()
        self.fused_optimizer = fused_optimizer or FusedOptimizer()
        self.uneven_loaders = uneven_loaders

    # ---- set-up ---------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        # TorchRec reads the ranks per host from here, and Lightning's launcher does not set it.
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(self.num_processes))
        super().setup_environment()
        build.divide_gradients_by_world_size(False)

    @override
    def connect(self, model: LightningModule) -> None:
        refusals.check_module_class(model)
        super().connect(model)

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        with super().tensor_init_context(empty_init), shards.tables_on_meta():
            yield

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self.module
        refusals.check_trainer(trainer, self.precision_plugin)
        refusals.check_layers(module, sync_batchnorm=self._layer_sync is not None)
        check_wrappers(module)
        self.precision_plugin.convert_module(module)
        mechanism = None if self.privacy is None else self.privacy.mechanism
        self.fused_optimizer.check(self.root_device, mechanism)
        refusals.check_averaging(trainer, mechanism)
        if self.privacy is not None and trainer.state.fn == TrainerFn.FITTING:
            refusals.check_private_module(module)
        if shards.sharded_collections(module):  # fit, test, fit again
            fused.check_kernels(module, self.fused_optimizer)
        else:
            plan = build.shard_tables(
                module, self.placement, self.fused_optimizer, self.root_device, self.num_processes
            )
            rank_zero_info(f"\nTables, {self.fused_optimizer.kind} fused into backward:\n{plan}\n")
        self.model = module  # sharded in place, never wrapped
        self.model_to_device()
        build.broadcast_dense(module)
        if trainer.state.fn == TrainerFn.FITTING:
            # The run first: configure_optimizers may ask how long training is and so load data.
            self._run = None if self.privacy is None else PrivateRun(self.privacy, trainer)
            self._shown = None
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @override
    def model_to_device(self) -> None:
        build.move_dense_to(self.module, self.root_device)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        """Build the module's own optimizer without the tables: the fused one owns them."""
        with shards.tables_hidden(self.module):
            super().setup_optimizers(trainer)
        refusals.check_optimizers(self.optimizers)
        self._dense_parameters = shards.dense_parameters(self.module)
        self._tables = fused.combined_fused_optimizer(self.module)
        fused.set_learning_rate(self._tables, self.fused_optimizer.learning_rate)
        self._fused_learning_rate = self.fused_optimizer.learning_rate

    @override
    def process_dataloader(self, dataloader: object) -> object:
        trainer = self.module.trainer
        if trainer.training:
            if self._run is not None:
                dataloader = self._run.loader(dataloader)
            progress = trainer.fit_loop.epoch_loop.batch_progress
            dataloader = loaders.training_loader(
                dataloader,
                self.uneven_loaders,
                lambda: (trainer.current_epoch, progress.current.ready),
            )
            return dataloader if self._run is None else self._run.watched(dataloader)
        stage = str(trainer.state.stage.value) if trainer.state.stage else "evaluation"
        return loaders.evaluation_loader(
            dataloader, stage, self.uneven_loaders, self.global_rank, self.world_size
        )

    # ---- one step -------------------------------------------------------------------------------

    @override
    def on_train_start(self) -> None:
        if self._run is None:
            self._begin_plain_training()
            return
        self._run.start(self.module)
        self._run.end_if_spent(self.module.trainer.global_step)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._follow_schedule()
        if self._run is None or self._run.stepper is None:
            return super().training_step(*args, **kwargs)
        batch, *rest = args
        self._run.begin_step(batch)
        self._show_epsilon()
        private = self._run.stepper
        forward = partial(self._losses, *rest, **kwargs)
        self._run.perimeter.forward = lambda batch: forward(self._moved(batch))
        most = self.max_physical_batch
        parts = [batch] if most is None else split_batch(batch, most, self.root_device)
        for part in parts[:-1]:
            with private.capture(is_whole=False):
                loss_n = forward(part)
            private.add_part(loss_n)
        with private.capture(is_whole=len(parts) == 1):
            output = super().training_step(parts[-1], *rest, **kwargs)
        refusals.loss_of(output)
        return output  # the last part goes the ordinary way, through `backward`

    def _losses(self, *args: Any, **kwargs: Any) -> Tensor:
        """One loss per example. The batch comes last: the rest is the same all through a step."""
        *rest, batch = args
        output = super().training_step(batch, *rest, **kwargs)
        return refusals.one_loss_per_example(refusals.loss_of(output))

    def _moved(self, batch: Any) -> Any:
        """A batch of the loader's, through the hooks that Lightning has for it."""
        batch = self.module._on_before_batch_transfer(batch, dataloader_idx=0)
        return super().batch_to_device(batch, dataloader_idx=0)

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        batch = super().batch_to_device(batch, device, dataloader_idx)
        if self._run is not None and self._run.has_started and self.module.trainer.training:
            self._run.perimeter.note_arrival(batch)
        return batch

    def _show_epsilon(self) -> None:
        """In the progress bar and in every logger: an upper bound, this step included.

        Lightning keeps a value until the epoch ends, and takes a millisecond to note one: it is
        told again only when something changed.
        """
        assert self._run is not None
        now = (self._run.budget.epsilon, self.module.current_epoch)
        if now != self._shown and math.isfinite(now[0]):
            with self._run.logs.ours():
                self.module.log("epsilon", now[0], prog_bar=True, batch_size=1)
            self._shown = now

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        if self._run is None or self._run.stepper is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        run = self._run

        def checked() -> Any:
            """As Lightning's own: the closure, then the hooks before an update."""
            output = self.precision_plugin._wrap_closure(self.module, optimizer, closure)
            run.perimeter.before_update()
            return output

        output = optimizer.step(closure=checked, **kwargs)
        run.perimeter.after_update()
        run.end_if_spent(self.module.trainer.global_step + 1)  # counted after this
        return output

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._run is not None and self._run.has_started:
            self._run.before_evaluation()

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self._run is not None and self._run.has_started:
            self._run.perimeter.guard.after_evaluation()

    def _follow_schedule(self) -> None:
        """Scale the tables' learning rate as the module's scheduler scales its own."""
        if not self.fused_optimizer.follow_schedule or not self.optimizers:
            return
        if not self.optimizers[0].param_groups:  # configure_optimizers gave none
            return
        group = self.optimizers[0].param_groups[0]
        # OneCycleLR keeps its peak in the group and overwrites initial_lr.
        base = group.get("max_lr", group.get("initial_lr"))
        factor = float(group["lr"]) / float(base) if base else 1.0
        learning_rate = self.fused_optimizer.learning_rate * factor
        if learning_rate != self._fused_learning_rate:
            fused.set_learning_rate(self._tables, learning_rate)
            self._fused_learning_rate = learning_rate

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Backward of the mean loss over all ranks' examples; the tables are updated on the way.

        Privately, every hook after this one sees noisy gradients only.
        """
        loss = self.precision_plugin.pre_backward(closure_loss, self.module)
        if self._run is not None and self._run.stepper is not None:
            self._run.perimeter.before_release()
            self._run.stepper.step(refusals.one_loss_per_example(loss))
            self._run.perimeter.after_release()
        else:
            mean = self._global_mean(loss)
            self.precision_plugin.backward(mean, self.module, optimizer, *args, **kwargs)
            build.sum_gradients(self._dense_parameters)
        return self.precision_plugin.post_backward(loss, self.module)

    def _global_mean(self, loss: Tensor) -> Tensor:
        """This rank's share of the mean: summed over ranks, it is the mean over all examples."""
        if loss.ndim == 0:
            return loss / self.world_size
        loss = refusals.one_loss_per_example(loss)
        return loss.sum() / build.global_count(loss.numel(), loss.device)

    # ---- the end -------------------------------------------------------------------------------

    @override
    def on_train_end(self) -> None:
        if self._run is None:
            keep_history(self.module, self._current_history())
            return
        self._pay_all()
        self._run.settle()
        trainer = self.module.trainer
        saved = [getattr(c, "_last_global_step_saved", None) for c in trainer.checkpoint_callbacks]
        if self._run.ended_early and trainer.global_step not in saved:
            path = self._run.folder / f"budget-spent-step={trainer.global_step}.ckpt"
            trainer.save_checkpoint(path)
            rank_zero_info(f"The last model within the budget is in {path}.")

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._run is None:
            if self.lightning_module is not None and self.module.trainer.global_step:
                keep_history(self.module, self._current_history())
        else:
            self._run.settle()
            try:
                self._pay_all()
            except BaseException:  # the tables remember, and pay before they are used again
                self._run.close()
                raise

    @override
    def teardown(self) -> None:
        """Leave the module where it is: sharded tables cannot move to another device."""
        if self._run is not None:
            self._run.close()
        build.divide_gradients_by_world_size(True)
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()

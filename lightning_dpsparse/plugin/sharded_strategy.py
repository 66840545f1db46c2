"""Training with sharded tables, privacy aside.

The embedding tables of a module are sharded over all ranks, and an optimizer that FBGEMM fuses into
the backward pass updates them. Everything else, the dense layers, is replicated: every rank holds a
copy, and gradients are summed over ranks. The module is sharded in place and never wrapped.

`checkpoints` adds files to this, and `strategy` adds privacy.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dpsparse.plan import PrivacyPlan
from lightning_dpsparse.plugin import loaders, refusals
from lightning_dpsparse.plugin.launcher import ShardedLauncher
from lightning_dpsparse.plugin.table_schedule import TableSchedule
from lightning_dpsparse.sharded import build, fused, shards
from lightning_dpsparse.sharded.fused import FusedOptimizer
from lightning_dpsparse.sharded.placement import Placement
from lightning_dpsparse.sharded.process_group import join_restarted_group
from lightning_dpsparse.sharded.refusals import check_wrappers

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class ShardedStrategy(DDPStrategy):
    """Shards the tables of a module, and trains them with the dense layers.

    The arguments are those of `strategy.DPSparseStrategy`. The plan is only asked whether it goes
    with the other settings.
    """

    def __init__(
        self,
        privacy: PrivacyPlan | None = None,
        placement: Placement | None = None,
        fused_optimizer: FusedOptimizer | None = None,
        uneven_loaders: Literal["raise", "truncate"] = "raise",
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: StartMethod = "popen",
    ) -> None:
        refusals.check_strategy(
            privacy,
            placement,
            fused_optimizer,
            uneven_loaders,
            process_group_backend,
            timeout,
            start_method,
        )
        super().__init__(
            process_group_backend=process_group_backend, timeout=timeout, start_method=start_method
        )
        self.privacy = privacy
        self.placement = placement or Placement()
        self.fused_optimizer = fused_optimizer or FusedOptimizer()
        self.uneven_loaders = uneven_loaders

    @property
    def module(self) -> LightningModule:
        """The user's module. Lightning has connected it by now."""
        assert self.lightning_module is not None
        return self.lightning_module

    # ---- set-up ---------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._start_method != "popen":
            self._launcher = ShardedLauncher(self, start_method=self._start_method)

    @override
    def setup_environment(self) -> None:
        # TorchRec reads the ranks per host from here, and Lightning's launcher does not set it.
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(self.num_processes))
        super().setup_environment()
        build.divide_gradients_by_world_size(False)

    @override
    def setup_distributed(self) -> None:
        backend = self._get_process_group_backend()
        join_restarted_group(backend, self._timeout, self.root_device)
        super().setup_distributed()

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
        if self.privacy is not None:
            why = "in a private run: it trains on the data and compares losses without noise"
            refusals.check_learning_rate_finder(trainer, why)
        refusals.check_batch_norm(module, sync_batchnorm=self._layer_sync is not None)
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
        build.move_dense_to(module, self.root_device)
        build.broadcast_dense(module)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        """Build the module's own optimizer without the tables: the fused one owns them."""
        with shards.tables_hidden(self.module):
            super().setup_optimizers(trainer)
        refusals.check_optimizers(self.optimizers)
        self._dense_parameters = shards.dense_parameters(self.module)
        self._table_schedule = TableSchedule(self.module, self.fused_optimizer)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        trainer = self.module.trainer
        if trainer.training:
            progress = trainer.fit_loop.epoch_loop.batch_progress
            return loaders.training_loader(
                dataloader,
                self.uneven_loaders,
                lambda: (trainer.current_epoch, progress.current.ready),
            )
        stage = str(trainer.state.stage.value) if trainer.state.stage else "evaluation"
        return loaders.evaluation_loader(
            dataloader, stage, self.uneven_loaders, self.global_rank, self.world_size
        )

    # ---- one step -------------------------------------------------------------------------------

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Backward of the mean loss over all ranks' examples; the tables are updated on the way."""
        if closure_loss.ndim:
            why = "with one loss per example, of which it takes only one"
            refusals.check_learning_rate_finder(self.module.trainer, why)
        loss = self.precision_plugin.pre_backward(closure_loss, self.module)
        mean = _global_mean(loss, self.world_size)
        self.precision_plugin.backward(mean, self.module, optimizer, *args, **kwargs)
        build.sum_gradients(self._dense_parameters)
        return self.precision_plugin.post_backward(loss, self.module)

    # ---- the end --------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        """Leave the module where it is: sharded tables cannot move to another device."""
        build.divide_gradients_by_world_size(True)
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _global_mean(loss: Tensor, world_size: int) -> Tensor:
    """This rank's share of the mean: summed over ranks, it is the mean over all examples."""
    if loss.ndim == 0:
        return loss / world_size
    loss = refusals.one_loss_per_example(loss)
    return loss.sum() / build.global_count(loss.numel(), loss.device)

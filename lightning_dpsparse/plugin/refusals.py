"""Settings of the trainer, the module and its callbacks that the strategy cannot honour.

Each is refused before the first step if it can be known then, with the remedy. Without the refusal
training would go on and do something else: clip only some gradients, wait forever, or release what
nobody charged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins import Precision
from lightning.pytorch.tuner.lr_finder import _LRCallback  # while it searches
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_dpsparse.checks import LARGEST, check_choice, check_kind
from lightning_dpsparse.engine.mechanism import Mechanism
from lightning_dpsparse.mechanisms.fest import selection_of
from lightning_dpsparse.optimizers.linear_decay import LinearDecay
from lightning_dpsparse.plan import PrivacyPlan
from lightning_dpsparse.plugin.history import History
from lightning_dpsparse.plugin.logs import Logs
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.fused import FusedOptimizer
from lightning_dpsparse.sharded.placement import Placement
from lightning_dpsparse.sharded.refusals import check_backend


def check_strategy(
    privacy: object,
    placement: object,
    fused_optimizer: object,
    uneven_loaders: object,
    process_group_backend: object,
    timeout: object,
    start_method: object,
) -> None:
    """Refuse arguments of the strategy that are of a wrong kind. None is a default."""
    for name, value, kind in (
        ("privacy", privacy, PrivacyPlan),
        ("placement", placement, Placement),
        ("fused_optimizer", fused_optimizer, FusedOptimizer),
        ("timeout", timeout, timedelta),
    ):
        if value is not None:
            check_kind(name, value, kind, remedy=f"Make a {kind.__name__}, or leave it out.")
    check_choice("uneven_loaders", uneven_loaders, ("raise", "truncate"))
    check_choice("start_method", start_method, ("popen", "spawn", "fork", "forkserver"))
    check_backend(process_group_backend)
    selection = selection_of(privacy.mechanism) if isinstance(privacy, PrivacyPlan) else None
    if start_method != "popen" and selection is not None and selection.maps_to_one_row:
        raise Refused(
            "Expected start_method='popen' where unselected ids read one row, found "
            f"{start_method!r}: the module that comes back from the other processes would not know "
            "of that row. Start the script with torchrun, or leave start_method out."
        )


def check_module_class(module: object) -> None:
    """Refuse modules of the separate package `pytorch_lightning`."""
    if not isinstance(module, LightningModule):
        raise Refused(
            f"Expected a lightning.pytorch.LightningModule, found {type(module).__name__} from "
            f"{type(module).__module__!r}. Modules and trainers of the separate package "
            "`pytorch_lightning` are other classes: import both from `lightning.pytorch`."
        )


def check_trainer(trainer: Trainer, precision: Precision) -> None:
    """Refuse settings of the Trainer that do not go with fused optimizers."""
    if precision.precision != "32-true":
        raise Refused(
            f"Expected precision='32-true', found {precision.precision!r}: the tables and their "
            "gradients are float32. Leave precision out."
        )
    check_accumulation(trainer)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if (
            isinstance(callback, GradientAccumulationScheduler)
            and callback.going_to_accumulate_grad_batches()
        ):
            raise Refused(
                "Expected one batch to a step throughout, found GradientAccumulationScheduler: the "
                "fused optimizer updates the tables in every backward pass. Leave it out."
            )
    if trainer.gradient_clip_val:
        raise Refused(
            f"Expected no gradient_clip_val, found {trainer.gradient_clip_val}: the tables' "
            "gradients never exist outside the fused optimizer, so only dense layers would be "
            "clipped. Leave it out."
        )


def check_learning_rate_finder(trainer: Trainer, found: str) -> None:
    """Refuse Lightning's search for a learning rate, where `found` says what it cannot do."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (LearningRateFinder, _LRCallback)):
            raise Refused(
                f"Expected a learning rate that is set, found LearningRateFinder {found}. Choose "
                "the learning rate on public data, or by hand."
            )


def check_accumulation(trainer: Trainer) -> None:
    """Refuse accumulation, at the start and before every step: callbacks may switch it on later."""
    if trainer.accumulate_grad_batches != 1:
        raise Refused(
            f"Expected accumulate_grad_batches=1, found {trainer.accumulate_grad_batches}: the "
            "fused optimizer updates the tables in every backward pass. Use a larger batch_size."
        )


def check_one_loader(trainer: Trainer) -> None:
    """Refuse two loaders: one example may be in both, and would be charged once."""
    loaders = trainer.fit_loop._combined_loader
    count = 0 if loaders is None else len(loaders.flattened)
    if count > 1:
        raise Refused(
            f"Expected one training loader in private training, found {count}: an example may come "
            "in each of them, and is charged for one. Put the data into one data set."
        )


def check_monitored_schedules(trainer: Trainer, logs: Logs) -> None:
    """Refuse a learning rate that follows the training loss: it carries it into the model."""
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and config.monitor and logs.is_from_training(config.monitor):
            raise Refused(
                f"Expected a learning rate that follows a schedule or a metric of validation data, "
                f"found one that follows {config.monitor!r}, which training logs without noise. "
                "Monitor another metric, or use a schedule."
            )


def check_linear_decay(trainer: Trainer) -> None:
    """Refuse a rate that would not fall: counted in batches, and lowered once in an epoch."""
    for config in trainer.lr_scheduler_configs:
        scheduler, epochs = config.scheduler, trainer.max_epochs
        if not isinstance(scheduler, LinearDecay):
            continue
        steps = scheduler.known_steps()
        has_end = epochs is not None and epochs != -1
        if config.interval == "epoch" and not (has_end and steps <= (epochs or 0)):
            raise Refused(
                f"Expected LinearDecay over {steps:,} steps to be stepped after every batch, found "
                "that it is stepped after every epoch: the rate would hardly fall. Return "
                "{'optimizer': ..., 'lr_scheduler': {'scheduler': ..., 'interval': 'step'}} from "
                "configure_optimizers."
            )


def check_private_module(module: LightningModule) -> None:
    """Refuse ways of training in which the strategy does not see every step."""
    if not module.automatic_optimization:
        raise Refused(
            "Expected automatic optimization in private training, found "
            "automatic_optimization=False: backward passes and updates would not be those that "
            "are charged. Return one loss per example from training_step instead."
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise Refused(
            "Expected training_step(batch, batch_idx) in private training, found dataloader_iter: "
            "which batches it takes would not be seen. Take the batch as an argument."
        )


def check_averaging(trainer: Trainer, mechanism: Mechanism | None) -> None:
    """Refuse averages of weights where rows may owe noise: the average would never get it."""
    if mechanism is None:
        return
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            mechanism.check_weight_copies(type(callback).__name__)


def check_optimizers(optimizers: list[Optimizer]) -> None:
    """Refuse optimizers that take more than one gradient for a step, or have no learning rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = group.get("lr", 0.0)
            if not math.isfinite(rate) or rate < 0 or rate > LARGEST:
                raise Refused(
                    f"Expected a learning rate of the dense layers from 0 to {LARGEST:g}, found "
                    f"{float(rate)} in {type(optimizer).__name__}. Set its lr."
                )
        if isinstance(optimizer, LBFGS):
            raise Refused(
                "Expected an optimizer that takes one gradient a step, found LBFGS: each of its "
                "evaluations would update the tables. Use SGD, Adagrad or Adam."
            )


def check_private_resume(spent: object, plan: object) -> None:
    """Refuse to go on from a private run's checkpoint without a plan."""
    if spent is not None and plan is None:
        raise Refused(
            "Expected a privacy plan to go on with a private run, found none: every further step "
            "would be unprotected and uncounted. Set privacy on the strategy."
        )


def check_private_history(history: History) -> None:
    """Refuse to go on without a plan from private weights in memory, or from a file."""
    if any(span.is_private for span in history):
        raise Refused(
            "Expected a privacy plan to go on with weights that were trained privately, found "
            "none: every further step would be unprotected and uncounted. Set privacy on the "
            "strategy, or begin with a new module."
        )


def loss_of(output: STEP_OUTPUT) -> Tensor:
    """The loss of a private training_step. A step without one is refused: it tells of the data."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise Refused(
            "Expected training_step to return a loss in every private step, found none: a skipped "
            "step depends on the data, and other ranks would wait. Return the losses, even if zero."
        )
    return loss


def one_loss_per_example(loss: Tensor) -> Tensor:
    """The same loss, or a refusal if it is not one number for each example."""
    if loss.ndim == 1:
        return loss
    raise Refused(
        f"Expected one loss per example (1-D), found {loss.ndim} dimensions. Return the loss "
        "with reduction='none', reduced over everything but the batch."
    )


def check_batch_norm(module: LightningModule, *, sync_batchnorm: bool) -> None:
    """Refuse a setting that only makes sense for a module that the strategy wraps."""
    if sync_batchnorm and any(
        isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules()
    ):
        raise Refused(
            "Expected sync_batchnorm=False, found True: this strategy does not wrap the module. "
            "Use LayerNorm, which needs no synchronisation."
        )

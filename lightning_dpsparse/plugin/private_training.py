"""What happens around every private step, in the order in which a batch meets it.

The strategy hands Lightning's hooks over to a `PrivateTraining` once a run has started. A step is
charged before anything of its batch reaches the model. The forward pass runs inside the engine's
capture, in parts if the batch is too large for the device. The backward pass clips, adds noise and
updates the tables. The optimizer then updates the dense layers, by released gradients alone. The
perimeter (`perimeter`) checks in between that nothing else happened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from tqdm import tqdm

from lightning_dpsparse.plugin import refusals
from lightning_dpsparse.plugin.private_run import PrivateRun
from lightning_dpsparse.plugin.probe.repeatable import as_if_never_run
from lightning_dpsparse.plugin.rehearsal import Rehearsal
from lightning_dpsparse.sharded.examples import count_of
from lightning_dpsparse.sharded.split_batch import split_batch
from lightning_dpsparse.sharded.whole_batch import Parts

TrainingStep = Callable[..., STEP_OUTPUT]
"""Lightning's own way to call training_step: the batch first."""


class PrivateTraining:
    """Takes the steps of one private run that has started.

    Args:
        move: Lightning's own way to bring a batch to the device.
        max_physical_batch: Most examples that a rank takes through the model at once.
    """

    def __init__(
        self,
        run: PrivateRun,
        module: LightningModule,
        strategy: Strategy,
        move: Callable[..., Any],
        max_physical_batch: int | None,
    ) -> None:
        assert run.stepper is not None
        assert run.perimeter is not None
        self._run, self._stepper, self._perimeter = run, run.stepper, run.perimeter
        self._module, self._strategy, self._move = module, strategy, move
        self._max_physical_batch = max_physical_batch
        run.calibration.open(
            module,
            strategy,
            run.budget,
            run.data.sampled,
            run.perimeter.guard,
            self._moved,
            self.pay_all,
            max_physical_batch,
        )
        self._shown: tuple[float, int] | None = None
        self._rehearsal = Rehearsal(module, run.stepper)

    # ---- the forward pass -----------------------------------------------------------------------

    def note_arrival(self, batch: Any) -> None:
        """A batch has reached the device. Only training batches belong to a step."""
        if self._module.trainer.training:
            self._perimeter.note_arrival(batch)

    def forward(
        self, training_step: TrainingStep, batch: Any, *rest: Any, **kwargs: Any
    ) -> STEP_OUTPUT:
        """Charge the step, and take its batch through the model.

        The output is that of the last part of the batch, which goes on through `backward`.
        """
        self._begin_step(batch)
        self._show_epsilon()
        losses = partial(_losses, training_step, rest, kwargs)
        self._perimeter.forward = lambda batch: losses(self._moved(batch))
        most, device = self._max_physical_batch, self._strategy.root_device
        self._rehearsal.before(batch, losses)
        parts = [batch] if most is None else split_batch(batch, most, device)
        if len(parts) > 1:
            again = [partial(losses, part) for part in parts]
            self._stepper.read_in_parts(Parts(again, as_if_never_run(self._module)))
        for part in parts[:-1]:
            with self._stepper.capture(is_whole=False, num_examples=count_of(part)):
                loss_n = losses(part)
            self._stepper.add_part(loss_n)
        is_whole, size = len(parts) == 1, count_of(parts[-1])
        with self._stepper.capture(is_whole=is_whole, num_examples=size):
            output = training_step(parts[-1], *rest, **kwargs)
        refusals.loss_of(output)
        return output

    def _begin_step(self, batch: Any) -> None:
        """Charge the step, or refuse it; then ready the engine for it."""
        run = self._run
        delivery = self._perimeter.before_step(batch)
        step = run.budget.charge()
        if run.budget.run.selects_before(step):
            run.selection.select(step, run.budget.run, run.data.sampled, self._strategy)
        self._perimeter.start_step(step, run.data.unit_sizes(step), delivery)

    def _moved(self, batch: Any) -> Any:
        """A batch of the loader's, through the hooks that Lightning has for it."""
        batch = self._module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self._move(batch, dataloader_idx=0)

    def _show_epsilon(self) -> None:
        """Show an upper bound of epsilon, this step included, to progress bar and loggers.

        Lightning keeps a value until the epoch ends, and takes a millisecond to note one: it is
        told again only when something changed.
        """
        now = (self._run.budget.epsilon, self._module.current_epoch)
        if now != self._shown and math.isfinite(now[0]):
            with self._run.logs.ours():
                self._module.log("epsilon", now[0], prog_bar=True, batch_size=1)
            self._shown = now

    # ---- the backward pass and the update -------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        """Clip, add noise and update the tables. Every hook after this sees noisy gradients."""
        self._perimeter.guard.check("in the forward pass")
        self._stepper.step(refusals.one_loss_per_example(loss))
        self._perimeter.guard.note_tables()

    def update(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Let the optimizer update the dense layers. `closure` takes the step, as Lightning's."""

        def checked() -> Any:
            output = closure()
            self._perimeter.guard.check_gradients()
            return output

        output = optimizer.step(closure=checked, **kwargs)
        self._perimeter.guard.note()
        # Lightning counts this step later.
        self._run.ledger.end_if_spent(self._module.trainer.global_step + 1)
        return output

    # ---- whatever reads the weights -------------------------------------------------------------

    def pay_all(self) -> None:
        """Add the noise that a mechanism put off."""
        self._stepper.before_release(_payment_bar if self._strategy.is_global_zero else None)

    def before_save(self) -> None:
        """The weights are about to be written to a file."""
        self._perimeter.before_save()
        self.pay_all()

    def before_validation(self) -> None:
        """Code of the user's is about to run on the module."""
        self._perimeter.before_validation()

    def after_validation(self) -> None:
        """That code must have left the weights alone."""
        self._perimeter.guard.after_validation()


def _losses(
    training_step: TrainingStep, rest: tuple[Any, ...], kwargs: dict[str, Any], batch: Any
) -> Tensor:
    """The losses of a batch that is on its device, one for each example."""
    output = training_step(batch, *rest, **kwargs)
    return refusals.one_loss_per_example(refusals.loss_of(output))


def _payment_bar(work: Sequence[Any]) -> Iterable[Any]:
    return tqdm(work, "Noise for all rows", delay=1.0, leave=False, unit="chunk")

"""Averages of the weights over training: what is validated, saved and kept in the end.

Training goes on with the weights themselves. Their average changes places with them in validation,
stands in their place in every checkpoint (which has the weights beside it, to go on from), and is
what the module holds after `fit`. It is made of what private steps have released, so that it costs
no privacy; how rows that owe noise are averaged is in `mechanisms/lazydp/averages.py`.

The callback is what the user sets. `Averaging` is what the strategy keeps of it during a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from typing_extensions import override

from lightning_dpsparse.checks import check_number, is_number, shown
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.model_average import LocalWeights, ModelAverage, copy_weights

STATE_KEY = "averaging_state"
"""Where a checkpoint says what its average is made of. (Lightning's own name for it.)"""


class AverageWeights(Callback):
    """Averages the weights, dense layers and tables alike, for whatever is validated and saved.

    Set exactly one of the two. The average takes memory for one more copy of the tables and four
    bytes a row, from the first step that it counts. Buffers are not averaged.

    Args:
        fraction: All steps of the last part of training count alike. The part is that of the
            planned steps: 0.25 is the last quarter. Before it the average is the weights.
        half_life: All steps count, and a step counts half of one that comes so many steps later.
    """

    def __init__(self, fraction: float | None = None, half_life: float | None = None) -> None:
        if (fraction is None) == (half_life is None):
            found = "none" if fraction is None else "both"
            raise Refused(
                f"Expected fraction or half_life in AverageWeights, found {found}. Set exactly one."
            )
        if fraction is not None:
            remedy = "The last quarter of training is 0.25."
            check_number("fraction", fraction, above=0, most=1.0, remedy=remedy)
        if half_life is not None:
            check_number("half_life", half_life, least=1, remedy="It is a number of steps.")
        self.fraction, self.half_life = fraction, half_life

    def describe(self) -> str:
        """What is averaged, for the report.

        >>> AverageWeights(fraction=0.25).describe()
        'the last 25% of the planned steps, all alike'
        """
        if self.fraction is not None:
            return f"the last {100 * self.fraction:g}% of the planned steps, all alike"
        return f"all steps, each counting half of one that comes {self.half_life:g} steps later"

    def starts_after(self, last_step: float) -> int:
        """The number of steps before the first one that counts, if training ends at `last_step`."""
        if self.fraction is None:
            return 0
        if math.isinf(last_step):
            raise Refused(
                "Expected a number of steps to average the last part of, found training without "
                "end. Set max_steps or max_epochs, or half_life instead of fraction."
            )
        return int(last_step) - max(1, math.ceil(self.fraction * last_step - 1e-9))

    # ---- what Lightning calls -------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(getattr(trainer.strategy, "averaging", None), Averaging):
            raise Refused(
                "Expected DPSparseStrategy with AverageWeights, found "
                f"{type(trainer.strategy).__name__}. Use Lightning's WeightAveraging there."
            )
        kinds = (AverageWeights, WeightAveraging, StochasticWeightAveraging)
        found = [c for c in trainer.callbacks if isinstance(c, kinds)]  # type: ignore[attr-defined]
        if len(found) > 1:
            names = " and ".join(type(callback).__name__ for callback in found)
            raise Refused(f"Expected one average of the weights, found {names}. Leave one out.")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _averaging(trainer).ask_for(self)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        _averaging(trainer).note_steps(trainer.global_step)


def _averaging(trainer: Trainer) -> Averaging:
    found: Averaging = trainer.strategy.averaging  # type: ignore[attr-defined]
    return found


class Averaging:
    """What a strategy averages: nothing, unless an `AverageWeights` has asked for it."""

    def __init__(self) -> None:
        self.settings: AverageWeights | None = None
        """What is averaged in this run; None is nothing."""
        self._module: LightningModule | None = None
        self.model: ModelAverage | None = None
        """The average; None as long as it is the weights themselves."""
        self._so_far: tuple[LocalWeights, float] | None = None
        """The average that the run goes on from, and what its steps weigh together."""
        self._steps = self._starts_after = 0

    # ---- before the first step ------------------------------------------------------------------

    def begin(self, module: LightningModule) -> None:
        """A `fit` begins. If the module holds the average of the last one, it goes on from that
        one's weights, unless somebody has written to the module since."""
        model, self.model = self.model, None
        self.settings = self._so_far = self._module = None
        if model is not None and model.is_swapped and model.is_left_alone(module):
            model.swap()
            self._so_far = model.taken_out(), model.total

    def ask_for(self, settings: AverageWeights) -> None:
        """The first step is about to be taken, and these averages are wanted."""
        self.settings = settings

    def forget(self) -> None:
        """Other weights are about to be loaded: what was averaged before is not theirs."""
        self.model = self._so_far = None

    def note_average(self, module: LightningModule) -> None:
        """The module holds the average of a checkpoint that training goes on from."""
        self._so_far = copy_weights(module), 0.0

    def restore(self, kept: object) -> None:
        """Go on from what `kept` gave, if there was an average with it."""
        total: Any = kept.get("total") if isinstance(kept, Mapping) else None
        if self._so_far is None:
            return
        if not is_number(total) or not 0 < float(total) < math.inf:
            raise Refused(
                "Expected a checkpoint that says how many steps its average is made of, found "
                f"{shown(kept)}. Take one that a run of the same code saved."
            )
        self._so_far = self._so_far[0], float(total)

    def start(self, module: LightningModule, remaining: int | None) -> None:
        """The first step is about to be taken, of `remaining` if a budget says how many."""
        so_far, self._so_far = self._so_far, None
        self._module, self._steps = module, module.trainer.global_step
        if self.settings is None:
            return
        last_step = math.inf
        if self.settings.fraction is not None:
            count = len(module.trainer.optimizers)
            if count > 1:
                raise Refused(
                    "Expected one optimizer where the last part of training is averaged, found "
                    f"{count}: Lightning plans batches, and counts each optimizer's steps. Use "
                    "half_life instead of fraction."
                )
            last_step = module.trainer.estimated_stepping_batches  # asks the ranks: on all of them
            if remaining is not None:
                last_step = min(last_step, self._steps + remaining)
        self._starts_after = self.settings.starts_after(last_step)
        if so_far is not None and self._steps > self._starts_after:
            self.model = ModelAverage(module, self.settings.half_life, so_far[1], so_far[0])

    # ---- during training ------------------------------------------------------------------------

    def _note_last_step(self) -> None:
        """Another callback, whose turn came first, may see to it that the average is shown or saved
        before this one has heard of the last step."""
        if self._module is not None and self.settings is not None:
            self.note_steps(self._module.trainer.global_step)

    def note_steps(self, steps: int) -> None:
        """So many steps have been taken in all."""
        if steps <= self._steps or self._module is None or self.settings is None:
            return
        self._steps = steps
        if steps <= self._starts_after:
            return
        if self.model is None:
            self.model = ModelAverage(self._module, self.settings.half_life)
        self.model.note_step()

    def show(self, *, average: bool) -> None:
        """From now on the module holds the average, or the weights that training goes on with."""
        if average:
            self._note_last_step()
        if self.model is not None and self.model.is_swapped != average:
            self.model.swap()

    # ---- files ----------------------------------------------------------------------------------

    def split(
        self, state: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any]]:
        """Of the module's state dict: what others should read, what training goes on from if that
        is something else, and what a checkpoint says of the two."""
        self._note_last_step()
        model = self.model
        if model is None or self._module is None:
            return state, None, {}
        if model.is_swapped and not model.is_left_alone(self._module):  # other weights were loaded
            return state, None, {}
        average, weights = model.both(state)
        return average, weights, {STATE_KEY: {"total": model.total}}

    def close(self, module: LightningModule | None) -> None:
        """Training is over. The module keeps the average, and weights are kept beside it."""
        if self._so_far is not None and module is not None:
            # There was nothing left to do, or the first step was not reached.
            callbacks = module.trainer.callbacks  # type: ignore[attr-defined]
            if any(isinstance(callback, AverageWeights) for callback in callbacks):
                average, total = self._so_far
                self._module, self.model = module, ModelAverage(module, None, total, average)
                self.model.swap()
        self.settings = self._so_far = None
        if self.model is not None:
            self.model.close()

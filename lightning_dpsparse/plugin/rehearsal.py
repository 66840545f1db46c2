"""Two small batches that pass through the model before its first step, and leave no trace.

The engine must tell what is the same for all examples, such as a table of positions, from what has
one row for each. It can by passes with different numbers of examples (`engine/constants.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lightning.pytorch import LightningModule

from lightning_dpsparse.plugin.probe.repeatable import as_if_never_run
from lightning_dpsparse.sharded.examples import count_of, take_examples
from lightning_dpsparse.sharded.private import PrivateSteps

_SIZES = (2, 3)
"""Numbers of examples in the batches."""


class Rehearsal:
    """Rehearses once for every set of layers that learn.

    An error in it does not end the run: batches of some kinds cannot be cut, and some models take
    one size only. Then less is known, and the first step shows what is wrong, if anything is.
    """

    def __init__(self, module: LightningModule, steps: PrivateSteps) -> None:
        self._module, self._steps = module, steps
        self._rehearsed: object = None

    def before(self, batch: Any, losses: Callable[[Any], object]) -> None:
        """Make the passes, if they are due, with examples of this batch. On all ranks together."""
        size, capture = count_of(batch), self._steps.dense.capture
        if self._rehearsed is capture or size is None:  # other layers learn: another capture
            return
        self._rehearsed = capture
        for few in _SIZES:
            index = [i % size for i in range(few)] if size else []
            with (
                suppress(Exception),
                as_if_never_run(self._module)(),
                self._steps.capture(is_whole=False, num_examples=len(index), is_rehearsal=True),
            ):
                losses(take_examples(batch, size, index))

"""A mechanism that fits in one file: the noise of a step is that of the step before, negated.

It protects nobody. It is here to show how much a mechanism with a state of its own has to touch:
this file, and nothing in the package. What it keeps is how many steps it has taken, in checkpoints
too, and both tables and dense layers go by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from lightning_dpsparse.engine.mechanism import Mechanism
from lightning_dpsparse.engine.rows import RowGradient
from lightning_dpsparse.engine.state import MechanismState, StepNoise, TableKernel, TableState


@dataclass(frozen=True)
class Alternating(Mechanism):
    """Noise z in the first step, -z in the second, z in the third: two steps cancel."""

    is_private: ClassVar[bool] = False
    threat_model: ClassVar[str] = "None: whoever sees two steps has their sum without noise."

    def open(self, kernels: Sequence[TableKernel], noise: StepNoise) -> AlternatingState:
        return AlternatingState(self, kernels, noise)


class AlternatingState(MechanismState):
    """Counts steps for tables and dense layers alike."""

    def __init__(
        self, mechanism: Mechanism, kernels: Sequence[TableKernel], noise: StepNoise
    ) -> None:
        self.steps = 0
        super().__init__(mechanism, [AlternatingTables(self, k, noise) for k in kernels], noise)

    @property
    def sign(self) -> float:
        return -1.0 if self.steps % 2 else 1.0

    def add_dense_noise_(self, flat_N: Tensor, step: int) -> None:
        """A step begins to be released with its dense layers."""
        self.steps += 1
        flat_N.mul_(self.sign)
        super().add_dense_noise_(flat_N, 0)  # the same draws in every step
        flat_N.mul_(self.sign)

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.steps = int(state["steps"])


class AlternatingTables(TableState):
    """The tables of one kernel."""

    def __init__(self, run: AlternatingState, kernel: TableKernel, noise: StepNoise) -> None:
        super().__init__(kernel, noise)
        self._run = run

    def updates(self, sums: Sequence[RowGradient], step: int) -> Iterator[list[RowGradient]]:
        sign = self._run.sign
        for clipped in sums:
            clipped.values_UD.mul_(sign)
        for update in super().updates(sums, 0):  # the same draws in every step
            for gradient in update:
                gradient.values_UD.mul_(sign)
            yield update

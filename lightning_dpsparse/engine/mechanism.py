"""What a mechanism decides: which rows of a table are updated in a step, and with what noise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_dpsparse.accounting.events import DpEvent, gaussian
from lightning_dpsparse.engine.lookups import Lookup, LookupsByRow
from lightning_dpsparse.engine.rows import RowGradient
from lightning_dpsparse.engine.step_inputs import Ranks, Read, Table
from lightning_dpsparse.noise.sources import NoiseSource

# B examples of all ranks, U distinct rows that a kernel read, V rows that nobody read

Draw = Callable[[Tensor, int], Tensor]
"""draw(rows, part): noise of the step's standard deviation for these rows, for chunk `part`."""


@dataclass(frozen=True)
class BatchReads:
    """Which rows take part in this step? Everything here is secret but the answer."""

    reads: Sequence[Read]
    lookups: Sequence[Lookup]
    """What each read, with the gradients of the examples, not clipped."""
    first_of_unit_B: Tensor | None
    """The first example of every example's unit; None if units are examples."""
    ranks: Ranks
    noise: NoiseSource
    noise_multiplier: float
    """The whole step's, over all it releases."""
    expected_batch: float
    step: int
    device: torch.device
    """Where to work: a rank may have read nothing."""


@dataclass(frozen=True)
class RowChoice:
    """The rows of one kernel that take part: what the step may release, and nothing else."""

    kept: LookupsByRow
    """Of the rows that were read, with their lookups."""
    unread_rows_V: Tensor
    """Rows that nobody read, increasing, with the kernel's tables numbered through."""


class Mechanism(ABC):
    """A frozen description; everything that changes is passed in."""

    is_private: ClassVar[bool]
    """Whether the mechanism, with honest sampling and noise, is differentially private."""

    threat_model: ClassVar[str]
    """Against whom the guarantee holds, in a sentence."""

    defers: ClassVar[bool] = False
    """Whether noise waits until a row is read: only an optimizer without memory allows that."""

    reaches_all_rows: ClassVar[bool] = False
    """Whether rows that nobody read are updated too, now or later, all of them."""

    releases_rows: ClassVar[bool] = False
    """Whether which rows a step updates is itself private, and so may be logged."""

    chooses_by_batch: ClassVar[bool] = False
    """Whether rows are chosen by the whole batch, which must then be seen at once."""

    needs_whole_rows: ClassVar[bool] = False
    """Whether all columns of a row must lie on one rank."""

    def event(self, noise_multiplier: float) -> DpEvent:
        """What one step costs, all units in it; sampling comes on top."""
        return gaussian(noise_multiplier)

    def gradient_noise(self, noise_multiplier: float) -> float:
        """The part of the noise multiplier that gradients get, where other queries have a share."""
        return noise_multiplier

    def resolve_thresholds(self, noise_multiplier: float, tables: Sequence[Table]) -> Mechanism:
        """With everything chosen that depends on the model and the noise."""
        return self

    def choose_rows(self, question: BatchReads) -> list[RowChoice] | None:
        """The rows that take part, for every read; None is all that were read."""
        return None

    @abstractmethod
    def updates(self, clipped: RowGradient, num_rows: int, draw: Draw) -> Iterator[RowGradient]:
        """Gradients on rows of one stack of tables, every row at most once a step.

        `clipped` lists the rows that take part, whether anybody read them or not.
        """


def noise_on_rows(clipped: RowGradient, draw: Draw) -> Iterator[RowGradient]:
    """Noise on every row that takes part, and on no other."""
    if clipped.rows_U.numel():
        noise = draw(clipped.rows_U, 0)
        yield RowGradient(clipped.rows_U, noise.add_(clipped.values_UD))

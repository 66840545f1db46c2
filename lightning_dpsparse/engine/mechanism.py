"""What a mechanism decides: which rows of a table are updated in a step, and with what noise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar

from torch import Tensor

from lightning_dpsparse.engine.rows import RowGradient

Draw = Callable[[Tensor, int], Tensor]
"""draw(rows, part): noise of the step's standard deviation for these rows, for chunk `part`."""


class Mechanism(ABC):
    """A frozen description; everything that changes is passed in."""

    is_private: ClassVar[bool]
    """Whether the mechanism, with honest sampling and noise, is differentially private."""

    threat_model: ClassVar[str]
    """Against whom the guarantee holds, in a sentence."""

    defers: ClassVar[bool] = False
    """Whether noise waits until a row is read: only an optimizer without memory allows that."""

    reaches_all_rows: ClassVar[bool] = False
    """Whether rows that nobody read are updated too, now or later."""

    @abstractmethod
    def updates(self, clipped: RowGradient, num_rows: int, draw: Draw) -> Iterator[RowGradient]:
        """Gradients on rows of one stack of tables, every row at most once a step."""

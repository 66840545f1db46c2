"""What a mechanism decides: which rows of a table are updated in a step, and with what noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from torch import Tensor

from lightning_dpsparse.engine.rows import RowGradient

Draw = Callable[[Tensor, int], Tensor]
"""draw(rows, part): noise of the step's standard deviation for these rows, for chunk `part`."""


class Mechanism(Protocol):
    """A frozen description; everything that changes is passed in."""

    @property
    def is_private(self) -> bool:
        """Whether the mechanism, with honest sampling and noise, is differentially private."""
        ...

    @property
    def threat_model(self) -> str:
        """Against whom the guarantee holds, in a sentence."""
        ...

    def updates(self, clipped: RowGradient, num_rows: int, draw: Draw) -> Iterator[RowGradient]:
        """Gradients on rows of one stack of tables, every row at most once a step."""
        ...

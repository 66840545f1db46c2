"""Every batch of a private run is followed from the sampler to its step.

The accounting of a step holds for the batch that was drawn for it. So every batch that a loader
delivers must go into one step, in order, and every step must have a batch of its own. A batch that
is skipped, or used twice, is refused: which ones are skipped may tell of the data, and a second use
would not be charged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from lightning.fabric.utilities.data import sized_len

from lightning_dpsparse.refused import Refused


@dataclass(frozen=True)
class Delivery:
    """One batch as the loader gave it. It is secret, and is kept until its step is over."""

    batch: Any
    indices: list[int] | None
    """The numbers of its examples in the data set; None if the plan did not draw them."""

    @property
    def num_examples(self) -> int | None:
        """How many examples were drawn; None if the plan did not draw them."""
        return None if self.indices is None else len(self.indices)


class Deliveries:
    """Sees to it that every batch goes into one step, and that every step has its own batch."""

    def __init__(self) -> None:
        self._drawn: deque[list[int]] = deque()
        self._waiting: deque[Delivery] = deque()
        self.under_way: Delivery | None = None
        """The batch of the step that was begun last."""

    def note_drawn(self, indices: list[int]) -> None:
        """A loader is about to read these examples. Workers read ahead of the steps."""
        self._drawn.append(indices)

    def begin(self) -> None:
        """A new pass over the loader begins: what was read ahead in the last one is void."""
        self._check_used(allowed=0)
        self._drawn.clear()

    def deliver(self, batch: Any, *, reads_ahead: bool) -> None:
        """The loader hands over a batch.

        With `reads_ahead`, Lightning asks for one more than it needs, since it cannot know how many
        there will be.
        """
        self._check_used(allowed=1 if reads_ahead else 0)
        indices = self._drawn.popleft() if self._drawn else None
        self._waiting.append(Delivery(batch, indices))

    def take(self) -> Delivery:
        """The batch of the step that begins."""
        if not self._waiting:
            raise Refused(
                "Expected a fresh batch for every step that is charged, found none: the last one "
                "is being used again. Let the optimizer call its closure once, and take one step "
                "for each batch."
            )
        self.under_way = self._waiting.popleft()
        return self.under_way

    def has_unused(self) -> bool:
        """Whether a batch was delivered that no step has taken."""
        return bool(self._waiting)

    def _check_used(self, allowed: int) -> None:
        if len(self._waiting) > allowed:
            self._waiting.clear()
            raise Refused(
                "Expected every batch that was drawn to be trained on, found one that was skipped: "
                "which ones are left out may tell of the data. Return losses for every batch, and "
                "let no hook skip one."
            )


class Delivered:
    """A loader whose batches are noted as they go out. Everything else is the loader's own."""

    def __init__(self, loader: Iterable[Any], deliveries: Deliveries, *, reads_ahead: bool) -> None:
        self._loader, self._deliveries, self._reads_ahead = loader, deliveries, reads_ahead

    def __iter__(self) -> Iterator[Any]:
        self._deliveries.begin()
        for batch in self._loader:
            self._deliveries.deliver(batch, reads_ahead=self._reads_ahead)
            yield batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class SizedDelivered(Delivered):
    """A watched loader that knows its length."""

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]


class ResumableDelivered(SizedDelivered):
    """A watched loader that goes on where the trainer's progress says."""

    def state_dict(self) -> dict[str, Any]:
        return dict(self._loader.state_dict())  # type: ignore[attr-defined]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)  # type: ignore[attr-defined]


def delivered(loader: Any, deliveries: Deliveries) -> Delivered:
    """The same loader, watched."""
    kind: type[Delivered] = Delivered
    if sized_len(loader) is not None:
        kind = ResumableDelivered if hasattr(loader, "state_dict") else SizedDelivered
    return kind(loader, deliveries, reads_ahead=kind is Delivered)

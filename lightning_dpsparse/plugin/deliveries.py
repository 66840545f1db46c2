"""Who was drawn, and who arrived: every batch of a private run, from the sampler to its step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from lightning.fabric.utilities.data import sized_len

from lightning_dpsparse.refused import Refused


@dataclass(frozen=True)
class Delivery:
    """One batch as the loader gave it. Secret: it is kept on the host until its step is over."""

    batch: Any
    indices: list[int] | None
    """Its examples' numbers in the data set, where the plan drew them."""

    @property
    def num_examples(self) -> int | None:
        return None if self.indices is None else len(self.indices)


class Deliveries:
    """Every batch that is delivered goes into one step, and every step has a batch of its own."""

    def __init__(self) -> None:
        self._drawn: deque[list[int]] = deque()
        self._waiting: deque[Delivery] = deque()
        self.under_way: Delivery | None = None

    def note_drawn(self, indices: list[int]) -> None:
        """Before a loader reads these examples; workers read ahead."""
        self._drawn.append(indices)

    def begin(self) -> None:
        """A new pass over the loader: what was read ahead in the last one is void."""
        self._check_used(allowed=0)
        self._drawn.clear()

    def deliver(self, batch: Any, *, reads_ahead: bool) -> None:
        """The loader hands over a batch. Lightning asks for one more than it needs if it cannot
        know how many there will be."""
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
    """One that knows its length."""

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]


class ResumableDelivered(SizedDelivered):
    """One that goes on where the trainer's progress says."""

    def state_dict(self) -> dict[str, Any]:
        return dict(self._loader.state_dict())  # type: ignore[attr-defined]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)  # type: ignore[attr-defined]


def delivered(loader: Any, deliveries: Deliveries) -> Delivered:
    """`loader`, watched."""
    kind: type[Delivered] = Delivered
    if sized_len(loader) is not None:
        kind = ResumableDelivered if hasattr(loader, "state_dict") else SizedDelivered
    return kind(loader, deliveries, reads_ahead=kind is Delivered)

"""A mechanism: what is released of the tables in a step, at what price, and against whom it holds.

A mechanism is a frozen description, read from a recipe and shown in the report. It keeps nothing
while training runs: whatever changes lies in the state that it opens (state.py). One mechanism is
one file or folder of `mechanisms/`; the smallest, `mechanisms/eana.py`, is a good place to begin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_dpsparse.accounting.charges import Charge
from lightning_dpsparse.accounting.events import DpEvent, gaussian
from lightning_dpsparse.engine.lookups import Lookup, LookupsByRow
from lightning_dpsparse.engine.rows import found_in
from lightning_dpsparse.engine.state import MechanismState, StepNoise, TableKernel, TableState
from lightning_dpsparse.engine.step_inputs import Ranks, Read, Table
from lightning_dpsparse.noise.sources import NoiseSource
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sampling.schedule import Schedule

# B examples of all ranks, U distinct rows that a kernel read, V rows that nobody read, K rows that
# were chosen


@dataclass(frozen=True)
class BatchReads:
    """What a mechanism may look at to choose the rows of a step. All of it is secret."""

    reads: Sequence[Read]
    lookups: Sequence[Lookup]
    """What each read, with the gradients of the examples, not clipped. Empty where only ids were
    listed."""
    first_of_unit_B: Tensor | None
    """The first example of every example's unit; None if units are examples."""
    ranks: Ranks
    noise: NoiseSource
    noise_multiplier: float
    """The noise multiplier of the whole step, over everything that it releases."""
    expected_batch: float
    step: int
    device: torch.device
    """The device to work on: a rank may have read nothing."""
    whole_batch: WholeBatch | None = None
    """The batch that this is a part of; None if this is all of it."""

    def choose_by_ids(self, choose: Callable[[BatchReads], list[RowChoice]]) -> list[RowChoice]:
        """The rows that `choose` finds in the whole batch, by ids alone.

        Of a batch in parts, every part is given all the rows: those that it did not read have no
        gradient in it.
        """
        if self.whole_batch is None:
            return choose(self)
        rows = self.whole_batch.choose_once(choose)
        return [_choice_of(rows[read.state], read) for read in self.reads]


class WholeBatch:
    """A batch that is too large to be read at once: its ids can be listed before its first part.

    Args:
        list_ids: Reads all parts, for their ids only: without gradients, and without a trace.
    """

    def __init__(self, list_ids: Callable[[], BatchReads]) -> None:
        self._list_ids = list_ids
        self._rows: dict[TableState, Tensor] | None = None

    def choose_once(
        self, choose: Callable[[BatchReads], list[RowChoice]]
    ) -> dict[TableState, Tensor]:
        """The chosen rows of each kernel, increasing. They are chosen once a step."""
        if self._rows is None:
            batch = self._list_ids()
            self._rows = {
                read.state: torch.cat([choice.kept.row_U, choice.unread_rows_V]).sort().values
                for read, choice in zip(batch.reads, choose(batch))
            }
        return self._rows


def _choice_of(chosen_K: Tensor, read: Read) -> RowChoice:
    """What rows that were chosen before mean for one part of the batch."""
    runs = read.bags.runs
    is_unread_K = ~found_in(runs.row_U, chosen_K)
    return RowChoice(runs.only(found_in(chosen_K, runs.row_U)), chosen_K[is_unread_K])


@dataclass(frozen=True)
class RowChoice:
    """The rows of one kernel that take part: what the step may release, and nothing else."""

    kept: LookupsByRow
    """Of the rows that were read, those that take part, with their lookups."""
    unread_rows_V: Tensor
    """Rows that take part though nobody read them: increasing, with one numbering for all tables
    of the kernel."""


class Mechanism:
    """A frozen description; everything that changes is in the state that it opens."""

    is_private: ClassVar[bool]
    """Whether the mechanism, with honest sampling and noise, is differentially private."""

    threat_model: ClassVar[str]
    """Against whom the guarantee holds, in a sentence."""

    def event(self, noise_multiplier: float) -> DpEvent:
        """What one step costs the units that take part in it. Sampling is not counted here."""
        return gaussian(noise_multiplier)

    def charges(
        self, schedule: Schedule, noise_multiplier: float, first_step: int, steps: int
    ) -> list[Charge]:
        """What the first `steps` steps of a segment cost, sampling included.

        A segment is a stretch of a run without interruption. It begins at step `first_step` of the
        schedule, with noise that no earlier segment has used. By default its steps are independent,
        and each costs its own `event`. A mechanism whose noise is correlated over steps overrides
        this, and prices all of them as one.

        Guarantees, of every mechanism: more steps never cost less, and the charges together pay for
        `steps` steps, or for fewer if the schedule ends before.
        """
        return schedule.sum_of_steps(self.event(noise_multiplier), first_step, steps)

    def gradient_noise(self, noise_multiplier: float) -> float:
        """The part of the noise multiplier that gradients get, where other queries have a share."""
        return noise_multiplier

    def resolve_thresholds(self, noise_multiplier: float, tables: Sequence[Table]) -> Mechanism:
        """The same mechanism with everything chosen that depends on the model and the noise."""
        return self

    def check_tables(self, tables: Sequence[Table]) -> None:
        """Refuse settings that name tables which the model does not have."""

    def check_optimizer(self, kind: str, weight_decay: float) -> None:
        """Refuse a fused optimizer that would not do with this mechanism what its name says.

        By default rows that take part in no step do not move, so they cannot decay either.
        """
        if weight_decay and kind == "sgd":
            raise Refused(
                f"Expected weight_decay=0 with {type(self).__name__}, found {weight_decay}: only "
                "rows that were read would decay. Use DPSGD or LazyDP."
            )

    def check_weight_copies(self, copier: str) -> None:
        """Refuse a callback that copies the weights after steps, if they may not be seen then."""

    def open(self, kernels: Sequence[TableKernel], noise: StepNoise) -> MechanismState:
        """Begin a run on these kernels, which hold this rank's part of all tables."""
        return MechanismState(self, [self.open_table(kernel, noise) for kernel in kernels], noise)

    def open_table(self, kernel: TableKernel, noise: StepNoise) -> TableState:
        """The state of one kernel's tables. By default rows that take part get noise at once."""
        return TableState(kernel, noise)

    def choose_rows(self, batch: BatchReads) -> Sequence[RowChoice] | None:
        """The rows that take part in a step, for every read; None means every row read."""
        return None

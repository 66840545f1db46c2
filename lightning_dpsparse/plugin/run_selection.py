"""The rows that a private run selects before it trains them, as FEST does.

Selecting rows by private data is a release of its own, and costs privacy. The schedule of a run
says before which steps rows are selected (`RunPlan.selects_before`), and the budget charges for
that with the step. A run that goes on from an earlier one keeps the rows that were selected then.
If it cannot, because the plan selects in another way now, one more selection is overdue: it is
charged here, before the first step. `mechanisms/selection` does the selecting itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from tqdm import tqdm

from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.budget import BudgetSpentError
from lightning_dpsparse.engine.state import MechanismState
from lightning_dpsparse.mechanisms.fest import selection_of
from lightning_dpsparse.mechanisms.selection import PublicFrequencies
from lightning_dpsparse.mechanisms.selection.selector import RowSelector
from lightning_dpsparse.noise.keys import RunKey
from lightning_dpsparse.plan import examples_per_unit
from lightning_dpsparse.plugin.evidence import Evidence
from lightning_dpsparse.plugin.private_data import SampledData
from lightning_dpsparse.run_plan import RunPlan
from lightning_dpsparse.sharded.features import features_of, public_tables
from lightning_dpsparse.sharded.process_group import from_rank_zero, sum_over_ranks
from lightning_dpsparse.sharded.shared_rows import check_one_table_each, share_a_row

T = TypeVar("T")


class RunSelection:
    """The selection of rows in one run; it does nothing where the mechanism selects none."""

    def __init__(self, key: RunKey) -> None:
        self._key = key
        self._before: Mapping[str, Any] | None = None
        self._selector: RowSelector | None = None
        self.is_overdue = False
        """Whether rows must be selected before the first step, at a price of its own."""

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Remember the rows that an earlier run selected."""
        self._before = state

    def prepare(self, module: nn.Module, run: RunPlan, ledger: Ledger, evidence: Evidence) -> None:
        """Take over rows that were selected before, or charge a selection that is overdue."""
        selection = selection_of(run.plan.mechanism)
        if selection is None:
            share_a_row(module, None, None)
            return
        examples = examples_per_unit(run.plan)
        source = run.plan.make_source(self._key)
        if selection.maps_to_one_row:
            check_one_table_each(module)
        self._selector = RowSelector(
            selection, public_tables(module), source, examples, _RanksAndModule(module)
        )
        if isinstance(selection.frequencies, PublicFrequencies):
            self._selector.select_by_public_counts(selection.frequencies)
            evidence.declare_public(selection.frequencies.trusted)
            self._announce()
        elif self._before and self._before["of"] == repr(selection):
            self._selector.restore(self._before)
            self._announce()
        elif not run.selects_before(ledger.position):
            self.is_overdue = True
            _charge(run, ledger)

    def open(self, state: MechanismState) -> None:
        """The first step is about to be taken: the mechanism's state is told which rows to use."""
        if self._selector is not None:
            self._selector.open(state)

    def select(self, step: int, run: RunPlan, sampled: SampledData, strategy: Strategy) -> None:
        """Select rows by the data, which has been charged for.

        Where periods of the data count apart, the data of this step's period is counted.
        """
        assert self._selector is not None
        assert sampled.in_order is not None
        phase = run.phase(step) if run.is_release_renewed else None
        what = "Counting ids" if phase is None or phase.name is None else f"Counting {phase.name}"
        quiet = not strategy.is_global_zero
        batches = tqdm(sampled.in_order(phase), what, delay=1.0, leave=False, disable=quiet)
        features = map(features_of, batches)
        self._selector.select_by_data(features, strategy.root_device, release=step)
        self._announce()
        self.is_overdue = False

    def _announce(self) -> None:
        if self._selector is not None:
            rank_zero_info(self._selector.summary())

    def kept(self) -> dict[str, Any] | None:
        """The selected rows, for whoever goes on from this run; None if none were selected."""
        return None if self._selector is None else self._selector.state()


class _RanksAndModule:
    """The other ranks, and the module whose tables hear of the rows."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def from_rank_zero(self, make: Callable[[], T]) -> T:
        return from_rank_zero(make)

    def sum_over_ranks(self, tensor: Tensor) -> None:
        sum_over_ranks(tensor)

    def share_a_row(self, rows: Mapping[str, Tensor], row_for_others: int | None) -> None:
        share_a_row(self._module, rows, row_for_others)


def _charge(run: RunPlan, ledger: Ledger) -> None:
    """Charge one release more than the schedule has, if the target covers it."""
    assert run.release is not None
    ahead, target = ledger.copy(), run.plan.epsilon
    ahead.charge(run.release, steps=0)
    if target is not None and from_rank_zero(lambda: ahead.epsilon(run.delta)) > target:
        raise BudgetSpentError(
            f"Expected a selection of rows within epsilon={target:g}, found that the budget "
            "does not cover another one. Nothing was counted. Keep the earlier selection, or "
            "raise epsilon."
        )
    ledger.charge(run.release, steps=0)

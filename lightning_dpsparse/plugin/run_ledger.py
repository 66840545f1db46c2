"""What a private run has spent, and what it may still spend.

A run that goes on from a checkpoint, or from a module in memory, goes on with the ledger of the
runs before it. Other processes may have gone on from the same weights meanwhile, or may have been
killed: what they charged is in the journal on disk, which all runs of one line share. The budget
(`lightning_dpsparse.budget`) then charges every step before it is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_dpsparse.accounting.ledger import Journal, Ledger, read_ledger
from lightning_dpsparse.budget import Budget, forecast
from lightning_dpsparse.run_plan import RunPlan
from lightning_dpsparse.sharded.process_group import from_rank_zero


class RunLedger:
    """The ledger, the journal and the budget of one run.

    Args:
        folder: Where the journal of a new line of runs goes.
        taint: Is called with what the report should say.
    """

    def __init__(self, trainer: Trainer, folder: Path, taint: Callable[[str], None]) -> None:
        self._trainer, self._folder, self._taint = trainer, folder, taint
        self._ledger: Ledger | None = None
        self._budget: Budget | None = None
        self.ended_early = False
        """Whether the run ended before its schedule did, because the budget was spent."""

    # ---- before the first step ------------------------------------------------------------------

    @property
    def is_restored(self) -> bool:
        """Whether the run goes on with the ledger of an earlier one."""
        return self._ledger is not None

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Go on with the ledger that an earlier run kept: what was spent stays spent."""
        self._folder = Path(kept["journal"])  # one for all runs that go on from another
        self._ledger = self._with_journal(Ledger.from_data(kept["ledger"]))

    def _with_journal(self, ledger: Ledger) -> Ledger:
        """Add what was charged since, by whoever else went on from the same weights."""
        taken = ledger.position
        on_disk = from_rank_zero(lambda: read_ledger(self._folder / f"{ledger.run}.json"))
        if on_disk is None:
            self._taint(
                f"The journal of run {ledger.run} was not found: steps that a killed process took "
                "after the checkpoint are not counted."
            )
        elif on_disk.steps >= ledger.steps:
            ledger = on_disk
        ledger.lost = ledger.steps - taken
        return ledger

    def begin(self) -> Ledger:
        """The ledger that this run writes to: a restored one, or a new one."""
        if self._ledger is None:
            self._ledger = from_rank_zero(Ledger)
        return self._ledger

    def open(self, run: RunPlan) -> None:
        """Forecast what steps will cost, lock the journal, and be ready to charge."""
        ledger = self.begin()
        ahead = from_rank_zero(lambda: forecast(run, ledger))
        journal: Journal | None = None

        def open_journal() -> None:  # an error must reach all ranks
            nonlocal journal
            journal = Journal(self._folder, ledger.run)

        from_rank_zero(open_journal)
        self._budget = Budget(run, ledger, ahead, journal)

    # ---- from the first step on -----------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether steps have been charged, or can be."""
        return self._budget is not None

    @property
    def budget(self) -> Budget:
        """What counts the steps. It exists once the ledger has been opened."""
        assert self._budget is not None
        return self._budget

    def end_if_spent(self, steps_done: int) -> None:
        """Have the trainer end after so many steps, whatever min_epochs or callbacks say."""
        budget, run = self.budget, self.budget.run
        if budget.remaining != 0:
            return
        self._trainer.fit_loop.epoch_loop.max_steps = steps_done
        if run.planned_steps is not None and budget.step >= run.planned_steps:
            return
        self.ended_early = True
        rank_zero_info(
            f"Privacy budget spent: epsilon {run.plan.epsilon:g} at delta {run.delta:g} after "
            f"{budget.ledger.steps:,} steps. Training ends."
        )

    def kept(self) -> dict[str, Any]:
        """What the next run goes on with: plain Python values."""
        return {
            "ledger": self.budget.ledger.to_data(),
            "journal": str(self._folder.absolute()),
        }

    def close(self) -> None:
        """Have the journal say what was really taken, and let other runs go on."""
        if self._budget is not None:
            self._budget.close()

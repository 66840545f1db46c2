"""What a private run has spent, and what it may still spend.

A run that goes on from a checkpoint, or from a module in memory, goes on with the ledger of the
runs before it. Other processes may have gone on from the same weights meanwhile, or may have been
killed: what they charged is in the journal on disk, which all runs of one line share. Where the two
disagree, the larger counts (`accounting.journal`). The budget (`lightning_dpsparse.budget`) then
charges every step before it is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_dpsparse.accounting.journal import (
    Journal,
    JournalState,
    Position,
    find_journal,
    reconcile,
)
from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.budget import Budget, forecast
from lightning_dpsparse.plugin.evidence import Evidence
from lightning_dpsparse.plugin.launches import launch_name
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.run_plan import RunPlan
from lightning_dpsparse.sharded.process_group import from_rank_zero


@dataclass(frozen=True)
class EarlierRuns:
    """What the runs before this one have left: the line of runs that it goes on with."""

    folder: Path
    """Where their journal is."""
    ledger: Ledger
    journal: JournalState | None
    """What the journal said when it was read; None if it is gone."""
    position: Position | None = None
    """The position of the journal that the checkpoint knows; None without a checkpoint."""
    words: Sequence[str] = ()
    """What the report must say."""


def behind_checkpoint(kept: Mapping[str, Any], folders: Sequence[Path]) -> EarlierRuns:
    """The runs behind a checkpoint, or behind a module in memory, by what they kept.

    `folders` are where their journal may be if it is not where it was. On all ranks.
    """

    def read() -> EarlierRuns:
        try:
            mark, saved = kept["journal"], Ledger.from_data(kept["ledger"])
            folder, state = find_journal(mark, saved.run, folders)
            (ledger, words), position = reconcile(mark, state), Position.of(mark)
        except Refused:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
            raise Refused(
                "Expected the ledger of a run, and the position of its journal, in the checkpoint, "
                "found something else. Go on from a checkpoint that a private run has saved."
            ) from None
        ledger.lost = ledger.steps - saved.position
        return EarlierRuns(folder, ledger, state, position, words)

    return from_rank_zero(read)


def behind_journal(folder: Path, journal: JournalState) -> EarlierRuns:
    """Runs of which no checkpoint is left: the model begins anew, and what was charged stays."""
    journal.ledger.lost = journal.ledger.steps
    return EarlierRuns(folder, journal.ledger, journal)


class RunLedger:
    """The ledger, the journal and the budget of one run.

    Args:
        folder: Where the journal of a new line of runs goes.
        evidence: Is told what the report should say.
        write_ahead: Number of steps that the journal charges for in advance.
    """

    def __init__(
        self, trainer: Trainer, folder: Path, evidence: Evidence, write_ahead: int
    ) -> None:
        self._trainer, self._folder, self._evidence = trainer, folder, evidence
        self._write_ahead = write_ahead
        self._earlier: EarlierRuns | None = None
        self._ledger: Ledger | None = None
        self._budget: Budget | None = None
        self._journal: Journal | None = None
        self.ended_early = False
        """Whether the run ended before its schedule did, because the budget was spent."""

    # ---- before the first step ------------------------------------------------------------------

    @property
    def is_restored(self) -> bool:
        """Whether the run goes on with the ledger of an earlier one."""
        return self._ledger is not None

    def restore(self, earlier: EarlierRuns) -> None:
        """Go on with the ledger of earlier runs: what was spent stays spent."""
        # All runs that go on from one another share one journal, wherever that is now.
        self._earlier, self._ledger, self._folder = earlier, earlier.ledger, earlier.folder
        if earlier.journal is not None:
            self._evidence.restore(earlier.journal.notes)
        for word in earlier.words:
            self._evidence.taint(word)

    def begin(self) -> Ledger:
        """The ledger that this run writes to: a restored one, or a new one."""
        if self._ledger is None:
            self._ledger = from_rank_zero(Ledger)
        return self._ledger

    def open(self, run: RunPlan) -> None:
        """Forecast what steps will cost, lock the journal, and be ready to charge."""
        ledger = self.begin()
        found = None if self._earlier is None else self._earlier.journal
        if found is not None and found.may_lack_a_record:
            _charge_in_vain(run, ledger, self._write_ahead)
        ahead = from_rank_zero(lambda: forecast(run, ledger))

        def open_journal() -> None:  # an error must reach all ranks
            self._journal = self._open_journal(ledger.run)
            self._budget = Budget(run, ledger, ahead, self._journal, self._write_ahead)

        from_rank_zero(open_journal)
        if self._budget is None:  # on the other ranks
            self._budget = Budget(run, ledger, ahead, None, self._write_ahead)

    def _open_journal(self, run: str) -> Journal:
        """Lock the journal. It must say what it said when the run was restored."""
        journal = Journal(
            self._folder,
            run,
            after=None if self._earlier is None else self._earlier.position,
            launch=launch_name(),
            notes=self._evidence.kept,
        )
        found = None if self._earlier is None else self._earlier.journal
        if _position(journal.before) != _position(found):
            journal.close()
            raise Refused(
                f"Expected to be alone at run {run}, found that another process has gone on with "
                "it a moment ago. Start again: what it spent will be counted."
            )
        return journal

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
        """What the next run goes on with: plain Python values. Rank 0 knows the journal."""
        mark = None if self._journal is None else self._journal.mark()
        return {"ledger": self.budget.ledger.to_data(), "journal": mark}

    def note_checkpoint(self, path: Path) -> None:
        """A checkpoint has become whole: whoever restarts the run will find it. On rank 0."""
        assert self._journal is not None
        if self._journal.is_open:
            self._journal.note_checkpoint(path)
            return
        # The run has ended. Others may have gone on with it: what they charged stays as it is.
        journal = Journal(self._folder, self.budget.ledger.run, notes=self._evidence.kept)
        journal.note_checkpoint(path)
        journal.close()

    def close(self) -> None:
        """Have the journal say what was really taken, and let other runs go on."""
        if self._budget is not None:
            self._budget.close()


def _position(journal: JournalState | None) -> Position | None:
    return None if journal is None else journal.position


def _charge_in_vain(run: RunPlan, ledger: Ledger, steps: int) -> None:
    """Charge some steps that the model did not take, and that somebody may have."""
    before = ledger.steps
    run.charge(ledger, ledger.position, steps, to_end=True)
    ledger.lost += ledger.steps - before

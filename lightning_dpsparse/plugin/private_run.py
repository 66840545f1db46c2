"""A private run as the strategy sees it: its data, its ledger and budget, and its report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_dpsparse.accounting.calibration import delta_warning
from lightning_dpsparse.accounting.ledger import Journal, Ledger, read_ledger
from lightning_dpsparse.budget import Budget, BudgetSpentError, forecast
from lightning_dpsparse.engine.dense import DenseGaussian
from lightning_dpsparse.mechanisms.fest import selection_of
from lightning_dpsparse.mechanisms.selection import PublicFrequencies
from lightning_dpsparse.plan import PrivacyPlan, Users
from lightning_dpsparse.plugin import refusals
from lightning_dpsparse.plugin.datasets import digest, shares_examples
from lightning_dpsparse.plugin.deliveries import Deliveries, delivered
from lightning_dpsparse.plugin.evidence import Evidence
from lightning_dpsparse.plugin.lineage import History, keep_history
from lightning_dpsparse.plugin.logs import Logs
from lightning_dpsparse.plugin.perimeter import Perimeter
from lightning_dpsparse.plugin.private_data import RankContext, SampledData, noted, private_loader
from lightning_dpsparse.plugin.selecting import RowSelector
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.run_plan import RunPlan, resolve
from lightning_dpsparse.sharded.features import public_tables
from lightning_dpsparse.sharded.private import PrivateSteps, from_rank_zero
from lightning_dpsparse.sharded.shared_rows import share_a_row

CHECKPOINT_KEY = "lightning_dpsparse"
_SPENT = "_lightning_dpsparse_spent"  # ledger and journal of a module that was trained before


class PrivateRun:
    """Everything that must agree: who is drawn, what is charged, and what the step does."""

    def __init__(self, plan: PrivacyPlan, trainer: Trainer) -> None:
        self.plan, self._trainer = plan, trainer
        self._key = from_rank_zero(plan.make_key)
        self._is_watched = self._diagnose = False
        self.ended_early = False
        self.evidence = Evidence(trainer)
        self._ledger: Ledger | None = None
        self._shape: SampledData | None = None
        self._budget: Budget | None = None
        self._journal: Journal | None = None
        self._journal_folder = self.folder / "privacy"
        self._selected_before: dict[str, Any] | None = None
        self._selector: RowSelector | None = None
        self._is_selection_overdue = False
        self.stepper: PrivateSteps | None = None
        self.deliveries = Deliveries()
        self._perimeter: Perimeter | None = None
        self._logs: Logs | None = None

    @property
    def logs(self) -> Logs:
        assert self._logs is not None
        return self._logs

    @property
    def perimeter(self) -> Perimeter:
        assert self._perimeter is not None
        return self._perimeter

    # ---- before training ------------------------------------------------------------------------

    def loader(self, loader: object) -> object:
        """The user's training loader, over batches that the plan draws."""
        trainer = self._trainer
        place = RankContext(
            trainer.global_rank,
            trainer.world_size,
            self._key,
            lambda: self.budget.step,
            trainer.max_steps if trainer.max_steps > 0 else None,
            trainer.max_epochs == 1,
            self.deliveries,
        )
        loader, shape = private_loader(loader, self.plan, place)
        if self._shape is not None and self._shape.accounted != shape.accounted:
            raise Refused(
                "Expected one training loader, the same in every epoch, found another: the "
                "accounting was made for the first. Put the data into one data set."
            )
        self._shape = shape
        return loader

    def watched(self, loader: object) -> object:
        """The same loader, with everything that it delivers noted."""
        return delivered(noted(loader, self.plan, self.deliveries), self.deliveries)

    def restore(self, checkpoint: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: what its line of runs has spent stays spent."""
        data = checkpoint.get(CHECKPOINT_KEY)
        if data is None:
            self.evidence.declare_public(
                "The data behind the checkpoint that training began from, which has no ledger."
            )
            return
        ledger = Ledger.from_data(data["ledger"])
        self._journal_folder = Path(data["journal"])  # one for all runs that go on from another
        self._ledger = self._with_journal(ledger)
        self.evidence.restore(data)
        self._selected_before = data.get("selection")

    def _with_journal(self, ledger: Ledger) -> Ledger:
        """What was charged since by whoever else went on from these weights."""
        taken = ledger.position
        on_disk = from_rank_zero(lambda: read_ledger(self._journal_folder / f"{ledger.run}.json"))
        if on_disk is None:
            self.evidence.taint(
                f"The journal of run {ledger.run} was not found: steps that a killed process took "
                "after the checkpoint are not counted."
            )
        elif on_disk.steps >= ledger.steps:
            ledger = on_disk
        ledger.lost = ledger.steps - taken
        return ledger

    def start(self, module: LightningModule) -> None:
        """Charge-ready: noise calibrated, budget known, journal open."""
        refusals.check_one_loader(self._trainer)
        assert self._shape is not None
        ledger = self._ledger
        if ledger is None and hasattr(module, _SPENT):
            spent, self._journal_folder, selection, kept = getattr(module, _SPENT)
            ledger = self._with_journal(Ledger.from_data(spent))
            self._selected_before = selection
            self.evidence.restore(kept)
        if ledger is None:
            ledger = from_rank_zero(Ledger)
        planned = self._trainer.estimated_stepping_batches  # asks the ranks: on all of them
        shape = self._shape
        run = from_rank_zero(  # calibration takes seconds: once is enough
            lambda: resolve(
                self.plan,
                shape.phases,
                shape.num_units,
                shape.expected_batch,
                None if math.isinf(planned) else int(planned),
                shape.steps_per_pass,
                public_tables(module),
            )
        )
        self._logs = Logs(self._trainer)
        if shape.trusted is not None:
            self.evidence.declare_public(shape.trusted)
        warning = delta_warning(run.delta, run.num_units)
        if warning is not None:
            rank_zero_warn(warning)
        self.evidence.begin(module, digest(shape.dataset), ledger, self._logs)
        self._tell_of_changes(ledger, run)
        run.continue_ledger(ledger)
        self._prepare_selection(module, run, ledger)
        ahead = from_rank_zero(lambda: forecast(run, ledger))

        def open_journal() -> None:  # an error must reach all ranks
            self._journal = Journal(self._journal_folder, ledger.run)

        from_rank_zero(open_journal)
        self._budget = Budget(run, ledger, ahead, self._journal)
        if self._is_selection_overdue:
            self._select(self._budget.step)
        self._module = module
        perimeter = Perimeter(
            self.plan,
            module,
            self._trainer,
            self.deliveries,
            shape.reader,
            self._logs,
            self.evidence.taint,
        )
        self.stepper = PrivateSteps(
            module,
            run,
            self._key,
            diagnose=self._diagnose,
            probe=perimeter.probe if perimeter.probes else None,
        )
        if self._selector is not None:
            self._selector.open(self.stepper.state)
        perimeter.open(self.stepper)
        self._perimeter, self._rounding_price = perimeter, self.stepper.rounding_price
        if self._is_watched:
            self.stepper.watch_gradient_size(module, self._trainer.strategy.root_device)
        for fault in self.plan.faults():
            rank_zero_warn(fault)
        self._announce()

    def _prepare_selection(self, module: nn.Module, run: RunPlan, ledger: Ledger) -> None:
        """Rows that were selected before stay so; a selection that is overdue is charged."""
        selection = selection_of(self.plan.mechanism)
        if selection is None:
            share_a_row(module, None, None)
            return
        examples = self.plan.unit.max_examples if isinstance(self.plan.unit, Users) else 1
        source = self.plan.make_source(self._key)
        self._selector = RowSelector(selection, module, source, examples)
        if isinstance(selection.frequencies, PublicFrequencies):
            self._selector.select_by_public_counts(selection.frequencies)
            self.evidence.declare_public(selection.frequencies.trusted)
        elif self._selected_before and self._selected_before["of"] == repr(selection):
            self._selector.restore(self._selected_before)
        elif not run.selects_before(ledger.position):
            self._is_selection_overdue = True
            self._charge_selection(run, ledger)

    def _charge_selection(self, run: RunPlan, ledger: Ledger) -> None:
        """One release more than the schedule has, if the target covers it."""
        assert run.release is not None
        ahead, target = ledger.copy(), self.plan.epsilon
        ahead.charge(run.release, steps=0)
        if target is not None and from_rank_zero(lambda: ahead.epsilon(run.delta)) > target:
            raise BudgetSpentError(
                f"Expected a selection of rows within epsilon={target:g}, found that the budget "
                "does not cover another one. Nothing was counted. Keep the earlier selection, or "
                "raise epsilon."
            )
        ledger.charge(run.release, steps=0)

    def _select(self, step: int) -> None:
        """By the data, which has been charged: by this step's period where periods count apart."""
        assert self._selector is not None
        assert self._shape is not None
        run = self.budget.run
        phase = run.phase(step) if run.is_release_renewed else None
        strategy = self._trainer.strategy
        self._selector.select_from(
            self._shape,
            phase,
            strategy.root_device,
            release=step,
            quiet=not strategy.is_global_zero,
        )

    def _selection_state(self) -> dict[str, Any] | None:
        return None if self._selector is None else self._selector.state()

    def _tell_of_changes(self, ledger: Ledger, run: RunPlan) -> None:
        if not run.prices_like(ledger):
            rank_zero_warn(
                f"The run goes on with other noise, batches or data than before: {ledger.steps:,} "
                "steps stay charged as they were taken, new ones as they will be."
            )

    def _announce(self) -> None:
        run, budget = self.budget.run, self.budget
        if self.plan.faults():
            return
        spent = f", {budget.exact_epsilon():.4g} of it spent" if budget.ledger.entries else ""
        goal = (
            "no target"
            if self.plan.epsilon is None
            else f"target epsilon {self.plan.epsilon:g}{spent}, {budget.remaining:,} steps to go"
        )
        is_plain = isinstance(self.plan.dense, DenseGaussian)
        dense = "" if is_plain else f" and {type(self.plan.dense).__name__}"
        rank_zero_info(
            f"Privacy: {type(self.plan.mechanism).__name__}{dense}, noise multiplier "
            f"{run.noise_multiplier:.4f}, clip norm {self.plan.clip_norm:g}, delta {run.delta:g}; "
            f"{goal}."
        )

    def watch(self, *, diagnostics: bool) -> None:
        """Before `start`: count updated rows, and with `diagnostics` what is clipped and read."""
        self._is_watched, self._diagnose = True, diagnostics

    # ---- during training ------------------------------------------------------------------------

    @property
    def has_started(self) -> bool:
        return self._budget is not None

    @property
    def budget(self) -> Budget:
        assert self._budget is not None
        return self._budget

    def begin_step(self, batch: Any) -> None:
        """Charge the step, or refuse it; then ready the engine for it."""
        assert self._shape is not None
        delivery = self.perimeter.before_step(batch)
        step = self.budget.charge()
        if self.budget.run.selects_before(step):
            self._select(step)
        sampler = self._shape.sampler
        unit_sizes = None if sampler is None else sampler.draw(step)[1]
        self.perimeter.start_step(step, unit_sizes, delivery)

    def end_if_spent(self, steps_done: int) -> None:
        """Have the trainer end here, whatever min_epochs or callbacks say."""
        if self.budget.remaining != 0:
            return
        self._trainer.fit_loop.epoch_loop.max_steps = steps_done
        planned = self.budget.run.planned_steps
        if planned is not None and self.budget.step >= planned:
            return
        self.ended_early = True
        rank_zero_info(
            f"Privacy budget spent: epsilon {self.plan.epsilon:g} at delta "
            f"{self.budget.run.delta:g} after {self.budget.ledger.steps:,} steps. Training ends."
        )

    def before_evaluation(self) -> None:
        assert self._shape is not None
        loaders = self._trainer.val_dataloaders
        loaders = loaders if isinstance(loaders, (list, tuple)) else [loaders]
        training = self._shape.dataset
        if any(shares_examples(training, getattr(x, "dataset", None)) for x in loaders):
            self.logs.watch_validation()
        self.perimeter.guard.before_evaluation()

    def measurements(self) -> dict[str, float]:
        """Of the last step, for a logger: made of public settings."""
        assert self.stepper is not None
        return {
            "noise_multiplier": self.budget.run.noise_multiplier,
            "noise_stddev": self.stepper.noise_stddev,
        }

    def diagnostics(self) -> dict[str, float]:
        """Of the last step, where asked for: made of private data, without noise."""
        assert self.stepper is not None
        return {f"nonprivate/{name}": value for name, value in self.stepper.diagnostics().items()}

    def gradient_size(self) -> dict[str, float]:
        """Rows that were updated in the mean step since the last call. On all ranks."""
        assert self.stepper is not None
        return self.stepper.gradient_size()

    # ---- what is kept and shown -----------------------------------------------------------------

    def checkpoint(self) -> dict[str, Any]:
        """For every checkpoint: plain Python values, and no secret."""
        return {
            "ledger": self.budget.ledger.to_data(),
            "journal": str(self._journal_folder.absolute()),
            "selection": self._selection_state(),
            **self.evidence.kept(),
        }

    def history(self) -> History:
        """Of the weights as they are now."""
        return self.evidence.history(self.budget.ledger)

    def facts(self) -> dict[str, Any]:
        """The privacy report's facts, exact as of now."""
        return self.evidence.facts(self.budget, self._rounding_price)

    def _stay_with(self, module: LightningModule) -> None:
        """What was spent stays with the weights in memory too."""
        folder, selection = self._journal_folder, self._selection_state()
        spent = self.budget.ledger.to_data(), folder, selection, self.evidence.kept()
        object.__setattr__(module, _SPENT, spent)
        keep_history(module, self.history())

    def settle(self) -> None:
        """At rest: the journal says what was really taken."""
        if self._budget is not None:
            self._budget.settle()
            self._stay_with(self._module)

    def close(self) -> None:
        if self._budget is not None:
            self.settle()
            self._budget.close()
        if self._perimeter is not None:
            self._perimeter.close()
        if self._logs is not None:
            self._logs.close()
        if self.stepper is not None:
            self.stepper.close()
        self.stepper = None

    @property
    def folder(self) -> Path:
        """Where the run's evidence goes: beside its logs. Asks the ranks: call it on all."""
        return Path(self._trainer.log_dir or self._trainer.default_root_dir)

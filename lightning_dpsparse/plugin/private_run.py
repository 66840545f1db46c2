"""A private run: its data, its ledger, its mechanism's state and its evidence, joined.

A claim of privacy is true only if several things agree: who is drawn for a step, what is charged
for it, and what the step does. Each of them has a class of its own, and a `PrivateRun` brings them
together for one `fit`:

- `run_data.RunData`: the loader, and who is drawn.
- `run_ledger.RunLedger`: the ledger, the journal and the budget.
- `run_selection.RunSelection`: rows that are selected by the data.
- `run_calibration.RunCalibration`: the query after the last step, if the plan has one.
- `run_mechanism.RunMechanism`: what the mechanism keeps from one run to the next.
- `evidence.Evidence`: what the report says, and where the weights came from.

`PrivateRun.start` is called once, before the first step: there the plan meets its data. From then
on `private_training` takes the steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_dpsparse.accounting.calibration import delta_warning
from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.budget import Budget
from lightning_dpsparse.engine.dense import DenseGaussian
from lightning_dpsparse.plan import PrivacyPlan, Users
from lightning_dpsparse.plugin import refusals
from lightning_dpsparse.plugin.datasets import digest
from lightning_dpsparse.plugin.evidence import Evidence
from lightning_dpsparse.plugin.folders import journal_folder, make_report_folder
from lightning_dpsparse.plugin.history import keep_history, keep_spent, spent_by
from lightning_dpsparse.plugin.logs import Logs
from lightning_dpsparse.plugin.perimeter import Perimeter, is_probed
from lightning_dpsparse.plugin.run_calibration import RunCalibration
from lightning_dpsparse.plugin.run_data import RunData
from lightning_dpsparse.plugin.run_ledger import RunLedger, behind_checkpoint
from lightning_dpsparse.plugin.run_mechanism import RunMechanism
from lightning_dpsparse.plugin.run_selection import RunSelection
from lightning_dpsparse.prospects import noise_warning
from lightning_dpsparse.run_plan import RunPlan, drew_whole_users
from lightning_dpsparse.sharded.key_exchange import agree_on_key
from lightning_dpsparse.sharded.private import PrivateSteps
from lightning_dpsparse.sharded.process_group import from_rank_zero

CHECKPOINT_KEY = "lightning_dpsparse"
"""Where a checkpoint holds what its private run kept."""


class PrivateRun:
    """One `fit` with a privacy plan.

    Args:
        plan: The user's plan. The run forgets it once it has met its data: see `PrivateRun.plan`.
        write_ahead: Number of steps that the journal charges for in advance.
    """

    def __init__(self, plan: PrivacyPlan, trainer: Trainer, write_ahead: int) -> None:
        self._users_plan: PrivacyPlan | None = plan
        self._trainer = trainer
        self._key = agree_on_key(plan.make_key)
        self.logs = Logs(trainer)
        self.evidence = Evidence(trainer, self.logs)
        self.ledger = RunLedger(trainer, journal_folder(trainer), self.evidence, write_ahead)
        self.data = RunData(trainer, self._key, lambda: self.budget.step)
        self.selection = RunSelection(self._key)
        self.calibration = RunCalibration(self._key, self.evidence)
        self.mechanism = RunMechanism()
        self.stepper: PrivateSteps | None = None
        """Takes the steps; None before the run has started and after it was closed."""
        self.perimeter: Perimeter | None = None
        """Watches the steps; None before the run has started."""
        self._counts_rows = self._diagnoses = False
        self.folder: Path | None = None
        """The folder of the run's report, once the run has started."""

    @property
    def plan(self) -> PrivacyPlan:
        """The plan that the run goes by.

        Until the run has met its data this is the user's plan. From then on it is the one in the
        budget, in which thresholds are resolved.
        """
        return self.budget.run.plan if self._users_plan is None else self._users_plan

    @property
    def has_started(self) -> bool:
        """Whether the plan has met its data. It stays so after the run was closed."""
        return self.ledger.is_open

    @property
    def budget(self) -> Budget:
        """What the run has spent and may spend, and the plan that it goes by."""
        return self.ledger.budget

    # ---- before the first step ------------------------------------------------------------------

    def watch(self, *, diagnostics: bool) -> None:
        """Before `start`: count updated rows, and with `diagnostics` what is clipped and read."""
        self._counts_rows, self._diagnoses = True, diagnostics

    def restore(self, kept: Mapping[str, Any], near: Sequence[Path] = ()) -> None:
        """Go on from an earlier run: what it has spent stays spent.

        `kept` is what `checkpoint` gave, in a file or with a module in memory. `near` are folders
        that the run's journal may have been moved to.
        """
        folders = (journal_folder(self._trainer), *near)
        self.ledger.restore(behind_checkpoint(kept, folders))
        self.evidence.restore(kept)
        self.selection.restore(kept.get("selection"))
        self.calibration.restore(kept.get("calibration"))
        self.mechanism.restore(kept.get("mechanism"))

    def start(self, module: LightningModule) -> None:
        """Resolve the plan, open ledger and journal, and be ready for the first step."""
        refusals.check_one_loader(self._trainer)
        self._module = module
        spent = spent_by(module)
        if spent is not None and not self.ledger.is_restored:
            self.restore(spent)
        ledger = self.ledger.begin()
        self.folder = from_rank_zero(lambda: make_report_folder(self._trainer, ledger.run))
        run = self.data.resolve(self.plan, module)
        self.logs.open()
        sampled = self.data.sampled
        if sampled.trusted is not None:
            self.evidence.declare_public(sampled.trusted)
        for words in getattr(module, "declared_public", ()):
            self.evidence.declare_public(words)
        warning = delta_warning(run.delta, run.num_units)
        if warning is not None:
            rank_zero_warn(warning)
        self.evidence.begin(module, digest(sampled.dataset), ledger)
        _tell_of_changes(run, ledger)
        run.continue_ledger(ledger)
        self.calibration.prepare(module, run, sampled)
        self.selection.prepare(module, run, ledger, self.evidence)
        self.ledger.open(run)
        self._users_plan = None  # from here on there is one plan, in the budget
        if self.selection.is_overdue:
            self.selection.select(self.budget.step, run, sampled, self._trainer.strategy)
        self._open_steps(module, run)
        for fault in run.plan.faults():
            rank_zero_warn(fault)
        _announce(self.budget)
        _tell_what_batches_count(run)
        warning = None if run.plan.faults() else noise_warning(run)
        if warning is not None:
            rank_zero_warn(warning)

    def _open_steps(self, module: LightningModule, run: RunPlan) -> None:
        """Join the engine to the module, and the perimeter to both."""

        def probe() -> None:
            assert self.perimeter is not None
            self.perimeter.probe()

        self.stepper = PrivateSteps(
            module,
            run,
            self._key,
            diagnose=self._diagnoses,
            probe=probe if is_probed(run.plan) else None,
        )
        self.mechanism.open(run.plan.mechanism, self.stepper.state)
        self.selection.open(self.stepper.state)
        self.perimeter = Perimeter(
            run.plan,
            module,
            self._trainer,
            self.stepper,
            self.data,
            self.logs,
            self.evidence.taint,
        )
        self.evidence.rounding_price = self.stepper.rounding_price
        if self._counts_rows:
            self.stepper.measurements.watch_gradient_size(
                module, self._trainer.strategy.root_device
            )

    # ---- what is kept and shown -----------------------------------------------------------------

    def checkpoint(self) -> dict[str, Any]:
        """What the next run goes on from: plain Python values, and no secret."""
        return {
            **self.ledger.kept(),
            "mechanism": self.mechanism.kept(),
            "selection": self.selection.kept(),
            "calibration": self.calibration.kept(),
            **self.evidence.kept(),
        }

    def facts(self) -> dict[str, Any]:
        """The facts of the privacy report, exact as of now."""
        return self.evidence.facts(self.budget)

    def settle(self) -> None:
        """Training rests: the journal and the module remember what was really taken."""
        if self.has_started:
            if not self.budget.settle():
                rank_zero_warn(
                    "The journal could not be brought up to date: it charges for some steps that "
                    "were not taken. Nothing else is lost."
                )
            keep_spent(self._module, self.checkpoint())
            keep_history(self._module, self.evidence.history(self.budget.ledger))

    def close(self) -> None:
        """End the run: leave the trainer and the module as they were found."""
        self.settle()
        self.ledger.close()
        if self.perimeter is not None:
            self.perimeter.close()
        self.logs.close()
        if self.stepper is not None:
            self.stepper.close()
        self.stepper = None


def _tell_of_changes(run: RunPlan, ledger: Ledger) -> None:
    """Warn if the run goes on from an earlier one in another way.

    Whether users are drawn or their examples, the charges are for the same people: one user with at
    most k examples. So they may be added up, unlike charges for another unit.
    """
    if run.prices_like(ledger):
        return
    rank_zero_warn(
        f"The run goes on with other noise, batches or data than before: {ledger.steps:,} steps "
        "stay charged as they were taken, new ones as they will be."
    )
    unit, now = run.plan.unit, run.plan.draws_whole_users
    if isinstance(unit, Users) and drew_whole_users(ledger) is (not now):
        before, after = ("examples", "users") if now else ("users", "examples")
        rank_zero_warn(
            f"Steps so far drew {before}; from now on they draw {after}, and the batch size counts "
            f"{after}. Set drawn={before!r} to go on as before."
        )


def _announce(budget: Budget) -> None:
    """Say what the run will do, where it claims privacy."""
    run, plan = budget.run, budget.run.plan
    if plan.faults():
        return
    spent = f", {budget.exact_epsilon():.4g} of it spent" if budget.ledger.entries else ""
    goal = (
        "no target"
        if plan.epsilon is None
        else f"target epsilon {plan.epsilon:g}{spent}, {budget.remaining:,} steps to go"
    )
    is_plain = isinstance(plan.dense, DenseGaussian)
    dense = "" if is_plain else f" and {type(plan.dense).__name__}"
    scale = "" if plan.dense_scale == 1 else f", dense scale {plan.dense_scale:g}"
    rank_zero_info(
        f"Privacy: {type(plan.mechanism).__name__}{dense}, noise multiplier "
        f"{run.noise_multiplier:.4f}, clip norm {plan.clip_norm:g}{scale}, delta {run.delta:g}; "
        f"{goal}."
    )


def _tell_what_batches_count(run: RunPlan) -> None:
    """Say that the batch size counts users, where it does: a loader's usually counts examples.

    How many examples these users have is theirs to know: the cap is public.
    """
    unit = run.plan.unit
    if isinstance(unit, Users) and run.plan.draws_whole_users:
        most = run.expected_batch * unit.max_examples
        rank_zero_info(
            f"Users are drawn with all their examples: a batch has about {run.expected_batch:,.0f} "
            f"users with up to {unit.max_examples:,} examples each, that is up to about "
            f"{most:,.0f} examples. The batch size counts users; drawn='examples' would count "
            "examples."
        )

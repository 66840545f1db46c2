"""What a private run can say for itself, and what its report is made of.

An epsilon holds under conditions. The report lists what broke them as far as can be seen (taints),
what the epsilon does not cover (public data, other runs), and which data went into the weights
before. All of this is kept in every checkpoint and with the module in memory, so that a run that
goes on from them says it too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.budget import Budget
from lightning_dpsparse.plugin import lineage
from lightning_dpsparse.plugin.history import History, history_as_data, history_of
from lightning_dpsparse.plugin.logs import Logs
from lightning_dpsparse.report.facts import make_facts

_LIGHTNINGS_KEYS = {
    "epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "callbacks",
    "optimizer_states", "lr_schedulers", "MixedPrecision",
    "hparams_name", "hparams_type", "hyper_parameters",
    "datamodule_hparams_name", "datamodule_hparams_type", "datamodule_hyper_parameters",
    "current_model_state", "averaging_state",
}  # fmt: skip
"""What Lightning itself puts into a checkpoint."""


class Evidence:
    """The evidence of one run, and of all that its weights went through before."""

    def __init__(self, trainer: Trainer, logs: Logs) -> None:
        self._trainer, self._logs = trainer, logs
        self._taints: list[str] = []
        self._not_covered: list[str] = []
        self._faults: list[str] = []
        self._public: list[tuple[History, str]] = []
        self._history: History = ()
        self._data: str | None = None
        self._first_step = 0
        self.rounding_price = 0.0
        """The part of the clip norm that the step keeps for rounding."""
        self.averaged: str | None = None
        """Over what the weights are averaged; None if they are not."""
        self.calibrated_tasks = 1
        """Number of tasks of the model that a calibration counts each example in."""
        self._facts: tuple[Any, dict[str, Any]] | None = None

    # ---- before training ------------------------------------------------------------------------

    def declare_public(self, what: str) -> None:
        """The report says that this went into the model and is taken to be public."""
        if what not in self._not_covered:
            self._not_covered.append(what)

    def taint(self, what: str) -> None:
        """The report says that this happened, beside what the epsilon accounts for."""
        if what not in self._taints:
            self._taints.append(what)

    def take_as_public(self, history: History, name: str) -> None:
        """Training is about to begin with weights from this file, which have this history."""
        self._public.append((history, name))

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Repeat what a checkpoint, or the module in memory, says of earlier runs."""
        for what in kept.get("taints", ()):
            self.taint(what)
        for what in kept.get("not_covered", ()):
            self.declare_public(what)

    def begin(self, module: LightningModule, data: str | None, ledger: Ledger) -> None:
        """The first step is about to be taken, on this data set. `ledger` is what was spent."""
        self._data = data
        self._first_step = ledger.position
        for history, name in self._public:
            lineage.check_public(history, data, name)
        self._history = history_of(module)
        lineage.check_charged(self._history, data, ledger.run)
        steps = lineage.unprotected_steps(self._history, data)
        if steps:
            fault = lineage.unprotected_taint(steps)
            self._faults.append(fault)
            self.taint(fault)
            rank_zero_warn(fault)
        for what in lineage.not_covered(self._history, data, ledger.run):
            self.declare_public(what)

    def note_saved(self, checkpoint: Mapping[str, Any], weights: Collection[str]) -> None:
        """List what user code adds to a checkpoint: it is released, and may be anything."""
        found = [key for key in checkpoint if key not in _LIGHTNINGS_KEYS]
        for key in checkpoint["state_dict"]:
            if key not in weights or key.endswith("_extra_state"):
                found.append(key)
        callbacks = self._trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            is_known = type(callback).__module__.startswith(("lightning.", "lightning_dpsparse."))
            if not is_known and checkpoint.get("callbacks", {}).get(callback.state_key):
                found.append(type(callback).__name__)
        if found:
            self.taint(
                f"Saved in checkpoints by code other than this package's: {', '.join(found)}."
            )

    # ---- what is kept ---------------------------------------------------------------------------

    def history(self, ledger: Ledger) -> History:
        """The history of the weights as they are now."""
        taken = ledger.position - self._first_step
        return lineage.after_steps(self._history, self._data, taken, ledger)

    def kept(self) -> dict[str, Any]:
        """What goes into checkpoints: plain values, and no secret."""
        return {"taints": self.taints(), "not_covered": list(self._not_covered)}

    def taints(self) -> list[str]:
        """Ways in which private data got out or in beside the mechanism, as far as can be seen."""
        return list(dict.fromkeys([*self._taints, *self._logs.taints()]))

    def facts(self, budget: Budget) -> dict[str, Any]:
        """The facts of the privacy report, exact as of now. Slow, so made once for a step."""
        taints = self.taints()
        now = (budget.ledger.to_data(), taints)
        if self._facts is None or self._facts[0] != now:
            made = make_facts(
                budget.run,
                budget.ledger,
                self._trainer.world_size,
                taints=taints,
                not_covered=self._not_covered,
                faults=self._faults,
                history=history_as_data(self.history(budget.ledger)),
                rounding_price=self.rounding_price,
                averaged=self.averaged,
                calibrated_tasks=self.calibrated_tasks,
            )
            self._facts = now, made
        return self._facts[1]

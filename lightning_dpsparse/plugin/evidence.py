"""What a private run can say for itself: taints, what is not covered, and where its weights came
from. Goes into every checkpoint, stays with the module in memory, and makes the report."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.budget import Budget
from lightning_dpsparse.plugin import lineage
from lightning_dpsparse.plugin.lineage import History
from lightning_dpsparse.plugin.logs import Logs
from lightning_dpsparse.report.facts import make_facts

_LIGHTNINGS_KEYS = {
    "epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "callbacks",
    "optimizer_states", "lr_schedulers", "MixedPrecision",
    "hparams_name", "hparams_type", "hyper_parameters",
    "datamodule_hparams_name", "datamodule_hparams_type", "datamodule_hyper_parameters",
    "current_model_state", "averaging_state",
}  # fmt: skip


class Evidence:
    """Of one run, and of all that its weights went through before."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._taints: list[str] = []
        self._not_covered: list[str] = []
        self._faults: list[str] = []
        self._public: list[tuple[History, str]] = []
        self._history: History = ()
        self._data: str | None = None
        self._first_step = 0
        self._logs: Logs | None = None
        self._facts: tuple[Any, dict[str, Any]] | None = None

    # ---- before training ------------------------------------------------------------------------

    def declare_public(self, what: str) -> None:
        """Something that went into the model and is taken to be public: the report says so."""
        if what not in self._not_covered:
            self._not_covered.append(what)

    def taint(self, what: str) -> None:
        if what not in self._taints:
            self._taints.append(what)

    def take_as_public(self, history: History, name: str) -> None:
        """Weights from a file, which training is about to begin with."""
        self._public.append((history, name))

    def restore(self, kept: Mapping[str, Any]) -> None:
        """What a checkpoint or the module in memory says of earlier runs."""
        for what in kept["taints"]:
            self.taint(what)
        for what in kept["not_covered"]:
            self.declare_public(what)

    def begin(self, module: LightningModule, data: str | None, ledger: Ledger, logs: Logs) -> None:
        """The first step is about to be taken, on this data set. `ledger` is what was spent."""
        self._data, self._logs = data, logs
        self._first_step = ledger.position
        for history, name in self._public:
            lineage.check_public(history, data, name)
        self._history = lineage.history_of(module)
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
        """What user code adds to a checkpoint is released with it, and nobody knows what it is."""
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
        """Of the weights as they are now."""
        taken = ledger.position - self._first_step
        return lineage.after_steps(self._history, self._data, taken, ledger)

    def kept(self) -> dict[str, Any]:
        """Plain values, and no secret."""
        return {"taints": self.taints(), "not_covered": list(self._not_covered)}

    def taints(self) -> list[str]:
        """Ways in which private data got out or in beside the mechanism, as far as can be seen."""
        logged = self._logs.taints() if self._logs is not None else []
        return list(dict.fromkeys([*self._taints, *logged]))

    def facts(self, budget: Budget, rounding_price: float) -> dict[str, Any]:
        """The privacy report's facts, exact as of now. Slow, so made once for a step."""
        taints = self.taints()
        now = (budget.ledger.steps, taints)
        if self._facts is None or self._facts[0] != now:
            made = make_facts(
                budget.run,
                budget.ledger,
                self._trainer.world_size,
                taints=taints,
                not_covered=self._not_covered,
                faults=self._faults,
                history=lineage.to_data(self.history(budget.ledger)),
                rounding_price=rounding_price,
            )
            self._facts = now, made
        return self._facts[1]

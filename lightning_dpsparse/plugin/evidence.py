"""What a private run can say for itself: taints, what is not covered, and where its weights came
from. Goes into every checkpoint, stays with the module in memory, and makes the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.budget import Budget
from lightning_dpsparse.facts import make_facts
from lightning_dpsparse.plugin import lineage
from lightning_dpsparse.plugin.lineage import History
from lightning_dpsparse.plugin.logs import Logs


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

    def trust(self, what: str) -> None:
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
            self.trust(what)

    def begin(self, module: LightningModule, data: str | None, ledger: Ledger, logs: Logs) -> None:
        """The first step is about to be taken, on this data set. `ledger` is what was spent."""
        self._data, self._logs = data, logs
        self._first_step = ledger.steps - ledger.lost
        for history, name in self._public:
            lineage.check_public(history, data, name)
        self._history = lineage.history_of(module)
        steps = lineage.unprotected_steps(self._history, data)
        if steps:
            fault = lineage.unprotected_taint(steps)
            self._faults.append(fault)
            self.taint(fault)
            rank_zero_warn(fault)
        for what in lineage.not_covered(self._history, data, ledger.run):
            self.trust(what)

    # ---- what is kept ---------------------------------------------------------------------------

    def history(self, ledger: Ledger) -> History:
        """Of the weights as they are now."""
        taken = ledger.steps - ledger.lost - self._first_step
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

"""What the mechanism of a run keeps from step to step, and from one run to the next.

A mechanism opens a state object for every run (`engine.state.MechanismState`). What that state
says must be kept goes into checkpoints, and stays with the module in memory. The next run takes it
over if it trains with the same mechanism.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_dpsparse.engine.mechanism import Mechanism
from lightning_dpsparse.engine.state import MechanismState


class RunMechanism:
    """The mechanism's state in one run: restored before the first step, kept at any time after."""

    def __init__(self) -> None:
        self._before: Mapping[str, Any] | None = None
        self._name: str | None = None
        self._state: MechanismState | None = None

    def restore(self, kept: Mapping[str, Any] | None) -> None:
        """Remember what the mechanism of an earlier run kept."""
        self._before = kept

    def open(self, mechanism: Mechanism, state: MechanismState) -> None:
        """The first step is about to be taken: the state goes on from an earlier one, if it can."""
        self._name, self._state = type(mechanism).__name__, state
        if self._before is not None and self._before["of"] == self._name:
            state.restore(self._before["state"])

    def kept(self) -> Mapping[str, Any] | None:
        """What the state says must be kept, under the mechanism's name.

        It is the same after the run was closed: a checkpoint may be saved then, too.
        """
        if self._state is None:
            return self._before
        return {"of": self._name, "state": self._state.state()}

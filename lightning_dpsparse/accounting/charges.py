"""A charge: what some steps of a run cost, in events that an accountant can add up.

A mechanism prices steps (`Mechanism.charges` in `engine/mechanism.py`), a run adds what else it
releases (`RunPlan.charges` in `run_plan.py`), and the ledger keeps the sum (`ledger.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from dp_accounting.dp_event import DpEvent


@dataclass(frozen=True)
class Charge:
    """Some steps in a row, and the event that all of them together cost."""

    event: DpEvent
    steps: int
    """Number of steps that are paid for. Zero is a release that is no step of training."""
    times: int
    """How often these steps cost the event. Independent steps cost it once each; a pass in fixed
    order, or a run whose noise is correlated over steps, costs it once for all of them."""
    partition: str | None = None
    """Name of the part of the data that was used, if parts share no unit; None is all data."""

"""A mechanism goes on from what it kept, and from nothing that another mechanism kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from lightning_dpsparse import DPSGD, LazyDP
from lightning_dpsparse.engine.state import MechanismState
from lightning_dpsparse.plugin.run_mechanism import RunMechanism


class Counting(MechanismState):
    """Keeps a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    @override
    def state(self) -> dict[str, Any]:
        return {"number": self.number}

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        self.number = state["number"]


def test_the_next_run_of_the_same_mechanism_goes_on() -> None:
    first, second, fresh = RunMechanism(), RunMechanism(), Counting(0)
    first.open(DPSGD(), Counting(7))
    second.restore(first.kept())
    second.open(DPSGD(), fresh)
    assert fresh.number == 7


def test_another_mechanism_begins_anew() -> None:
    first, second, fresh = RunMechanism(), RunMechanism(), Counting(0)
    first.open(DPSGD(), Counting(7))
    second.restore(first.kept())
    second.open(LazyDP(), fresh)
    assert fresh.number == 0
    assert second.kept() == {"of": "LazyDP", "state": {"number": 0}}


def test_what_is_kept_is_the_last_state_and_not_the_one_before() -> None:
    run, state = RunMechanism(), Counting(0)
    run.restore({"of": "DPSGD", "state": {"number": 3}})
    assert run.kept() == {"of": "DPSGD", "state": {"number": 3}}  # nothing has been opened yet
    run.open(DPSGD(), state)
    state.number += 1
    assert run.kept() == {"of": "DPSGD", "state": {"number": 4}}

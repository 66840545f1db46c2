"""The ledger and its journal."""

from __future__ import annotations

import json

from lightning_dpsparse.accounting import events
from lightning_dpsparse.accounting.charges import Charge
from lightning_dpsparse.accounting.ledger import Ledger

ONE, TWO = events.poisson_gaussian(0.01, 1.0), events.poisson_gaussian(0.01, 2.0)


def test_like_steps_are_counted_together_and_others_apart() -> None:
    ledger = Ledger()
    for event in (ONE, ONE, TWO, ONE):
        ledger.charge(event)
    assert [(e.event, e.count) for e in ledger.entries] == [(ONE, 2), (TWO, 1), (ONE, 1)]
    assert ledger.steps == 4


def test_steps_add_up() -> None:
    ledger = Ledger()
    ledger.charge(ONE, steps=100, times=100)
    before = ledger.epsilon(1e-6)
    ledger.charge(TWO, steps=100, times=100)
    assert ledger.epsilon(1e-6) > before


def test_parts_of_the_data_that_share_no_unit_cost_the_largest() -> None:
    """And steps on all of the data are added to each."""
    ledger = Ledger()
    ledger.charge(ONE, "day 1", steps=100, times=100)
    day_one = ledger.epsilon(1e-6)
    ledger.charge(TWO, "day 2", steps=100, times=100)
    assert ledger.epsilon(1e-6) == day_one
    ledger.charge(TWO, steps=100, times=100)
    assert ledger.epsilon(1e-6) > day_one
    apart = [c for counts in ledger.events_by_part() for c in counts]
    assert apart == [(ONE, 100), (TWO, 100), (TWO, 100), (TWO, 100)]


def test_an_earlier_state() -> None:
    ledger = Ledger()
    ledger.charge(ONE, steps=10, times=10)
    ledger.charge(TWO, steps=5, times=5)
    assert [(e.event, e.count) for e in ledger.first(12).entries] == [(ONE, 10), (TWO, 2)]


def test_a_ledger_is_plain_data() -> None:
    ledger = Ledger()
    ledger.charge(ONE, "day 1", steps=3, times=2)
    ledger.lost = 1
    assert Ledger.from_data(json.loads(json.dumps(ledger.to_data()))) == ledger


def test_a_ledger_that_was_saved_without_steps_of_entries_is_read() -> None:
    ledger = Ledger()
    ledger.charge(ONE, "day 1", steps=30, times=30)
    ledger.charge(TWO, "day 2", steps=10, times=10)
    data = ledger.to_data()
    for entry in data["entries"]:
        del entry["steps"]
    assert Ledger.from_data(data) == ledger


def test_the_position_leaves_out_steps_that_were_lost() -> None:
    ledger = Ledger()
    ledger.charge(ONE, steps=10, times=10)
    ledger.lost = 4
    assert ledger.position == 6


def test_the_price_of_a_segment_is_replaced_and_what_was_before_it_stays() -> None:
    ledger = Ledger()
    ledger.charge(ONE, steps=3, times=3)
    ledger.open_segment(3)
    ledger.charge_segment([Charge(ONE, 2, 2)])
    assert [(e.event, e.count, e.steps) for e in ledger.entries] == [(ONE, 5, 5)]
    ledger.charge_segment([Charge(TWO, 4, 1)])
    assert [(e.event, e.count, e.steps) for e in ledger.entries] == [(ONE, 3, 3), (TWO, 1, 4)]
    assert ledger.steps == 7
    ledger.copy().charge_segment([])
    assert ledger.steps == 7

"""Runs on selected rows: what is counted, charged, kept, resumed and read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_dpsparse import (
    PublicFrequencies,
    Users,
)
from lightning_dpsparse.accounting import events
from lightning_dpsparse.accounting.calibration import epsilon_of
from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.plugin.private_run import CHECKPOINT_KEY
from lightning_dpsparse.refused import Refused
from tests.support.fest_runs import REPLAYED, Selecting, fest, plan, rows_in, select, selected_by
from tests.support.journals import charged_in
from tests.support.private_runs import BATCH, SIZE, Marked, ledger_of, strict_collate
from tests.support.ranks import Ranks
from tests.support.tiny_model import TABLES

RELEASE, STEP = events.gaussian(5.0), events.poisson_gaussian(BATCH / SIZE, 1.0)
PATH = "ebc.embedding_bags.{}.weight".format


def saved_rows(checkpoint: Path) -> dict[str, list[int]]:
    return rows_in(torch.load(checkpoint / "meta.pt", weights_only=True)[CHECKPOINT_KEY])


def charges(result: dict[str, Any]) -> list[tuple[Any, int, str | None]]:
    return [(e.event, e.count, e.partition) for e in ledger_of(result).entries]


# ---- charged -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finished:
    """A run of five steps, to go on from more than once."""

    result: dict[str, Any]
    checkpoint: Path
    journal: Path
    text: str

    def again(self) -> Path:
        """The checkpoint, with the journal as the run left it."""
        self.journal.write_text(self.text)
        return self.checkpoint


@pytest.fixture(scope="module")
def finished(one_rank: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("finished")
    result = one_rank.run(select, 1, plan(), folder, save_every=5, with_facts=True)[0]
    (journal,) = (folder / "privacy").glob("*.journal")
    return Finished(result, folder / "step=5.ckpt", journal, journal.read_text())


def test_a_selection_is_charged_once_beside_the_steps(finished: Finished) -> None:
    result = finished.result
    assert charges(result) == [(RELEASE, 1, None), (STEP, 5, None)]
    ledger = ledger_of(result)
    assert ledger.steps == 5
    expected = epsilon_of([(RELEASE, 1), (STEP, 5)], 1e-3)
    assert ledger.epsilon(1e-3) == expected
    assert result["facts"]["guarantee"]["epsilon"] == expected
    assert result["epsilons"][-1] >= expected - 1e-6  # what the progress bar shows is a bound
    json.dumps(result["facts"], allow_nan=False)
    assert all(len(rows) == 6 for rows in result["rows"][0].values())
    assert all(rows == result["rows"][0] for rows in result["rows"])  # the same for all steps


class Guarded(Marked):
    """Notes what the journal says when the data is counted: all examples at once."""

    def __init__(self, folder: Path, *, broken: bool = False) -> None:
        super().__init__()
        self.folder, self.broken = folder, broken
        self.journals: list[list[Any]] = []

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if len(indices) == SIZE:
            ledger = charged_in(self.folder / "privacy")
            self.journals.append([(e.event, e.partition) for e in ledger.entries])
            if self.broken:
                raise RuntimeError("the data is broken")
        return [self.examples[i] for i in indices]


def watch_journal(folder: Path) -> tuple[list[Any], int]:
    data = Guarded(folder)
    module = Selecting()
    select(1, plan(), folder, module=module, loader=over(data))
    return data.journals, len(module.drawn)


def over(data: Any, **settings: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=BATCH, collate_fn=strict_collate, **settings)


def test_the_journal_has_the_release_before_the_data_is_counted(
    one_rank: Ranks, tmp_path: Path
) -> None:
    journals, steps = one_rank.run(watch_journal, tmp_path)[0]
    assert steps == 5
    assert len(journals) == 1  # counted once
    assert journals[0][0] == (RELEASE, None)


def test_a_count_that_breaks_off_is_charged(one_rank: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the data is broken"):
        one_rank.run(select, 1, plan(), tmp_path, loader=over(Guarded(tmp_path, broken=True)))
    ledger = charged_in(tmp_path / "privacy")
    assert next((e.event, e.count) for e in ledger.entries) == (RELEASE, 1)


def test_public_counts_cost_nothing_and_are_named(one_rank: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "counts.npz"
    np.savez(path, **{name: np.arange(rows) % 7 for name, rows, _, _ in TABLES})
    public = plan(fest(PublicFrequencies(path=str(path))))
    result = one_rank.run(select, 1, public, tmp_path, with_facts=True, save_every=3)[0]
    assert charges(result) == [(STEP, 5, None)]
    named = [line for line in result["facts"]["not_covered"] if str(path) in line]
    assert len(named) == 1
    assert "taken to be public" in named[0]
    for name, rows, _, _ in TABLES:
        assert all(row % 7 >= 5 for row in result["rows"][0][PATH(name)]), rows
    resumed = one_rank.run(
        select, 1, public, tmp_path, resume=tmp_path / "step=3.ckpt", with_facts=True
    )[0]
    assert resumed["rows"][0] == result["rows"][0]
    named = [line for line in resumed["facts"]["not_covered"] if str(path) in line]
    assert len(named) == 1


# ---- gone on with --------------------------------------------------------------------------------


def test_a_resumed_run_keeps_its_rows_and_pays_no_second_time(
    one_rank: Ranks, tmp_path: Path, finished: Finished
) -> None:
    """The key is another one: rows that were selected anew would be others."""
    resumed = one_rank.run(select, 1, plan(), tmp_path, resume=finished.again(), max_epochs=2)[0]
    assert saved_rows(finished.checkpoint) == finished.result["rows"][0]
    assert len(resumed["rows"]) == 5
    assert all(rows == finished.result["rows"][0] for rows in resumed["rows"])
    assert charges(resumed) == [(RELEASE, 1, None), (STEP, 10, None)]


def test_another_number_of_rows_is_another_selection(
    one_rank: Ranks, tmp_path: Path, finished: Finished
) -> None:
    other = plan(fest(k=9))
    more = one_rank.run(select, 1, other, tmp_path, resume=finished.again(), max_epochs=2)[0]
    assert all(len(rows) == 9 for rows in more["rows"][0].values())
    assert charges(more) == [(RELEASE, 1, None), (STEP, 5, None)] * 2


def test_a_selection_that_the_target_does_not_cover_is_not_made(
    one_rank: Ranks, tmp_path: Path, finished: Finished
) -> None:
    """A spent run goes on with another k: neither steps nor counts may exceed the target."""
    target = epsilon_of([(RELEASE, 1), (STEP, 5)], 1e-3) + 0.01
    other, checkpoint = plan(fest(k=9), epsilon=target), finished.again()
    try:
        again = one_rank.run(select, 1, other, tmp_path, resume=checkpoint, max_epochs=2)[0]
    except Refused as refused:
        assert "budget" in str(refused)  # noqa: PT017
        return
    assert ledger_of(again).epsilon(1e-3) <= target


def fit_twice(folder: Path) -> tuple[list[dict[str, list[int]]], dict[str, Any]]:
    module = Selecting()
    select(1, plan(), folder, module=module)
    result = select(1, plan(), folder, module=module)
    return module.rows, result["ledger"]


def test_a_second_fit_goes_on_with_the_selection(one_rank: Ranks, tmp_path: Path) -> None:
    rows, ledger = one_rank.run(fit_twice, tmp_path)[0]
    assert len(rows) == 10
    assert all(one == rows[0] for one in rows)
    found = [(e.event, e.count) for e in Ledger.from_data(ledger).entries]
    assert found == [(RELEASE, 1), (STEP, 10)]


# ---- periods -------------------------------------------------------------------------------------

RENEWED = fest(renew=True)


def test_every_period_is_counted_and_charged_for_itself(one_rank: Ranks, tmp_path: Path) -> None:
    by_day = plan(RENEWED, by_day=True)
    result = one_rank.run(select, 1, by_day, tmp_path, max_steps=8)[0]
    day = events.poisson_gaussian(BATCH / 30, 1.0)
    assert charges(result) == [
        (RELEASE, 1, "day 1"),
        (day, 4, "day 1"),
        (RELEASE, 1, "day 2"),
        (day, 4, "day 2"),
    ]
    # An example is in one day's release and steps.
    assert ledger_of(result).epsilon(1e-3) == epsilon_of([(RELEASE, 1), (day, 4)], 1e-3)
    rows = result["rows"]
    assert rows[0] == rows[3] != rows[4] == rows[7]


def test_periods_add_up_where_users_live_in_several(one_rank: Ranks, tmp_path: Path) -> None:
    unit = Users(max_examples=3, drawn="users")
    by_day = plan(RENEWED, by_day=True, unit=unit, expected_batch_size=5)
    result = one_rank.run(select, 1, by_day, tmp_path, max_steps=4)[0]
    day = events.poisson_gaussian(0.5, 1.0)
    assert ledger_of(result).epsilon(1e-3) == pytest.approx(
        epsilon_of([(RELEASE, 2), (day, 4)], 1e-3), abs=2e-4
    )


def test_a_period_is_selected_by_the_sum_so_far(one_rank: Ranks, tmp_path: Path) -> None:
    replayed = plan(RENEWED, by_day=True, **REPLAYED)
    result = one_rank.run(select, 1, replayed, tmp_path, max_steps=8, save_every=2)[0]
    data = Marked().examples
    assert result["rows"][0] == selected_by(replayed, [(0, data[:30])])
    expected = selected_by(replayed, [(0, data[:30]), (4, data[30:])])
    assert result["rows"][4] == expected
    assert expected != selected_by(replayed, [(4, data[30:])])  # the sum matters
    resumed = one_rank.run(
        select, 1, replayed, tmp_path, resume=tmp_path / "step=2.ckpt", max_steps=8
    )[0]
    assert resumed["rows"][-1] == expected  # counts of the first period were kept


class FourDays(Marked):
    def __init__(self, starts: list[int]) -> None:
        super().__init__()
        self.day_starts = starts


@pytest.mark.parametrize(
    ("starts", "names", "sizes"),
    [
        ([0, 15, 30, 45], ["days 1 to 2", "days 3 to 4"], (30, 30)),
        ([0, 15, 40], ["days 1 to 2", "day 3"], (40, 20)),
    ],
)
def test_days_can_be_taken_together(
    one_rank: Ranks, tmp_path: Path, starts: list[int], names: list[str], sizes: tuple[int, int]
) -> None:
    merged = plan(RENEWED, by_day=True, days_per_period=2)
    result = one_rank.run(select, 1, merged, tmp_path, max_steps=6, loader=over(FourDays(starts)))[
        0
    ]
    steps = [round(6 * size / SIZE) for size in sizes]
    assert [(count, name) for _, count, name in charges(result)] == [
        (1, names[0]),
        (steps[0], names[0]),
        (1, names[1]),
        (steps[1], names[1]),
    ]
    assert all(max(drawn, default=0) < sizes[0] for drawn in result["drawn"][: steps[0]])
    assert all(min(drawn, default=SIZE) >= sizes[0] for drawn in result["drawn"][steps[0] :])

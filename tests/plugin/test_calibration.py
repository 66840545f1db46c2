"""Runs that calibrate: what is counted, and where the line goes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dpsparse import AverageWeights, LazyDP, Users
from lightning_dpsparse.plugin.batch_order import EveryExample
from lightning_dpsparse.sampling.units import AllExamples, CappedExamples, WholeUsers
from tests.support.calibration_runs import (
    BEFORE,
    REPLAYED,
    SIZE,
    Clicked,
    Clicking,
    calibrated,
    line_for,
    plan,
)
from tests.support.ranks import Ranks

PLANS = {
    "examples": {},
    "users": {"unit": Users(max_examples=3, drawn="users")},
    "examples of users": {"unit": Users(max_examples=3, drawn="examples")},
    "in order": {"sampling": "fixed_order"},
    "lazy": {"mechanism": LazyDP()},
    "days": {"by_day": True},
}


@pytest.mark.parametrize("name", PLANS)
def test_one_rank_writes_the_line_of_all_its_data(
    one_rank: Ranks, tmp_path: Path, name: str
) -> None:
    _check_line(one_rank, tmp_path, PLANS[name], None)


def test_data_in_many_batches_is_counted_once(one_rank: Ranks, tmp_path: Path) -> None:
    """Of 64, the last of which has 56 examples."""
    _check_line(one_rank, tmp_path, {}, 64)


@pytest.mark.parametrize("name", ["examples", "lazy"])
def test_where_weights_are_averaged_the_average_is_calibrated(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path, name: str
) -> None:
    """All but the last step count, in the last place where somebody may look at the average."""
    for ranks in (one_rank, two_ranks):
        _check_line(ranks, tmp_path, PLANS[name], None, callbacks=[AverageWeights(fraction=0.8)])


def test_training_goes_on_from_weights_that_are_not_calibrated(
    one_rank: Ranks, tmp_path: Path
) -> None:
    """Where weights are averaged, the query reads and writes the average alone."""
    settings: dict[str, Any] = {"save_every": 5, "callbacks": [AverageWeights(fraction=0.8)]}
    begun, ended = [], []
    for name, one in (("without", BEFORE), ("with", plan(**REPLAYED))):
        found = one_rank.run(calibrated, 1, one, tmp_path / name, **settings)[0]
        ended.append(found["state"]["dense"]["head.out.weight"])
        more = {"resume": tmp_path / name / "step=5.ckpt", "max_epochs": 2, "module": Begins()}
        found = one_rank.run(calibrated, 1, one, tmp_path / name, **settings | more)[0]
        begun.append(found["validated"][0])
    assert not torch.equal(*ended)
    assert torch.equal(*begun)


class Begins(Clicking):
    """Notes its weights when training begins."""

    def on_train_start(self) -> None:
        self.validated.append(self.head.out.weight.detach().clone())


@pytest.mark.parametrize(
    ("name", "parts"), [("examples", 96), ("examples of users", None), ("users", None)]
)
def test_two_ranks_write_the_line_of_all_their_data(
    two_ranks: Ranks, tmp_path: Path, name: str, parts: int | None
) -> None:
    _check_line(two_ranks, tmp_path, PLANS[name], parts)


def _check_line(
    ranks: Ranks, folder: Path, changes: Any, parts: int | None, **settings: Any
) -> None:
    world = ranks.world_size
    more = settings | ({} if parts is None else {"max_physical_batch": parts})
    users = isinstance(changes.get("unit"), Users)
    before_plan, after_plan = replace(BEFORE, **changes), plan(**REPLAYED, **changes)
    befores = ranks.run(calibrated, world, before_plan, folder, **more)
    afters = ranks.run(calibrated, world, after_plan, folder, **more)
    before, after = befores[0], afters[0]
    assert before["found"] is None
    expected = line_for(before["logits"], after_plan, after["steps"], 3 if users else 1)
    assert 1.02 < expected.slope < 1.5
    assert -1.5 < expected.bias < -0.5
    found = after["found"]
    assert found["slope"] == pytest.approx(expected.slope, rel=1e-9)
    assert found["bias"] == pytest.approx(expected.bias, rel=1e-9)
    old, new = before["state"]["dense"], after["state"]["dense"]
    weight, bias = old.pop("head.out.weight"), old.pop("head.out.bias")
    torch.testing.assert_close(new.pop("head.out.weight"), weight * expected.slope)
    torch.testing.assert_close(new.pop("head.out.bias"), bias * expected.slope + expected.bias)
    assert all(torch.equal(old[name], new[name]) for name in old)  # nothing else moved
    for mine, theirs in zip(before["state"]["pieces"], after["state"]["pieces"]):
        assert torch.equal(mine[3], theirs[3])
    labels = torch.cat([label for _, _, label in Clicked().examples])
    assert torch.sigmoid(before["logits"]).sum() / labels.sum() > 1.2
    assert torch.sigmoid(after["logits"]).sum() / labels.sum() == pytest.approx(1.0, abs=0.05)
    for other in afters[1:]:
        assert other["found"] == found
        assert all(
            torch.equal(value, afters[0]["state"]["dense"][name])
            for name, value in other["state"]["dense"].items()
            if name in afters[0]["state"]["dense"]
        )


def test_another_key_finds_another_line(one_rank: Ranks, tmp_path: Path) -> None:
    """Steps move next to nothing: the counts are the same, and are never seen without noise."""
    found = [
        one_rank.run(calibrated, 1, plan(fixed_key=key, clip_norm=1e-12), tmp_path)[0]["found"]
        for key in (4, 5)
    ]
    assert found[0]["slope"] != found[1]["slope"]
    assert found[0]["bias"] != found[1]["bias"]


class Odd(Clicked):
    """One example more for the second rank, which has one batch more for it."""

    def __init__(self) -> None:
        super().__init__(SIZE + 1)


def test_ranks_with_unequal_shares_read_together(two_ranks: Ranks, tmp_path: Path) -> None:
    more: dict[str, Any] = {"data": Odd, "max_physical_batch": SIZE // 2}
    before = two_ranks.run(calibrated, 2, BEFORE, tmp_path, **more)[0]
    after = two_ranks.run(calibrated, 2, plan(**REPLAYED), tmp_path, **more)
    step = after[0]["steps"]
    expected = line_for(before["logits"], plan(**REPLAYED), step, data=Odd())
    for result in after:
        assert result["found"]["slope"] == pytest.approx(expected.slope, rel=1e-9)
        assert result["found"]["bias"] == pytest.approx(expected.bias, rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.integers(1, 9), st.integers(1, 4))
def test_every_example_comes_once_in_batches_of_one_size(
    users: list[int], size: int, world: int
) -> None:
    cap = 3
    kept = sorted(i for i, user in enumerate(users) if users[:i].count(user) < cap)
    for units in (AllExamples(len(users)), CappedExamples(users, cap), WholeUsers(users, cap)):
        shares = [EveryExample(units, size, rank, world) for rank in range(world)]
        most = max(share.num_batches for share in shares)
        seen: list[int] = []
        for share in shares:
            share.num_batches = most
            batches = list(share)
            assert len(batches) == len(share) == most
            given_ = [i for batch in batches for i in batch][: share.num_examples]
            whole = share.num_examples // size
            assert all(len(batch) == size for batch in batches[:whole])
            seen += given_
        assert sorted(seen) == (list(range(len(users))) if units.count == len(users) else kept)

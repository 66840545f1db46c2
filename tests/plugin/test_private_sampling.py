"""Who is in the batches of a private run, and which loaders are refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset

from lightning_dpsparse import PrivacyPlan, Users
from tests.support.private_runs import (
    NOISY,
    REPLAYED,
    SIZE,
    Marked,
    Watching,
    fit,
    ledger_of,
    marked_loader,
)
from tests.support.ranks import Ranks
from tests.support.tiny_model import Bags, collate


def test_batches_are_poisson_samples_of_all_examples(two_ranks: Ranks, tmp_path: Path) -> None:
    """Ranks hold fixed halves; sizes vary; nobody twice in a batch; nobody at all is fine too."""
    results = two_ranks.run(
        fit, 2, PrivacyPlan(noise_multiplier=1.0, delta=1e-3, expected_batch_size=3), tmp_path
    )
    first, second = (result["drawn"] for result in results)
    assert len(first) == len(second) == 20  # 60 / 3
    for mine, theirs in zip(first, second):
        assert len({*mine, *theirs}) == len(mine) + len(theirs)
        assert max(mine, default=0) < 30 <= min(theirs, default=30)
    sizes = [len(mine) + len(theirs) for mine, theirs in zip(first, second)]
    assert len(set(sizes)) > 2
    assert any(not mine for mine in first)


def test_the_users_seed_has_no_say(one_rank: Ranks, tmp_path: Path) -> None:
    first, second = (one_rank.run(seeded, tmp_path)[0] for _ in range(2))
    assert first != second


def seeded(folder: Path) -> list[list[int]]:
    pl.seed_everything(1, verbose=False)
    drawn: list[list[int]] = fit(1, NOISY, folder)["drawn"]
    os.environ.pop("PL_GLOBAL_SEED")  # the rank lives on
    return drawn


def test_whole_users_are_drawn_together(two_ranks: Ranks, tmp_path: Path) -> None:
    plan = PrivacyPlan(
        noise_multiplier=1.0,
        delta=1e-3,
        unit=Users(max_examples=2, drawn="users"),
        expected_batch_size=5,
    )
    results = two_ranks.run(fit, 2, plan, tmp_path, with_facts=True)
    drawn = [step for result in results for step in result["drawn"] if step]
    for step in drawn:
        users = [i // 3 for i in step]
        assert all(users.count(user) == 2 for user in users)  # two of three are kept
        assert all(i % 3 < 2 for i in step)
    for result in results:  # and the step is told whose they are
        users = [[2] * (len(step) // 2) for step in result["drawn"]]
        assert result["unit_sizes"] == users
    assert len(results[0]["drawn"]) == 4  # 20 users, five a step
    facts = results[0]["facts"]
    assert facts["guarantee"]["unit"] == "user"
    assert facts["ran"]["num_units"] == 20
    assert facts["ran"]["sampling_rate"] == 0.25


def test_examples_of_capped_users(one_rank: Ranks, tmp_path: Path) -> None:
    unit = Users(max_examples=2, drawn="examples")
    plan = PrivacyPlan(noise_multiplier=1.0, delta=1e-3, unit=unit)
    result = one_rank.run(fit, 1, plan, tmp_path, with_facts=True)[0]
    assert all(i % 3 < 2 for step in result["drawn"] for i in step)
    assert "up to 2 of them of one user" in result["facts"]["ledger"][0]["event"]


def test_days_one_after_the_other(one_rank: Ranks, tmp_path: Path) -> None:
    plan = PrivacyPlan(noise_multiplier=1.0, delta=1e-3, by_day=True)
    result = one_rank.run(fit, 1, plan, tmp_path, with_facts=True, max_steps=8)[0]
    days = [{i // 30 for i in step} for step in result["drawn"]]
    assert all(day <= {0} for day in days[:4])
    assert all(day <= {1} for day in days[4:])
    assert len(days) == 8
    parts = [(entry["partition"], entry["steps"]) for entry in result["facts"]["ledger"]]
    assert parts == [("day 1", 4), ("day 2", 4)]


def test_fixed_order_is_charged_by_the_pass(two_ranks: Ranks, tmp_path: Path) -> None:
    plan = PrivacyPlan(noise_multiplier=1.0, delta=1e-3, sampling="fixed_order")
    results = two_ranks.run(fit, 2, plan, tmp_path, loader=marked_loader(2, shuffle=False))
    seen = sorted(i for result in results for step in result["drawn"] for i in step)
    assert seen == list(range(SIZE))
    (entry,) = ledger_of(results[0]).entries
    assert entry.count == 1
    assert ledger_of(results[0]).steps == 5


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Marked().examples)


def weighted() -> DataLoader[Any]:
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * SIZE, SIZE)
    return marked_loader(1, sampler=sampler, shuffle=None)


def test_days_take_one_epoch(one_rank: Ranks, tmp_path: Path) -> None:
    plan = PrivacyPlan(noise_multiplier=1.0, delta=1e-3, by_day=True)
    with pytest.raises(ValueError, match="Expected max_epochs=1 or max_steps with by_day"):
        one_rank.run(fit, 1, plan, tmp_path, max_epochs=2)


FIXED = PrivacyPlan(noise_multiplier=1.0, delta=1e-3, sampling="fixed_order")
BY_USER = PrivacyPlan(noise_multiplier=1.0, delta=1e-3, unit=Users(max_examples=1))


@pytest.mark.parametrize(
    ("plan", "loader", "message"),
    [
        (FIXED, weighted(), "for sampling='fixed_order', found one with a WeightedRandomSampler"),
        (NOISY, weighted(), "found one with a WeightedRandomSampler"),
        (
            NOISY,
            DataLoader(Stream(), batch_size=4, collate_fn=collate),
            "Expected a DataLoader over a map-style data set for sampling='poisson', found Stream",
        ),
        (
            BY_USER,
            DataLoader(Bags(9), batch_size=3, collate_fn=collate),
            "Expected Bags.users, which says whose each example is",
        ),
    ],
)
def test_loaders_that_the_accounting_does_not_fit_are_refused(
    one_rank: Ranks, tmp_path: Path, plan: PrivacyPlan, loader: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        one_rank.run(fit, 1, plan, tmp_path, loader=loader)


class Scheduled(Watching):
    """Asks in configure_optimizers how long training is: that loads the data early."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches == 5
        return super().configure_optimizers()


def test_data_that_is_loaded_early_is_drawn_by_the_plan_too(
    one_rank: Ranks, tmp_path: Path
) -> None:
    result = one_rank.run(fit, 1, REPLAYED, tmp_path, module=Scheduled())[0]
    plain = one_rank.run(fit, 1, REPLAYED, tmp_path)[0]
    assert result["drawn"] == plain["drawn"]
    assert len({len(step) for step in result["drawn"]}) > 1


def fit_two_loaders(folder: Path, second: int) -> None:
    loaders = [marked_loader(1), DataLoader(Bags(second), batch_size=3, collate_fn=collate)]
    fit(1, NOISY, folder, loader=loaders)


def test_one_loader_is_accounted_for(one_rank: Ranks, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Expected one training loader, the same in every epoch"):
        one_rank.run(fit_two_loaders, tmp_path, 9)


def part_of_them(folder: Path, kind: str) -> dict[str, Any]:
    """A run on parts of the data: every other example, or two halves one after the other."""
    data = Marked()
    halves = [Subset(data, range(0, SIZE, 2)), Subset(data, range(1, SIZE, 2))]
    dataset = halves[0] if kind == "subset" else ConcatDataset(halves)
    plan = PrivacyPlan(
        noise_multiplier=1.0, delta=1e-3, unit=Users(max_examples=2), expected_batch_size=5
    )
    loader = DataLoader(dataset, batch_size=5, collate_fn=collate)
    return fit(1, plan, folder, loader=loader, with_facts=True)


@pytest.mark.parametrize(("kind", "most_of_a_user"), [("subset", {1, 2}), ("concat", {2})])
def test_parts_of_a_data_set_know_its_users(
    one_rank: Ranks, tmp_path: Path, kind: str, most_of_a_user: set[int]
) -> None:
    (found,) = one_rank.run(part_of_them, tmp_path, kind)
    assert found["facts"]["ran"]["num_units"] == 20
    for step in found["drawn"]:
        users = [i // 3 for i in step]
        assert {users.count(user) for user in users} <= most_of_a_user
    if kind == "subset":
        assert all(i % 2 == 0 for step in found["drawn"] for i in step)


class Named(Bags):
    users: Any = None


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ([1, 2, 3], ["a", "b", "c"], "users of one kind in all parts of a ConcatDataset"),
        ([1, 2, 3], None, "Expected ConcatDataset.users, which says whose each example is"),
    ],
)
def test_parts_whose_users_do_not_go_together_are_refused(
    one_rank: Ranks, tmp_path: Path, first: Any, second: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        one_rank.run(of_two_parts, tmp_path, first, second)


def of_two_parts(folder: Path, first: Any, second: Any) -> None:
    parts = [Named(3), Named(3)]
    parts[0].users, parts[1].users = first, second
    loader = DataLoader(ConcatDataset(parts), batch_size=1, collate_fn=collate)
    fit(1, BY_USER, folder, loader=loader)

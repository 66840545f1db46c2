"""Private runs that go on: after a checkpoint, a kill, or with another plan."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from dp_accounting.pld import PLDAccountant

from lightning_dpsparse import PrivacyPlan, Users
from lightning_dpsparse.accounting.events import poisson_examples_of_user, poisson_gaussian
from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.budget import WRITE_AHEAD
from tests.support.private_runs import (
    NOISY,
    REPLAYED,
    TARGET,
    Watching,
    fit,
    ledger_of,
    saved_ledger,
)
from tests.support.ranks import Ranks
from tests.support.tiny_model import assemble


def test_a_spent_run_takes_no_further_step(one_rank: Ranks, tmp_path: Path) -> None:
    one_rank.run(fit, 1, TARGET, tmp_path, max_epochs=2, save_every=10)
    again = one_rank.run(fit, 1, TARGET, tmp_path, max_epochs=2, resume=tmp_path / "step=10.ckpt")[
        0
    ]
    assert again["drawn"] == []


def test_a_resumed_run_spends_on(one_rank: Ranks, tmp_path: Path) -> None:
    """Fresh coins, the same noise level, one ledger."""
    plan = PrivacyPlan(epsilon=3.0, delta=1e-3)
    whole = one_rank.run(fit, 1, plan, tmp_path, save_every=4, max_epochs=2)[0]
    resumed = one_rank.run(
        fit, 1, plan, tmp_path / "more", resume=tmp_path / "step=4.ckpt", max_epochs=2
    )[0]
    ledger = ledger_of(resumed)
    assert ledger.run == ledger_of(whole).run
    # The first run went on to step 10: those six steps are spent, and nothing is left.
    assert (ledger.steps, ledger.lost) == (10, 6)
    assert resumed["drawn"] == []
    assert ledger.epsilon(1e-3) == ledger_of(whole).epsilon(1e-3)


def test_a_resumed_run_draws_fresh_coins(one_rank: Ranks, tmp_path: Path) -> None:
    whole = one_rank.run(fit, 1, NOISY, tmp_path, save_every=4, max_epochs=2)[0]
    resumed = one_rank.run(
        fit, 1, NOISY, tmp_path / "more", resume=tmp_path / "step=4.ckpt", max_epochs=2
    )[0]
    assert len(resumed["drawn"]) == 6
    assert resumed["drawn"] != whole["drawn"][4:]
    ledger = ledger_of(resumed)
    assert (ledger.steps, ledger.lost) == (16, 6)
    assert ledger.epsilon(1e-3) > ledger_of(whole).epsilon(1e-3)


@pytest.mark.parametrize("world", [1, 2])
def test_with_a_fixed_key_resumed_is_uninterrupted(
    world: int, one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    """A step draws the same batch and the same noise again: bit for bit, and called not private."""
    ranks = one_rank if world == 1 else two_ranks
    whole = ranks.run(fit, world, REPLAYED, tmp_path, with_facts=True, save_every=3, max_epochs=2)
    resumed = ranks.run(
        fit, world, REPLAYED, tmp_path, resume=tmp_path / "step=3.ckpt", max_epochs=2
    )
    assert resumed[0]["drawn"] == whole[0]["drawn"][3:]
    expected, found = (assemble([r["state"] for r in results]) for results in (whole, resumed))
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert whole[0]["facts"]["guarantee"]["epsilon"] is None
    assert whole[0]["facts"]["guarantee"]["faults"] == ["Fixed noise key: not private."]


def test_steps_of_a_killed_run_stay_charged(tmp_path: Path) -> None:
    world = 2
    ranks = Ranks(world)
    try:
        with pytest.raises(RuntimeError, match=r"rank"):
            ranks.run(
                fit, world, NOISY, tmp_path, save_every=5, max_epochs=10, module=Watching(die_at=23)
            )
        checkpoint = tmp_path / "step=20.ckpt"
        before = saved_ledger(checkpoint)
        assert before.steps == 20
        result = ranks.run(
            fit, world, NOISY, tmp_path, resume=checkpoint, max_steps=22, max_epochs=10
        )[0]
    finally:
        ranks.stop()
    ledger = ledger_of(result)
    assert ledger.run == before.run
    assert len(result["drawn"]) == 2
    # Steps 20 to 23 had begun; the journal was at most 16 ahead.
    assert 4 <= ledger.lost <= 4 + 16
    assert ledger.steps == 22 + ledger.lost
    assert ledger.epsilon(1e-3) > before.epsilon(1e-3)


def test_a_lost_journal_is_a_taint(one_rank: Ranks, tmp_path: Path) -> None:
    one_rank.run(fit, 1, NOISY, tmp_path, save_every=4)
    for path in (tmp_path / "privacy").iterdir():
        path.unlink()
    result = one_rank.run(
        fit, 1, NOISY, tmp_path, resume=tmp_path / "step=4.ckpt", with_facts=True
    )[0]
    assert any("journal" in taint for taint in result["facts"]["taints"])
    # When the checkpoint was saved, the journal charged for 16 steps. Then came one more.
    assert ledger_of(result).steps == WRITE_AHEAD + 1


def test_a_private_run_cannot_go_on_without_a_plan(one_rank: Ranks, tmp_path: Path) -> None:
    one_rank.run(fit, 1, NOISY, tmp_path, save_every=4)
    with pytest.raises(ValueError, match="Expected a privacy plan to go on with a private run"):
        one_rank.run(fit, 1, None, tmp_path, resume=tmp_path / "step=4.ckpt", max_epochs=2)


def test_other_noise_is_charged_as_it_is(one_rank: Ranks, tmp_path: Path) -> None:
    one_rank.run(fit, 1, NOISY, tmp_path, save_every=5)
    less = PrivacyPlan(noise_multiplier=0.7, delta=1e-3)
    checkpoint = tmp_path / "step=5.ckpt"
    result = one_rank.run(
        warned, less, tmp_path, checkpoint, "goes on with other noise, batches or data"
    )[0]
    assert [entry.count for entry in ledger_of(result).entries] == [5, 5]


def warned(
    plan: PrivacyPlan, folder: Path, resume: Path, message: str, **trainer: Any
) -> dict[str, Any]:
    with pytest.warns(UserWarning, match=message):
        return fit(1, plan, folder, resume=resume, **(trainer or {"max_epochs": 2}))


def test_training_on_goes_on_with_the_ledger(one_rank: Ranks, tmp_path: Path) -> None:
    """A second fit of the same module, by another trainer, is the same model."""
    ledger = Ledger.from_data(one_rank.run(fit_twice, tmp_path)[0])
    assert ledger.steps == 10


def fit_twice(folder: Path) -> dict[str, Any]:
    module = Watching()
    fit(1, NOISY, folder, module=module)
    data: dict[str, Any] = fit(1, NOISY, folder, module=module)["ledger"]
    return data


USERS, EXAMPLES = (
    PrivacyPlan(noise_multiplier=1.0, delta=1e-3, unit=Users(max_examples=2, drawn=drawn))
    for drawn in ("users", "examples")
)
BY_USER = poisson_gaussian(12 / 20, 1.0)  # twelve of 20 users
BY_EXAMPLE = poisson_examples_of_user(2, 12 / 40, 1.0)  # twelve of 40 examples


@pytest.mark.parametrize(
    ("plans", "charged"),
    [
        ((EXAMPLES, USERS), [BY_EXAMPLE, BY_USER]),
        ((USERS, EXAMPLES), [BY_USER, BY_EXAMPLE]),
    ],
    ids=["examples_then_users", "users_then_examples"],
)
def test_another_drawing_of_the_same_users_is_charged_as_it_is(
    one_rank: Ranks, tmp_path: Path, plans: tuple[PrivacyPlan, PrivacyPlan], charged: list[Any]
) -> None:
    """Both protect one user with at most two examples: what they cost adds up."""
    one_rank.run(fit, 1, plans[0], tmp_path, save_every=2, max_steps=2)
    checkpoint = tmp_path / "step=2.ckpt"
    told = "from now on they draw users" if plans[1] is USERS else "they draw examples"
    result = one_rank.run(warned, plans[1], tmp_path, checkpoint, told, max_steps=5, max_epochs=-1)[
        0
    ]
    ledger = ledger_of(result)
    assert [(entry.event, entry.count) for entry in ledger.entries] == list(zip(charged, (2, 3)))
    accountant = PLDAccountant()  # dp-accounting's own
    for event, count in zip(charged, (2, 3)):
        accountant.compose(event, count)
    assert ledger.epsilon(1e-3) == pytest.approx(accountant.get_epsilon(1e-3), abs=2e-3)


def test_other_users_are_other_people(one_rank: Ranks, tmp_path: Path) -> None:
    """A user with three examples is not protected by charges for a user with two."""
    one_rank.run(fit, 1, EXAMPLES, tmp_path, save_every=2, max_steps=2)
    more = PrivacyPlan(noise_multiplier=1.0, delta=1e-3, unit=Users(max_examples=3))
    with pytest.raises(ValueError, match="with at most 2 examples', found a plan that protects"):
        one_rank.run(fit, 1, more, tmp_path, resume=tmp_path / "step=2.ckpt", max_steps=5)


@pytest.mark.parametrize("drawn", ["users", "examples"])
def test_going_on_with_the_same_drawing_is_nothing_to_tell(
    one_rank: Ranks, tmp_path: Path, drawn: Any
) -> None:
    """Though the noise is another, of which the run tells."""
    before, after = (
        PrivacyPlan(noise_multiplier=noise, delta=1e-3, unit=Users(max_examples=2, drawn=drawn))
        for noise in (1.0, 0.7)
    )
    one_rank.run(fit, 1, before, tmp_path, save_every=2, max_steps=2)
    one_rank.run(quiet, after, tmp_path, tmp_path / "step=2.ckpt", "from now on they draw")


def quiet(plan: PrivacyPlan, folder: Path, resume: Path, message: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{message}")
        fit(1, plan, folder, resume=resume, max_steps=4)


@pytest.mark.parametrize(
    "change",
    [
        {"unit": Users(max_examples=2, drawn="examples")},
        {"unit": Users(max_examples=2, drawn="users")},
        {"by_day": True},
        {"sampling": "fixed_order"},
    ],
)
def test_charges_for_one_unit_say_nothing_about_another(
    one_rank: Ranks, tmp_path: Path, change: dict[str, Any]
) -> None:
    """Steps that protected examples must not be added up as if they had protected users."""
    one_rank.run(fit, 1, NOISY, tmp_path, save_every=5)
    other = PrivacyPlan(noise_multiplier=1.0, delta=1e-3, **change)
    with pytest.raises(ValueError, match="Expected to go on protecting 'one example added"):
        one_rank.run(fit, 1, other, tmp_path, resume=tmp_path / "step=5.ckpt", max_steps=8)

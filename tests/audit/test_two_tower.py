"""Audits of the two-tower model, whose batches have features of their own, example and user."""

from __future__ import annotations

from typing import Any

from lightning_dpsparse import DPSGD, FusedOptimizer, PrivacyPlan, Users
from lightning_dpsparse.audit.one_run import OneRunResult, one_run_audit
from lightning_dpsparse.data import SyntheticMovieLens
from lightning_dpsparse.models import TwoTowerModule
from tests.support.ranks import Ranks
from tests.support.tiny_model import make_trainer


def audit(per_user: int | None, **plan: Any) -> OneRunResult:
    watches = SyntheticMovieLens(
        num_users=60, num_items=50, watches_per_user=6, batch_size=48, examples_per_user=per_user
    )
    trainer = make_trainer(
        1,
        optimizer=FusedOptimizer(kind="sgd", learning_rate=1.0),
        privacy=PrivacyPlan(mechanism=DPSGD(), noise_multiplier=6.6274, delta=1e-6, **plan),
        max_epochs=-1,
        max_steps=4,
    )
    towers = TwoTowerModule(num_items=50, embedding_dim=8, context_layers=[8], num_negatives=4)
    return one_run_audit(trainer, towers, watches, num_canaries=20_000, seed=0)


def test_one_run_on_windows(one_rank: Ranks) -> None:
    """The expected batch is an eighth of the data and its canaries: amplified, far below 1.3."""
    (found,) = one_rank.run(audit, None)
    assert found.claimed_epsilon is not None
    assert 0 < found.claimed_epsilon < 0.6
    assert found.passed


def test_one_run_on_users_whose_windows_are_drawn_anew(one_rank: Ranks) -> None:
    """Each canary is a user with one example. About 48 users are there to train on, and as many are
    drawn: nearly everybody, in every step."""
    (found,) = one_rank.run(
        audit, 3, unit=Users(max_examples=3, drawn="users"), expected_batch_size=48
    )
    assert found.claimed_epsilon is not None
    assert 1.1 < found.claimed_epsilon < 1.31
    assert found.passed
    assert found.measured.epsilon > 0.3

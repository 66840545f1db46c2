"""The one-run audit: what it trains on, and what it looks at."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from benchmarks.broken import audit, data, model
from lightning_dpsparse import DPSGD, FusedOptimizer, PrivacyPlan
from lightning_dpsparse.audit import one_run
from lightning_dpsparse.audit.bound import Measured
from lightning_dpsparse.audit.one_run import OneRunResult, attacks_on_rows, one_run_audit
from lightning_dpsparse.data import SyntheticData
from lightning_dpsparse.models import DLRMModule
from tests.support.ranks import Ranks
from tests.support.tiny_model import make_trainer


def trained(world_size: int) -> tuple[torch.Tensor, Any, int]:
    """The canaries' rows after one step on everybody, the coins, and the size of the data."""
    plan = PrivacyPlan(mechanism=DPSGD(), noise_multiplier=0.0, clip_norm=2.0, delta=1e-6)
    trainer = make_trainer(world_size, privacy=plan, max_epochs=-1, max_steps=1)
    with mock.patch.object(one_run, "whole_table", wraps=one_run.whole_table) as reading:
        one_run_audit(trainer, model(), data(40), num_canaries=10, seed=3)
    (fitted, _), _ = reading.call_args
    put_in = next(c for c in trainer.callbacks if isinstance(c, one_run._PutIn))  # type: ignore[attr-defined]
    size = len(trainer.datamodule.train_set)  # type: ignore[attr-defined]
    return one_run.whole_table(fitted, "canaries"), put_in.is_included_M, size


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_canary_moves_its_row_by_the_clip_norm_and_nothing_else(
    one_rank: Ranks, two_ranks: Ranks, world_size: int
) -> None:
    """-lr C / (q N) in the direction of the gradient, which has four equal parts."""
    ranks = one_rank if world_size == 1 else two_ranks
    for rows, is_in, size in ranks.run(trained, world_size):
        assert size == 40 + is_in.sum()
        moved = torch.full((10, 4), -0.1 * 2.0 / size / 2.0) * torch.from_numpy(is_in)[:, None]
        torch.testing.assert_close(rows, moved, rtol=1e-5, atol=1e-9)
        assert 0 < is_in.sum() < 10


def test_attacks_look_where_they_say() -> None:
    rows = torch.tensor([[-1.0, -1, 0, 0], [0, 0, 0, 0], [3, 0, -3, 0], [-1, 0, 0, 0]])
    scores = attacks_on_rows(rows, world_size=2)
    assert scores["down"].tolist() == [2.0, 0.0, 0.0, 1.0]
    assert scores["moved"] == pytest.approx([2**0.5, 0.0, 18**0.5, 1.0])
    # The same place of the other piece: rows 0 and 2, 1 and 3.
    assert scores["pairs"].tolist() == [2.0, -1.0, -2.0, 1.0]
    assert "pairs" not in attacks_on_rows(rows, world_size=1)


def test_by_losses_alone_a_correct_run_shows_little(one_rank: Ranks) -> None:
    (found,) = one_rank.run(audit, "as it is", DPSGD(), canaries=1000, is_white_box=False)
    assert found.passed
    assert not found.is_white_box
    assert found.for_report()["name"] == "one run, black box, 1,000 canaries"


def overfitted() -> OneRunResult:
    """Hardly any noise, many steps on few examples."""
    trainer = make_trainer(
        1,
        optimizer=FusedOptimizer(kind="sgd", learning_rate=50.0),
        privacy=PrivacyPlan(mechanism=DPSGD(), noise_multiplier=1e-6, clip_norm=5.0, delta=1e-6),
        max_epochs=-1,
        max_steps=200,
    )
    rows = [20_000, 20_000]
    few = SyntheticData(num_rows=rows, batch_size=40, examples_per_day=40, train_days=1, val_days=1)
    wide = DLRMModule(num_rows=rows, embedding_dim=8, dense_arch=[16, 8], over_arch=[16, 1])
    return one_run_audit(trainer, wide, few, num_canaries=600, seed=1, is_white_box=False)


def test_losses_give_away_a_model_that_learned_by_heart(one_rank: Ranks) -> None:
    (found,) = one_rank.run(overfitted)
    assert found.claimed_epsilon is None  # so little noise has no bound
    assert found.measured.epsilon > 1.3


def test_a_run_without_a_claim_is_refused() -> None:
    with pytest.raises(ValueError, match="no claim to audit"):
        one_run_audit(make_trainer(1), model(), data(40), num_canaries=10)


@pytest.mark.parametrize(("claim", "passed"), [(1.0, False), (3.0, True), (None, True)])
def test_the_verdict(claim: float | None, passed: bool) -> None:
    found = OneRunResult(claim, 1e-6, Measured(2.0, "down", 100, 90), 0.95, 1000, True)
    assert found.passed is passed
    assert found.for_report()["passed"] is passed
    words = str(found)
    assert "measured ε ≥ 2" in words
    assert ("claimed ε ≤" in words) is (claim is not None)


def coins(world_size: int, seed: int | None) -> Any:
    """Of 10,000 canaries."""
    plan = PrivacyPlan(mechanism=DPSGD(), noise_multiplier=1.0, delta=1e-6)
    put_in = one_run._PutIn(10_000, seed, is_white_box=True)
    trainer = make_trainer(world_size, privacy=plan)
    trainer.datamodule = data(40)  # type: ignore[attr-defined]
    trainer.datamodule.setup("fit")  # type: ignore[attr-defined]
    put_in.setup(trainer, model(), "fit")
    return put_in.is_included_M, put_in.canaries.ids_L


def test_coins_are_fair_and_by_seed(one_rank: Ranks) -> None:
    (one, canaries), (again, same), (other, others) = (
        one_rank.run(coins, 1, seed)[0] for seed in (1, 1, 2)
    )
    assert np.array_equal(one, again)
    assert np.array_equal(canaries, same)
    assert not np.array_equal(one, other)
    assert not np.array_equal(canaries, others)
    assert abs(one.mean() - 0.5) < 5 * 0.5 / 100


def test_ranks_toss_the_same_fresh_coins(two_ranks: Ranks) -> None:
    (one, _), (two, _) = two_ranks.run(coins, 2, None)
    assert np.array_equal(one, two)
    assert not np.array_equal(one, two_ranks.run(coins, 2, None)[0][0])


def audited() -> tuple[set[str], Any]:
    """What an audit leaves on the module that it was given, and the plan of the strategy."""
    plan = PrivacyPlan(mechanism=DPSGD(), noise_multiplier=0.0, clip_norm=2.0, delta=1e-6)
    trainer = make_trainer(1, privacy=plan, max_epochs=-1, max_steps=1)
    module = model()
    one_run_audit(trainer, module, data(40), num_canaries=10, seed=3)
    strategy: Any = trainer.strategy
    return {"log", "log_dict", "print"} & set(vars(module)), strategy.privacy


def test_an_audit_leaves_the_module_its_voice_and_tells_the_strategy(one_rank: Ranks) -> None:
    left, plan = one_rank.run(audited)[0]
    assert left == set()
    assert any("canaries" in taint for taint in plan.taints)
    assert plan.expected_batch_size is not None

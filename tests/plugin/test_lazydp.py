"""LazyDP is DP-SGD: the same draws replayed give the same model, whatever is read in between."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from lightning_dpsparse import FusedOptimizer, LazyDP, Placement
from tests.support.lazydp_runs import DECAYING, EAGER, LAZY, STEPS, train, whole
from tests.support.naive_step import Batches, plan
from tests.support.plain_training import PLACEMENTS, SGD, assert_close
from tests.support.ranks import Ranks
from tests.support.row_choice import rows_of_unit
from tests.support.tiny_model import (
    BAGS_OR_SEQUENCES,
    SEQUENCES,
    Bags,
    Recording,
    assemble,
    make_trainer,
    paths,
    snapshot,
)


@functools.cache
def eager(ranks: Ranks, optimizer: FusedOptimizer, steps: int) -> dict[str, Any]:
    """DP-SGD on one rank, once."""
    settings: dict[str, Any] = {"steps": steps, "export_at": (57, 123)}
    return ranks.run(train, 1, Placement(), optimizer, EAGER, **settings)[0]


OPTIMIZERS = pytest.mark.parametrize("optimizer", [SGD, DECAYING], ids=["plain", "decaying"])


@OPTIMIZERS
def test_one_rank_is_eager_dp_sgd(one_rank: Ranks, optimizer: Any) -> None:
    expected = eager(one_rank, optimizer, STEPS)
    [found] = one_rank.run(train, 1, Placement(), optimizer, LAZY, export_at=(57, 123))
    assert_close(whole([found]), whole([expected]), 1e-6)
    # What validation read had paid. Some thirty rows add up to a prediction.
    assert (found["seen"] - expected["seen"]).abs().max() <= 2e-6
    for one, two in zip(found["states"], expected["states"], strict=True):  # so had exports
        assert_close(assemble([one]), assemble([two]), 1e-6)


@OPTIMIZERS
def test_moved_within_its_spacing_noise_is_hardly_another(one_rank: Ranks, optimizer: Any) -> None:
    """A step's noise of 0.05 is moved by up to 5e-8 and rounded by up to 4e-7. Over 200 steps, and
    with what training makes of it, that adds up to 8e-6: a six-thousandth of one step's noise."""
    [found] = one_rank.run(train, 1, Placement(), optimizer, LAZY, is_moved=True)
    assert_close(whole([found]), whole([eager(one_rank, optimizer, STEPS)]), 1e-5)


@OPTIMIZERS
@pytest.mark.parametrize(
    ("long", "longest"),
    [
        pytest.param(1, 10_000, marks=pytest.mark.slow),
        (5, 7),
        pytest.param(1, 1, marks=pytest.mark.slow),
    ],
)
def test_a_clock_that_starts_anew_changes_nothing(
    one_rank: Ranks, optimizer: Any, long: int, longest: int
) -> None:
    """Whether rows pay for that in the middle of training, or it waits until they have paid.

    Rows that pay in between are rounded once more in that step: twice the error, at most.
    """
    [found] = one_rank.run(train_forgetful, long, longest, optimizer, export_at=(57, 123))
    assert found["ticks"] <= min(longest, STEPS - 123)
    assert_close(whole([found]), whole([eager(one_rank, optimizer, STEPS)]), 2e-6)


def train_forgetful(long: int, longest: int, optimizer: Any, **settings: Any) -> dict[str, Any]:
    from lightning_dpsparse.mechanisms.lazydp import clock, state

    ticks, tick = [0], clock.Clock.tick

    def noted(self: Any, *args: Any) -> None:
        tick(self, *args)
        ticks.append(self.now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "_LONG", long)
        patch.setattr(state, "_LONGEST", longest)
        patch.setattr(clock.Clock, "tick", noted)
        found = train(1, Placement(), optimizer, LAZY, **settings)
    return {**found, "ticks": max(ticks)}


@pytest.mark.parametrize(
    ("name", "optimizer", "steps"),
    [
        ("table_wise", SGD, 60),
        ("row_wise", SGD, 60),
        ("column_wise", SGD, 60),
        ("table_wise", DECAYING, 60),
        ("row_wise", DECAYING, 60),
        ("mixed", DECAYING, 60),
        pytest.param("row_wise", SGD, STEPS, marks=pytest.mark.slow),
        pytest.param("mixed", DECAYING, STEPS, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_are_eager_dp_sgd(
    one_rank: Ranks, two_ranks: Ranks, optimizer: Any, name: str, steps: int
) -> None:
    """Column pieces of one row owe apart; repeated ids and rows of several ranks owe once."""
    expected = whole([eager(one_rank, optimizer, steps)])
    found = two_ranks.run(train, 2, PLACEMENTS[name], optimizer, LAZY, steps=steps)
    assert_close(whole(found), expected, 1e-6)


@pytest.mark.parametrize("kind", ["grid", "table_row_wise"])
def test_four_ranks_on_two_hosts_are_eager_dp_sgd(four_ranks: Ranks, kind: Any) -> None:
    placement = Placement(default=kind)
    eager, lazy = (
        whole(four_ranks.run(train, 4, placement, SGD, mechanism, steps=20, hosts=2))
        for mechanism in (EAGER, LAZY)
    )
    assert_close(lazy, eager, 1e-6)


@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(SGD, id="plain", marks=pytest.mark.slow), pytest.param(DECAYING, id="decaying")],
)
def test_a_step_in_parts_is_eager_dp_sgd(two_ranks: Ranks, optimizer: Any) -> None:
    """A row that two parts read pays before the first, and once."""
    eager, lazy = (
        whole(two_ranks.run(train, 2, PLACEMENTS["mixed"], optimizer, mechanism, steps=40, most=1))
        for mechanism in (EAGER, LAZY)
    )
    assert_close(lazy, eager, 1e-6)


@pytest.mark.parametrize(
    ("optimizer", "sequences"),
    [(SGD, ()), (DECAYING, ()), (SGD, SEQUENCES)],
    ids=["plain", "decaying", "sequences"],
)
def test_a_second_look_in_a_step_sees_the_same_rows(
    one_rank: Ranks, optimizer: Any, sequences: tuple[str, ...]
) -> None:
    """Rows that were read on credit pay before anybody else reads them."""
    settings: dict[str, Any] = {"steps": 40, "looks_twice": True, "sequences": sequences}
    [expected], [found] = (
        one_rank.run(train, 1, Placement(), optimizer, mechanism, **settings)
        for mechanism in (EAGER, LAZY)
    )
    assert_close(whole([found]), whole([expected]), 1e-6)
    for one, two in zip(found["glances"], expected["glances"], strict=True):
        assert (one - two).abs().max() <= 1e-6


class NoLoss(Recording):
    """Reads rows, and learns nothing from them: what moves is noise."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * 0.0


def sleep(
    world_size: int, placement: Placement, key: int, sequences: tuple[str, ...]
) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = NoLoss(schedule="cosine", sequences=sequences)
    noisy = plan(2.0, noise=1.5, mechanism=LazyDP(chunk_rows=16))
    object.__setattr__(noisy, "fixed_key", key)
    trainer = make_trainer(world_size, placement, SGD, privacy=noisy)
    rank = torch.distributed.get_rank()
    trainer.fit(module, Batches([[1, 0], [0, 1]] * 15, rank))
    return module.start, snapshot(module)


@pytest.mark.parametrize("name", ["table_wise", "row_wise", "column_wise"])
@BAGS_OR_SEQUENCES
def test_aggregated_noise_has_its_variance_however_often_a_row_was_read(
    two_ranks: Ranks, name: str, sequences: tuple[str, ...]
) -> None:
    """Two runs of 30 steps: the mean square of n draws has standard error sqrt(2 / n)."""
    readers = [rows_of_unit([Bags(100)[i]]) for i in range(30)]
    # The module's cosine schedule has a period of 20 steps; rates are those of the steps taken.
    rates = [0.3 * 0.5 * (1 + math.cos(math.pi * step / 10)) for step in range(30)]
    stddev = math.sqrt(sum((rate * 1.5 * 2.0 / 10) ** 2 for rate in rates))
    draws: dict[str, list[Tensor]] = {"never": [], "once": [], "often": []}
    for key in range(2):
        results = two_ranks.run(sleep, 2, PLACEMENTS[name], key, sequences)
        start, end = (assemble([result[i] for result in results]) for i in (0, 1))
        for table, path in paths(sequences).items():
            moved = (end[path] - start[path]) / stddev
            visits = torch.tensor(
                [sum((table, row) in rows for rows in readers) for row in range(len(moved))]
            )
            for group, rows in (
                ("never", visits == 0),
                ("once", visits == 1),
                ("often", visits > 2),
            ):
                draws[group].append(moved[rows].flatten().double())
    for group, parts in draws.items():
        values = torch.cat(parts)
        assert values.numel() > 450, group
        assert stats.kstest(values.numpy(), "norm").pvalue > 1e-4, group
        bound = 5 * math.sqrt(2 / values.numel())
        assert abs(float(values.square().mean()) - 1) < bound, group

"""Users clipped as one, on real ranks, against a naive loop over users in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_dpsparse import Placement
from lightning_dpsparse.engine.clipping import AutomaticClipping, GroupClipping
from tests.support.naive_step import Batches, automatic, grouped, naive, plan, run, scaled
from tests.support.plain_training import PLACEMENTS, SGD, assert_close
from tests.support.ranks import Ranks
from tests.support.tiny_model import (
    SEQUENCES,
    make_trainer,
    name_of,
)
from tests.support.users import UNITS, Users, naive_users, run_users, sizes_of

GROUPS = GroupClipping({"*.t[01].weight": 3.0, "*": 4.0})


@pytest.mark.parametrize("name", UNITS)
def test_one_rank_is_the_naive_step_over_users(one_rank: Ranks, name: str) -> None:
    start, end = run_users(one_rank, UNITS[name], Placement(), plan())
    assert_close(end, naive_users(start, UNITS[name]), 1e-6)


@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize("placement", ["table_wise", "row_wise", "mixed"])
def test_two_ranks_are_the_naive_step_over_users(
    two_ranks: Ranks, placement: str, name: str
) -> None:
    start, end = run_users(two_ranks, UNITS[name], PLACEMENTS[placement], plan())
    assert_close(end, naive_users(start, UNITS[name]), 1e-6)


@pytest.mark.parametrize(
    ("kind", "sequences"), [("table_row_wise", ()), ("row_wise", SEQUENCES)], ids=name_of
)
def test_four_ranks_on_two_hosts_are_the_naive_step_over_users(
    four_ranks: Ranks, kind: Any, sequences: tuple[str, ...]
) -> None:
    """Two-level kinds interleave the hosts' examples on a shard: ranks 0, 2, 1, 3."""
    units = [[[2, 1], [], [2], [1]], [[], [], [], [1, 4]], [[2], [1, 1], [2], [2]]]
    settings: dict[str, Any] = {"hosts": 2, "sequences": sequences}
    start, end = run_users(four_ranks, units, Placement(default=kind), plan(), **settings)
    assert_close(end, naive_users(start, units), 1e-6)


@pytest.mark.parametrize(
    ("settings", "factors"),
    [
        ({"clipping": AutomaticClipping()}, automatic),
        ({"clipping": GROUPS}, grouped),
        ({"dense_scale": 3.0}, scaled(3.0)),
    ],
    ids=["automatic", "groups", "dense_scale"],
)
def test_other_clipping_is_the_naive_step_over_users(
    two_ranks: Ranks, settings: dict[str, Any], factors: Any
) -> None:
    units = UNITS["uneven"]
    start, end = run_users(two_ranks, units, PLACEMENTS["mixed"], plan(**settings))
    assert_close(end, naive_users(start, units, factors=factors), 2e-6)


@pytest.mark.parametrize("placement", ["table_wise", "row_wise"])
def test_an_example_that_overflows_takes_its_user_along(two_ranks: Ranks, placement: str) -> None:
    units = UNITS["even"]
    start, end = run_users(two_ranks, units, PLACEMENTS[placement], plan(), poisoned=1)
    assert_close(end, naive_users(start, units, poisoned=1), 1e-6)


def test_users_of_one_example_are_examples_to_the_last_bit(two_ranks: Ranks) -> None:
    sizes = [[5, 1], [0, 4], [7, 3]]
    ones = [[[1] * size for size in step] for step in sizes]
    _, found = run_users(two_ranks, ones, PLACEMENTS["mixed"], plan())
    _, expected = run(two_ranks, sizes, PLACEMENTS["mixed"], SGD, plan())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)


def test_clipping_users_is_not_clipping_examples(one_rank: Ranks) -> None:
    """The tests above would pass on per-example clipping if both gave the same."""
    start, end = run_users(one_rank, UNITS["even"], Placement(), plan())
    with pytest.raises(AssertionError):
        assert_close(end, naive(start, sizes_of(UNITS["even"]), SGD, 0.5), 1e-4)


def train_on_four_examples(sizes: list[int]) -> None:
    trainer = make_trainer(1, Placement(), SGD, privacy=plan())
    trainer.fit(Users([sizes]), Batches([[4]], None))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([2, 0, 2], "Expected at least one example of every user, found none"),
        ([2, 1], "add up to the losses of this rank"),
        ([], "add up to the losses of this rank"),
        ([4, 1], "add up to the losses of this rank"),
    ],
    ids=str,
)
def test_users_must_cover_the_batch(one_rank: Ranks, sizes: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        one_rank.run(train_on_four_examples, sizes)


def test_users_are_not_cut_into_parts(one_rank: Ranks) -> None:
    with pytest.raises(ValueError, match="a user's examples must be clipped together"):
        run_users(one_rank, UNITS["even"], Placement(), plan(), most=3)

"""Attack gallery: broken variants of the product, and the audit that catches each.

Half the noise, no flush, one seed for all shards and EANA sold as private are caught here.
Noise that is too small by sqrt(2) is not: one run cannot tell. The chi-square tests of the noise
(tests/plugin/test_private_noise.py) guard against that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest

from lightning_dpsparse import DPSGD, EANA, AdaFEST, LazyDP, Placement
from lightning_dpsparse.audit.one_run import OneRunResult
from lightning_dpsparse.engine.mechanism import Mechanism
from lightning_dpsparse.engine.step import Recipe
from lightning_dpsparse.noise.keys import RunKey, Stream
from lightning_dpsparse.sharded.private import PrivateSteps
from tests.audit.runs import CLAIM, audited
from tests.ranks import Ranks


@contextmanager
def noise_divided_by(divisor: float) -> Iterator[None]:
    right = Recipe.noise_stddev.fget
    assert right is not None
    wrong = property(lambda recipe: right(recipe) / divisor)
    with mock.patch.object(Recipe, "noise_stddev", wrong):
        yield


@contextmanager
def no_flush() -> Iterator[None]:
    with mock.patch.object(PrivateSteps, "pay_all"):
        yield


@contextmanager
def sold_as_private() -> Iterator[None]:
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(EANA, "is_private", True))
        patches.enter_context(mock.patch.object(EANA, "event", DPSGD.event))
        yield


@contextmanager
def one_seed_for_all_shards() -> Iterator[None]:
    right = RunKey.bytes_for

    def wrong(key: RunKey, stream: Stream, size: int) -> bytes:
        return right(key, Stream(stream.purpose, stream.table, stream.step), size)

    with mock.patch.object(RunKey, "bytes_for", wrong):
        yield


BROKEN = {
    "as it is": ExitStack,
    "half the noise": lambda: noise_divided_by(2.0),
    "noise by root two": lambda: noise_divided_by(2.0**0.5),
    "no flush": no_flush,
    "sold as private": sold_as_private,
    "one seed": one_seed_for_all_shards,
}


def audit(how: str, mechanism: Mechanism, *args: Any, **kwargs: Any) -> OneRunResult:
    with BROKEN[how]():
        return audited(mechanism, *args, **kwargs)


@pytest.mark.parametrize("mechanism", [DPSGD(), LazyDP()], ids=["dpsgd", "lazydp"])
def test_what_is_right_stays_below_its_claim(one_rank: Ranks, mechanism: Mechanism) -> None:
    (found,) = one_rank.run(audit, "as it is", mechanism)
    assert found.claimed_epsilon == pytest.approx(CLAIM, abs=0.01)
    assert found.passed
    # The canaries are as strong as can be: a deaf audit would pass everything.
    assert 0.4 * CLAIM < found.measured.epsilon < 0.8 * CLAIM


@pytest.mark.parametrize("mechanism", [DPSGD(), LazyDP()], ids=["dpsgd", "lazydp"])
def test_half_the_noise_is_caught(one_rank: Ranks, mechanism: Mechanism) -> None:
    (found,) = one_rank.run(audit, "half the noise", mechanism)
    assert not found.passed
    assert found.measured.attack == "down"


def test_noise_that_never_lands_is_caught(one_rank: Ranks) -> None:
    (found,) = one_rank.run(audit, "no flush", LazyDP())
    assert not found.passed
    assert found.measured.attack == "moved"
    assert found.measured.epsilon > 5.0


def test_eana_leaks_what_dpsgd_does_not(one_rank: Ranks) -> None:
    """An id that was seen once: its row moved, or it did not."""
    (eana,) = one_rank.run(audit, "as it is", EANA())
    (dpsgd,) = one_rank.run(audit, "as it is", DPSGD())
    assert eana.claimed_epsilon is None
    assert eana.measured.attack == "moved"
    assert eana.measured.epsilon > 5.0 > 4.0 * dpsgd.measured.epsilon


def test_eana_sold_as_private_is_caught(one_rank: Ranks) -> None:
    (found,) = one_rank.run(audit, "sold as private", EANA())
    assert found.claimed_epsilon == pytest.approx(CLAIM, abs=0.01)
    assert not found.passed


def test_noise_too_small_by_root_two_is_not_caught(one_rank: Ranks) -> None:
    """Stated, not wished for: an audit is a smoke alarm. See the module's own words."""
    (found,) = one_rank.run(audit, "noise by root two", DPSGD())
    assert found.passed


def test_one_seed_for_all_shards_is_caught(two_ranks: Ranks) -> None:
    """Rows at the same place of two pieces have the same noise: their difference has none."""
    placement = Placement(default="table_wise", tables={"canaries": "row_wise"})
    right, broken = (
        two_ranks.run(audit, how, DPSGD(), 2, canaries=20_000, placement=placement)
        for how in ("as it is", "one seed")
    )
    assert right[0] == right[1]
    assert right[0].passed
    assert broken[0] == broken[1]
    assert not broken[0].passed
    assert broken[0].measured.attack == "pairs"


@pytest.mark.parametrize(
    ("mechanism", "optimizer"),
    [(AdaFEST(threshold=8.0), "sgd"), (AdaFEST(false_positives=50.0), "rowwise_adagrad")],
    ids=["some rows", "few rows"],
)
def test_adafest_stays_below_its_claim(
    one_rank: Ranks, mechanism: Mechanism, optimizer: str
) -> None:
    (found,) = one_rank.run(audit, "as it is", mechanism, kind=optimizer)
    assert found.claimed_epsilon == pytest.approx(CLAIM, abs=0.01)
    assert found.passed

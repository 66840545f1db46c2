"""Attack gallery: broken variants of the product, and the audit that catches each.

Half the noise, no flush, one seed for all shards, EANA sold as private, and noise whose low bits
give away what it was added to, are caught here.
Noise that is too small by sqrt(2) is not: one run cannot tell. The chi-square tests of the noise
(tests/plugin/test_private_noise.py) guard against that.
"""

from __future__ import annotations

import math
import secrets
from typing import Any
from unittest import mock

import pytest
from scipy import stats

from benchmarks import broken
from benchmarks.broken import CLAIM
from lightning_dpsparse import (
    DPSGD,
    EANA,
    FEST,
    AdaFEST,
    AdaFESTPlus,
    ExponentialSelection,
    LazyDP,
    NoisyHistogram,
    Selection,
)
from lightning_dpsparse.audit.one_run import OneRunResult
from lightning_dpsparse.engine.mechanism import Mechanism
from tests.support.ranks import Ranks


def audit(*args: Any, **kwargs: Any) -> OneRunResult:
    """With the same noise every time. (A plan with a fixed key would claim nothing.)"""
    with mock.patch.object(secrets, "token_bytes", bytes):
        return broken.audit(*args, seed=0, **kwargs)


@pytest.mark.parametrize("mechanism", [DPSGD(), LazyDP()], ids=["dpsgd", "lazydp"])
def test_what_is_right_stays_below_its_claim(one_rank: Ranks, mechanism: Mechanism) -> None:
    (found,) = one_rank.run(audit, "as it is", mechanism)
    assert found.claimed_epsilon == pytest.approx(CLAIM, abs=0.01)
    assert found.passed
    # The canaries are as strong as can be: a deaf audit would pass everything.
    assert 0.4 * CLAIM < found.measured.epsilon < 0.8 * CLAIM


@pytest.mark.parametrize("mechanism", [DPSGD(), LazyDP()], ids=["dpsgd", "lazydp"])
def test_half_the_noise_is_caught(one_rank: Ranks, mechanism: Mechanism) -> None:
    (found,) = one_rank.run(audit, "noise / 2", mechanism)
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
    (found,) = one_rank.run(audit, "called private", EANA())
    assert found.claimed_epsilon == pytest.approx(CLAIM, abs=0.01)
    assert not found.passed


def test_noise_too_small_by_root_two_is_not_caught(one_rank: Ranks) -> None:
    """Stated, not wished for: an audit is a smoke alarm. See the module's own words."""
    (found,) = one_rank.run(audit, "noise / sqrt(2)", DPSGD())
    assert found.passed


def test_one_seed_for_all_shards_is_caught(two_ranks: Ranks) -> None:
    """Rows at the same place of two pieces have the same noise: their difference has none."""
    right, wrong = (
        two_ranks.run(audit, variant, DPSGD(), 2, canaries=20_000)
        for variant in ("as it is", "one seed for all shards")
    )
    assert right[0] == right[1]
    assert right[0].passed
    assert wrong[0] == wrong[1]
    assert not wrong[0].passed
    assert wrong[0].measured.attack == "pairs"


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


SELECTION = Selection(frequencies=NoisyHistogram(noise_multiplier=50.0), rows_in_total=2000)


@pytest.mark.parametrize(
    "mechanism",
    [
        FEST(selection=SELECTION),
        AdaFESTPlus(selection=SELECTION, threshold=8.0),
        ExponentialSelection(num_rows=500),
    ],
    ids=["fest", "adafest_plus", "exponential"],
)
def test_row_selection_stays_below_its_claim(one_rank: Ranks, mechanism: Mechanism) -> None:
    """What choosing rows costs is part of the claim."""
    (found,) = one_rank.run(audit, "as it is", mechanism, canaries=20_000)
    assert found.claimed_epsilon is not None
    assert CLAIM <= found.claimed_epsilon < 1.5
    assert found.passed


# ---- low bits -----------------------------------------------------------------------------------


def audit_low_bits(*args: Any, **kwargs: Any) -> OneRunResult:
    """With the same noise every time."""
    with mock.patch.object(secrets, "token_bytes", bytes):
        return broken.audit_low_bits(*args, seed=0, **kwargs)


def is_chance(found: OneRunResult) -> bool:
    """Whether the claim leads to so many right guesses, in the best of 12 attempts, more than once
    in 100,000 runs. (At the audit's own confidence, one run in 20 is above its claim.)"""
    right, guesses = found.measured.num_right, found.measured.num_guesses
    odds = math.exp(found.claimed_epsilon or 0.0)
    return bool(12 * stats.binom.sf(right - 1, guesses, odds / (1 + odds)) > 1e-5)


@pytest.mark.parametrize(
    ("variant", "mechanism", "readers"),
    [
        ("noise of torch in float32", DPSGD(), 39),
        ("noise of torch in float32", DPSGD(), 0),
        ("noise of torch in float32", LazyDP(), 39),
        ("noise of numpy in float32", DPSGD(), 39),
        ("sums off the grid", DPSGD(), 39),
    ],
    ids=["torch", "torch, no other reader", "torch, lazydp", "numpy", "sums"],
)
def test_low_bits_of_noise_in_float32_tell_who_was_there(
    one_rank: Ranks, variant: str, mechanism: Mechanism, readers: int
) -> None:
    """With a noise multiplier of 50: a claim of 0.07, and no guess that is wrong.

    64 right guesses of 64, the best of six attacks with two numbers of guesses: a binomial tail of
    q^64 = 0.05 / 12 leaves no q = e^eps / (1 + e^eps) below 0.917, no epsilon below 2.4.
    """
    (found,) = one_rank.run(audit_low_bits, variant, mechanism, readers=readers)
    assert found.claimed_epsilon == pytest.approx(0.071, abs=0.001)
    assert found.measured.num_right == found.measured.num_guesses >= 64
    assert found.measured.epsilon > 2.3
    assert not found.passed
    assert not is_chance(found)


@pytest.mark.parametrize(
    ("mechanism", "noise_source", "readers"),
    [
        (DPSGD(), "fast", 39),
        (DPSGD(), "secure", 39),
        (DPSGD(), "row_keyed", 0),
        (DPSGD(), "secure", 0),
        (LazyDP(), "fast", 39),
        (LazyDP(), "secure", 39),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Mechanism) else str(value),
)
def test_low_bits_of_what_is_right_tell_nothing(
    one_rank: Ranks, mechanism: Mechanism, noise_source: str, readers: int
) -> None:
    (found,) = one_rank.run(
        audit_low_bits, "as it is", mechanism, readers=readers, noise_source=noise_source
    )
    assert found.claimed_epsilon == pytest.approx(0.071, abs=0.001)
    assert is_chance(found)


@pytest.mark.parametrize("learning_rate", [1.0, 0.7])
@pytest.mark.parametrize("noise_source", ["fast", "secure"])
def test_low_bits_do_not_tell_who_read_a_row_alone(
    one_rank: Ranks, noise_source: str, learning_rate: float
) -> None:
    """With a learning rate of one, a step's noise lies on the weights' grid as it is."""
    (found,) = one_rank.run(
        audit_low_bits,
        "as it is",
        LazyDP(),
        readers=0,
        noise_source=noise_source,
        learning_rate=learning_rate,
    )
    assert is_chance(found)

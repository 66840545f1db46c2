"""Skipping from survivor to survivor is the same as a coin for every row."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dpsparse.noise.keys import RunKey, Stream
from lightning_dpsparse.noise.skipping import survivors
from lightning_dpsparse.noise.sources import FastNoise, NoiseSource, RowNoise, SecureNoise

SOURCES = [FastNoise, SecureNoise, RowNoise]
KEY = RunKey.fixed(11)
CPU = torch.device("cpu")
Z = 4.5
"""Standard errors that are allowed: 7e-6 for one comparison, 1e-3 for all 150 of this file."""


class Uniform:
    """Numbers of one long stream, one after the other; remembers what it was asked for."""

    def __init__(self, size: int, source: NoiseSource | None = None, name: str = "") -> None:
        source = FastNoise(KEY) if source is None else source
        self._pool = source.uniform(size, Stream("survivors", name, 0), CPU)
        self._at = 0
        self.calls: list[tuple[int, int]] = []

    def __call__(self, count: int, part: int) -> Tensor:
        self.calls.append((count, part))
        self._at += count
        assert self._at <= self._pool.numel(), "the test's pool of numbers is too small"
        return self._pool[self._at - count : self._at]


@pytest.mark.parametrize("num_rows", [0, 1, 2, 5, 1000])
def test_all_or_none(num_rows: int) -> None:
    uniform = Uniform(10_000)
    assert survivors(num_rows, 1.0, uniform).tolist() == list(range(num_rows))
    none = survivors(num_rows, 0.0, uniform)
    assert none.shape == (0,)
    assert none.dtype == torch.int64


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_every_set_of_rows_has_its_probability(probability: float) -> None:
    """All 16 outcomes for four rows, exactly as with independent coins: first and last row too."""
    draws, uniform, found = 10_000, Uniform(300_000), Counter[Any]()
    for _ in range(draws):
        found[tuple(survivors(4, probability, uniform).tolist())] += 1
    outcomes = [tuple(r for r in range(4) if c[r]) for c in product((0, 1), repeat=4)]
    assert set(found) <= set(outcomes)
    for rows in outcomes:
        p = probability ** len(rows) * (1 - probability) ** (4 - len(rows))
        # Binomial; half a count more, for outcomes that are expected less than once.
        tolerance = Z * math.sqrt(draws * p * (1 - p)) + 0.5
        assert abs(found[rows] - draws * p) <= tolerance, rows


def test_rows_and_counts_over_many_draws() -> None:
    num_rows, p, draws = 30, 0.07, 10_000
    uniform = Uniform(300_000)
    hits = torch.zeros(draws, num_rows, dtype=torch.float64)
    for d in range(draws):
        rows = survivors(num_rows, p, uniform)
        assert rows.diff().gt(0).all()
        hits[d, rows] = 1.0
    # Thirty positions, each binomial.
    assert (hits.mean(0) - p).abs().max() <= Z * math.sqrt(p * (1 - p) / draws)
    # A count has variance s2 = n p q, and its square deviation m4 - s2^2 with
    # m4 = s2 (1 + 3 (n - 2) p q).
    s2, q = num_rows * p * (1 - p), 1 - p
    spread = (hits.sum(1) - num_rows * p).square()
    error = math.sqrt((s2 * (1 + 3 * (num_rows - 2) * p * q) - s2**2) / draws)
    assert abs(spread.mean() - s2) <= Z * error
    # Neighbours, and rows ten apart: products of independent coins, centred, of variance (p q)^2.
    centred = hits - p
    for lag in (1, 10):
        products = centred[:, lag:] * centred[:, :-lag]
        assert abs(products.mean()) <= Z * p * q / math.sqrt(products.numel())


def test_gaps_are_geometric_and_at_least_one() -> None:
    p = 0.2
    rows = survivors(500_000, p, Uniform(110_000))
    gaps = torch.cat([torch.tensor([-1]), rows]).diff()
    assert gaps.min() == 1
    for g in range(1, 16):  # P(gap = g) = p (1 - p)^(g - 1)
        expected = p * (1 - p) ** (g - 1)
        tolerance = Z * math.sqrt(expected * (1 - expected) / len(gaps))
        assert abs(float((gaps == g).double().mean()) - expected) <= tolerance, g


@pytest.mark.parametrize("kind", SOURCES)
def test_a_probability_of_1e_8_is_not_lost(kind: Any) -> None:
    """In float32, 1 - 1e-8 is one, and rows beyond 2^24 cannot be told apart."""
    num_rows, p, draws = 10**10, 1e-8, 50
    uniform = Uniform(10_000, kind(KEY))
    found = [survivors(num_rows, p, uniform) for _ in range(draws)]
    rows, gaps = torch.cat(found), torch.cat([rows.diff() for rows in found])
    expected = draws * num_rows * p  # 5,000, with a standard deviation of 71
    assert abs(len(rows) - expected) <= Z * math.sqrt(expected)
    assert rows.min() >= 0
    assert rows.max() < num_rows
    # Uniform over all rows: their mean has standard error n / sqrt(12 k); gaps odd and even alike.
    middle = rows.double().mean() / num_rows
    assert abs(middle - 0.5) <= Z / math.sqrt(12 * len(rows))
    assert abs((gaps % 2).double().mean() - 0.5) <= Z * 0.5 / math.sqrt(len(gaps))


def test_the_price_is_that_of_the_survivors() -> None:
    """A billion rows, ten thousand of which survive: as many numbers, and four deviations more."""
    uniform = Uniform(20_000)
    rows = survivors(10**9, 1e-5, uniform)
    assert abs(len(rows) - 10_000) <= Z * 100
    assert sum(count for count, _ in uniform.calls) <= 10_000 + 5 * 100
    assert len(uniform.calls) <= 2


def test_where_numbers_run_out_more_are_drawn_and_the_rows_go_on() -> None:
    calls: list[int] = []

    def uniform(count: int, part: int) -> Tensor:
        assert part == len(calls)  # a stream of its own for every part
        calls.append(count)
        return torch.full((count,), 1.0 if part < 2 else 1e-300, dtype=torch.float64)

    # u = 1 is a gap of one: the first two parts give neighbours, the third goes beyond the end.
    rows = survivors(1000, 0.01, uniform)
    assert len(calls) == 3
    assert rows.tolist() == list(range(calls[0] + calls[1]))


@pytest.mark.parametrize("u_and_gap", [(1.0, 1), (0.5000001, 1), (0.4999999, 2), (0.2499999, 3)])
def test_a_number_becomes_its_gap(u_and_gap: tuple[float, int]) -> None:
    """At p = 1/2: gap 1 for u in (1/2, 1], 2 for u in (1/4, 1/2], and so on."""
    u, gap = u_and_gap
    rows = survivors(
        7, 0.5, lambda count, part: torch.full((count,), u, dtype=torch.float64)
    ).tolist()
    assert rows == list(range(gap - 1, 7, gap))


# ---- the numbers that it is made from ------------------------------------------------------------


@pytest.mark.parametrize("kind", SOURCES)
def test_uniform_numbers_are_uniform(kind: Any) -> None:
    n = 100_000
    u = kind(KEY).uniform(n, Stream("survivors", "t", 3), CPU)
    assert u.dtype == torch.float64
    assert u.shape == (n,)
    assert u.min() > 0
    assert u.max() <= 1
    # Kolmogorov and Smirnov: P(sqrt(n) D > x) = 2 exp(-2 x^2), 7e-6 at x = 2.51.
    sorted_u, rank = u.sort().values, torch.arange(n, dtype=torch.float64)
    distance = torch.maximum((sorted_u - rank / n).max(), ((rank + 1) / n - sorted_u).max())
    assert distance * math.sqrt(n) < 2.51
    # Where long gaps come from: 100 of them below 1e-3, and as many above 1 - 1e-3.
    for tail in (u < 1e-3, u > 1 - 1e-3):
        assert abs(int(tail.sum()) - 100) <= Z * 10
    # Neighbours are uncorrelated: products of centred numbers have variance 1 / 144.
    centred = u - 0.5
    assert abs((centred[1:] * centred[:-1]).mean()) <= Z / 12 / math.sqrt(n - 1)


@pytest.mark.parametrize("kind", SOURCES)
def test_uniform_numbers_have_53_bits(kind: Any) -> None:
    words = kind(KEY).uniform(10_000, Stream("survivors", "t", 3), CPU) * 2.0**53
    assert torch.equal(words, words.floor())
    for bit in range(53):  # every bit is a fair coin: standard error 0.005, 53 comparisons
        ones = (words.long() >> bit & 1).double().mean()
        assert abs(ones - 0.5) <= 5 * 0.005, bit


@pytest.mark.parametrize("kind", SOURCES)
def test_streams_of_uniform_numbers(kind: Any) -> None:
    stream = Stream("survivors", "t", 3)
    others = [
        Stream("map", "t", 3),
        Stream("survivors", "s", 3),
        Stream("survivors", "t", 4),
        Stream("survivors", "t", 3, (5, 0)),
        Stream("survivors", "t", 3, (0, 5)),
        Stream("survivors", "t", 3, (0, 0), 1),
    ]
    first = kind(KEY).uniform(1000, stream, CPU)
    assert torch.equal(first, kind(KEY).uniform(1000, stream, CPU))
    assert not torch.isin(kind(RunKey.fixed(12)).uniform(1000, stream, CPU), first).any()
    for other in others:  # 53 bits: two alike among so few would be a wonder
        assert not torch.isin(kind(KEY).uniform(1000, other, CPU), first).any(), other

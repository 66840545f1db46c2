"""Poisson samples: exact rates, independence, no memory of the data's size."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from scipy import stats

from lightning_dpsparse.noise.keys import RunKey
from lightning_dpsparse.sampling.poisson import Phase, PoissonBatches, PoissonSampler, day_phases
from lightning_dpsparse.sampling.units import AllExamples

KEY = RunKey.fixed(3)


def sampler(size: int, rate: float, rank: int = 0, world: int = 1, **more: Any) -> PoissonSampler:
    phases = more.pop("phases", [Phase(0, size, rate)])
    return PoissonSampler(AllExamples(size), phases, more.pop("key", KEY), rank, world, **more)


def inclusion(size: int, rate: float, steps: int, world: int, **more: Any) -> np.ndarray[Any, Any]:
    """(steps, size) booleans: who was drawn by some rank."""
    drawn = np.zeros((steps, size), dtype=bool)
    for rank in range(world):
        draws = sampler(size, rate, rank, world, **more)
        for step in range(steps):
            examples = draws.draw(step)[0]
            assert not drawn[step, examples].any()  # ranks never share one
            assert np.unique(examples).size == examples.size
            drawn[step, examples] = True
    return drawn


@pytest.mark.parametrize("world", [1, 3])
def test_every_example_is_drawn_at_its_rate(world: int) -> None:
    steps, size, rate = 4000, 50, 0.13
    counts = inclusion(size, rate, steps, world).sum(0)
    # The counts of 50 independent binomials: their scaled squares add up to a chi-square.
    z = (counts - steps * rate) / math.sqrt(steps * rate * (1 - rate))
    assert stats.chi2.sf((z**2).sum(), size) > 1e-4
    assert stats.chi2.cdf((z**2).sum(), size) > 1e-4
    assert abs(z.sum()) / math.sqrt(size) < 4


def test_batch_sizes_are_binomial() -> None:
    steps, size, rate = 4000, 60, 0.2
    sizes = inclusion(size, rate, steps, 2).sum(1)
    expected = stats.binom.pmf(np.arange(size + 1), size, rate) * steps
    low, high = 5, 19
    observed = np.bincount(np.clip(sizes, low, high), minlength=high + 1)[low:]
    folded = np.append(expected[low:high], expected[high:].sum())
    folded[0] = expected[: low + 1].sum()
    assert stats.chisquare(observed, folded * observed.sum() / folded.sum()).pvalue > 1e-4


@pytest.mark.parametrize("world", [1, 2])
def test_examples_and_steps_are_independent(world: int) -> None:
    """Pairs of examples (also across ranks), and an example in one step and the next."""
    steps, size, rate = 6000, 8, 0.3
    drawn = inclusion(size, rate, steps, world).astype(float) - rate
    pairs = (drawn.T @ drawn) / (steps * rate * (1 - rate))
    bound = 5 / math.sqrt(steps)
    assert np.abs(pairs - np.diag(np.diag(pairs))).max() < bound
    after = (drawn[:-1].T @ drawn[1:]) / (steps * rate * (1 - rate))
    assert np.abs(after).max() < bound


def test_tiny_rates_are_exact() -> None:
    """q = 2e-8 of 1e9 units: 20 a batch. In float32 the rate would be three times off."""
    draws = sampler(10**9, 2e-8)
    counts = [draws.draw(step)[0].size for step in range(2000)]
    assert abs(np.mean(counts) - 20) < 5 * math.sqrt(20 / 2000)
    assert abs(np.var(counts) - 20) < 5 * 20 * math.sqrt(2.05 / 2000)


def test_a_batch_costs_its_own_size_not_the_datas() -> None:
    draws = sampler(10**9, 1e-6)
    draws.draw(0)
    tracemalloc.start()
    examples = draws.draw(1)[0]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 800 < examples.size < 1200
    assert examples.max() > 10**8
    assert peak < 1 << 20


def test_draws_follow_the_key_and_the_step_alone() -> None:
    first = sampler(1000, 0.05)
    assert np.array_equal(first.draw(7)[0], sampler(1000, 0.05).draw(7)[0])
    assert not np.array_equal(first.draw(7)[0], first.draw(8)[0])
    other = sampler(1000, 0.05, key=RunKey())
    assert not np.array_equal(first.draw(7)[0], other.draw(7)[0])


def test_rates_of_zero_and_one() -> None:
    assert sampler(100, 1.0).draw(0)[0].tolist() == list(range(100))
    assert sampler(100, 0.0).draw(0)[0].tolist() == []


def test_truncated_batches_are_uniform_parts() -> None:
    steps, size, rate, most = 4000, 40, 0.5, 15
    drawn = inclusion(size, rate, steps, 2, max_batch=most)
    sizes = drawn.sum(1)
    assert sizes.max() == most
    expected = np.minimum(np.arange(size + 1), most) @ stats.binom.pmf(
        np.arange(size + 1), size, rate
    )
    assert abs(sizes.mean() - expected) < 5 * sizes.std() / math.sqrt(steps)
    share = expected / size
    z = (drawn.sum(0) - steps * share) / math.sqrt(steps * share * (1 - share))
    assert np.abs(z).max() < 4.5


def test_batches_go_on_from_the_present_step() -> None:
    draws, step = sampler(100, 0.1), 5
    batches = PoissonBatches(draws, 3, lambda: step)
    assert len(batches) == 3
    assert list(batches) == [draws.draw(s)[0].tolist() for s in (5, 6, 7)]
    step = 8
    assert list(batches) == [draws.draw(s)[0].tolist() for s in (8, 9, 10)]


def test_days_are_drawn_one_after_the_other() -> None:
    phases = day_phases([0, 100, 100, 400, 500], batch=20, steps=50)
    assert [(p.first, p.stop, p.steps) for p in phases] == [
        (0, 100, 10),
        (100, 400, 30),
        (400, 500, 10),
    ]
    assert [p.rate for p in phases] == [0.2, 20 / 300, 0.2]
    draws = sampler(500, 0.0, phases=phases)
    for step, (low, high) in {0: (0, 100), 9: (0, 100), 10: (100, 400), 49: (400, 500)}.items():
        examples = draws.draw(step)[0]
        assert low <= examples.min() <= examples.max() < high
    assert draws.phase(50) is None
    assert len(list(PoissonBatches(draws, 60, lambda: 45))) == 5
    with pytest.raises(IndexError, match="found step 50 after its end"):
        draws.draw(50)

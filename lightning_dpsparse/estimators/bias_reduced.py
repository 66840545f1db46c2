"""The subsampled bias-reduced estimator: the bias of a large batch at the cost of small ones.

Projection is not linear, so a small batch's estimate is biased. Let m_j be the expectation of
`projected_mean` on a Poisson sample of 2^j expected examples. A random level k with chance p_k adds
(estimate on 2^(k+1) - average of those on its halves) / p_k to an estimate on 2^first examples:

    m_first + sum_k p_k (m_(k+1) - m_k) / p_k = m_(last+1).

The poster draws batches of fixed size. Here they are Poisson samples, split by fair coins: a half
of level k + 1 is then distributed as a batch of level k, and removing an example moves no other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.stats import binom

from lightning_dpsparse.accounting.events import DpEvent, composed
from lightning_dpsparse.checks import check_number, check_whole
from lightning_dpsparse.estimators.mean import event_of_mean
from lightning_dpsparse.estimators.projection import projected_mean
from lightning_dpsparse.estimators.release import fresh
from lightning_dpsparse.estimators.rows import Array, Mask, Rows, as_rows, sample
from lightning_dpsparse.refused import Refused

# N examples, D columns, K levels

_MOST_EXAMPLES, _MOST_LEVEL = 10**15, 60


@dataclass(frozen=True, kw_only=True)
class Levels:
    """The public choices of a run: which levels there are, and how often each may come."""

    num_examples: int
    """Public number of examples. The largest batch, 2^(last + 1), is not larger."""
    first: int = 0
    """The small batch has 2^first expected examples. The poster has one, that is first = 0."""
    last: int
    steps: int = 1
    """Largest number of estimates of a run."""
    stops_early: float = 0.1
    """Upper bound on the chance that a run ends early because a level came too often."""

    def __post_init__(self) -> None:
        check_whole("num_examples", self.num_examples, most=_MOST_EXAMPLES)
        check_whole("first", self.first, 0)
        check_whole("last", self.last, 0, _MOST_LEVEL)
        check_whole("steps", self.steps, expected="steps >= 1 and 0 < stops_early < 1")
        check_number(
            "stops_early", self.stops_early, above=0, below=1, remedy="The default is 0.1."
        )
        if not 0 <= self.first <= self.last or 2 ** (self.last + 1) > self.num_examples:
            raise Refused(
                f"Expected 0 <= first <= last and 2^(last + 1) <= {self.num_examples} examples, "
                f"found first={self.first} and last={self.last}. Lower the levels."
            )

    def rate(self, level: int) -> float:
        """Rate of the Poisson sample with 2^level expected examples."""
        return 2.0**level / self.num_examples

    def chances(self) -> Array:
        """Chances p_k ~ 2^-k of the levels k = first .. last."""
        weights_K = 2.0 ** -np.arange(self.last - self.first + 1)
        chances_K: Array = weights_K / weights_K.sum()
        return chances_K

    def caps(self) -> list[int]:
        """How often each level may come. By a union bound, `steps` draws seldom reach a cap."""
        chances_K = self.chances()
        unlikely = self.stops_early / chances_K.size
        # The least c with P(Binomial(steps, p_k) >= c) <= unlikely; no more than can come.
        caps_K = binom.isf(unlikely, self.steps, chances_K).astype(int) + 1
        return [int(cap) for cap in np.clip(caps_K, 1, self.steps)]


def draw_levels(levels: Levels, noise: np.random.Generator | None = None) -> list[int]:
    """The levels of a run, up to its random stopping time. They depend on no data.

    The run ends after `steps` estimates, or after the one with which a level reaches its cap: a
    next one is drawn only if it can be paid for whatever its level. Whether step t is taken
    depends on levels before t alone, so each estimate that is made keeps its expectation.
    """
    source, chances_K, left_K = fresh(noise), levels.chances(), levels.caps()
    drawn: list[int] = []
    while len(drawn) < levels.steps and min(left_K) > 0:
        k = int(source.choice(chances_K.size, p=chances_K))
        left_K[k] -= 1
        drawn.append(levels.first + k)
    return drawn


def bias_reduced_mean(
    vectors_ND: Rows,
    level: int,
    levels: Levels,
    *,
    clip_norm: float,
    max_nonzeros: int,
    noise_multiplier: float,
    noise: np.random.Generator | None = None,
) -> Array:
    """One estimate, at a level that `draw_levels` drew.

    Error: its bias is that of `projected_mean` on all examples (at the largest batch),
    L (s ln(d) ln(1/delta))^(1/4) / sqrt(epsilon n); its root mean square does not fall with n:
    L (s ln(d) ln(1/delta))^(1/4) / sqrt(epsilon), up to sqrt(ln n) and first = 0, so it is for
    many steps of an optimizer, and its tails are heavy. (The root mean square is this package's own
    sum over levels; the poster states none.) Dense in the D columns.
    Reference: the poster, Subsampled Bias-Reduced Gradient Estimator; Blanchet and Glynn 2015.
    """
    source, rows_ND = fresh(noise), as_rows(vectors_ND)
    return estimate_on(
        rows_ND,
        *draw_samples(rows_ND.shape[0], level, levels, source),
        level,
        levels,
        clip_norm=clip_norm,
        max_nonzeros=max_nonzeros,
        noise_multiplier=noise_multiplier,
        noise=source,
    )


def draw_samples(
    num_rows: int, level: int, levels: Levels, noise: np.random.Generator
) -> tuple[Mask, Mask, Mask]:
    """The two halves of the batch and, drawn independently, the small batch: Poisson samples."""
    in_batch_N = sample(num_rows, levels.rate(level + 1), noise)
    coins_N = sample(num_rows, 0.5, noise)
    in_small_N = sample(num_rows, levels.rate(levels.first), noise)
    return in_batch_N & coins_N, in_batch_N & ~coins_N, in_small_N


def estimate_on(
    rows_ND: Rows,
    in_first_half_N: Mask,
    in_second_half_N: Mask,
    in_small_N: Mask,
    level: int,
    levels: Levels,
    *,
    clip_norm: float,
    max_nonzeros: int,
    noise_multiplier: float,
    noise: np.random.Generator,
) -> Array:
    """The estimate on given samples: (batch - (half + half) / 2) / p_level + small."""

    def mean_of(drawn_N: Mask, exponent: int) -> Array:
        return projected_mean(
            rows_ND[drawn_N],
            divisor=2.0**exponent,
            clip_norm=clip_norm,
            max_nonzeros=max_nonzeros,
            noise_multiplier=noise_multiplier,
            noise=noise,
        )

    batch_D = mean_of(in_first_half_N | in_second_half_N, level + 1)
    halves_D = (mean_of(in_first_half_N, level) + mean_of(in_second_half_N, level)) / 2.0
    chance = float(levels.chances()[level - levels.first])
    return (batch_D - halves_D) / chance + mean_of(in_small_N, levels.first)


def event_of_bias_reduced(noise_multiplier: float, levels: Levels) -> DpEvent:
    """The privacy event that a run is charged with before its levels are drawn.

    It charges every step and every cap:
    steps x Poisson(2^first / n, Gaussian(sigma)), the small batches, and for every level k
    cap_k x Poisson(2^(k+1) / n, Gaussian(sigma / sqrt(2))): an example of the batch is in it and in
    one half, which are two sums of noise sigma that see the same sample. Which half is a coin of
    the example's own; given the coins, the pair is this event, and hiding them only helps.

    Guarantees: an upper bound for every realisation. Levels and stopping time depend on no data, so
    they may be known; given them, the run is a part of what is charged here. (The poster charges
    a random budget by fully adaptive composition instead: Whitehouse et al. 2023.)
    """
    pair = noise_multiplier / math.sqrt(2.0)
    small = event_of_mean(noise_multiplier, rate=levels.rate(levels.first))
    batches = [
        (event_of_mean(pair, rate=levels.rate(level + 1)), cap)
        for level, cap in zip(range(levels.first, levels.last + 1), levels.caps())
    ]
    return composed([(small, levels.steps), *batches])

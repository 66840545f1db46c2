"""Rows chosen with Gumbel noise: as if every row of every table had a score and a draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from lightning_dpsparse.engine.lookups import Bags, Layout, Lookup
from lightning_dpsparse.engine.mechanism import BatchReads, RowChoice
from lightning_dpsparse.engine.step_inputs import Ranks
from lightning_dpsparse.mechanisms.exponential import (
    ExponentialSelection,
    _distinct,
    _largest_gumbels,
    _not_among,
)
from lightning_dpsparse.noise.keys import RunKey, Stream
from lightning_dpsparse.noise.sources import FastNoise

NOISE = FastNoise(RunKey.fixed(7))
ALONE = Ranks(2, 0, lambda tensor: None)


def uniform(count: int, part: int, step: int = 0) -> Tensor:
    return NOISE.uniform(count, Stream("test", "t", step, part=part), torch.device("cpu"))


# ---- the largest of many draws, without the many -------------------------------------------------


def test_the_largest_of_many_gumbel_draws() -> None:
    """Every order statistic has its distribution: KS against the top of dense draws."""
    total, times = 60, 2000
    generator = torch.Generator().manual_seed(0)
    dense = -torch.rand(times, total, generator=generator, dtype=torch.float64).log()
    dense = (-dense.log()).topk(5).values
    quick = torch.stack([_largest_gumbels(total, uniform(5, 0, step)) for step in range(times)])
    assert (quick[:, 1:] <= quick[:, :-1]).all()
    for j in range(5):  # ten tests at 1e-5: one false alarm in ten thousand keys
        assert stats.ks_2samp(quick[:, j].numpy(), dense[:, j].numpy()).pvalue > 1e-5
        gaps = (quick[:, 0] - quick[:, j]).numpy(), (dense[:, 0] - dense[:, j]).numpy()
        assert stats.ks_2samp(*gaps).pvalue > 1e-5


def test_all_of_the_draws_are_all_of_the_draws() -> None:
    """With as many as there are, sorting the others' draws is the same thing."""
    quick = torch.cat([_largest_gumbels(8, uniform(8, 0, step)) for step in range(3000)])
    assert stats.kstest(quick.numpy(), "gumbel_r").pvalue > 1e-5


@pytest.mark.parametrize(("total", "count"), [(5, 5), (9, 3), (40, 3), (7, 1), (6, 0)])
def test_distinct_numbers_are_distinct_and_all_alike(total: int, count: int) -> None:
    times = 1000
    hits = np.zeros(total)
    first = np.zeros(total)
    for step in range(times):
        drawn = _distinct(total, count, lambda size, part, s=step: uniform(size, part, s))  # type: ignore[misc]
        assert drawn.numel() == count == drawn.unique().numel()
        assert not count or 0 <= int(drawn.min()) <= int(drawn.max()) < total
        hits[drawn.numpy()] += 1
        first[drawn[:1].numpy()] += 1
    # Binomial(times, p): five deviations, for at most 80 numbers in all.
    for found, p in ((hits, count / total), (first, min(count, 1) / total)):
        assert np.abs(found - times * p).max() <= 5 * math.sqrt(times * p * (1 - p)) + 1e-9


def test_distinct_numbers_come_from_more_draws_where_some_repeat() -> None:
    """A source that repeats itself at first: the numbers that are missing come from later parts."""

    def stuck(count: int, part: int) -> Tensor:
        return uniform(count, part) if part > 1 else torch.full((count,), 0.5, dtype=torch.float64)

    drawn = _distinct(100, 6, stuck)
    assert drawn.unique().numel() == 6
    assert int(drawn[0]) == 50


@pytest.mark.parametrize("read", [[], [0], [9], [0, 1, 2], [3, 4, 7], [0, 2, 4, 6, 8], [1, 9]])
def test_places_fall_on_all_rows_that_nobody_read(read: list[int]) -> None:
    others = sorted(set(range(10)) - set(read))
    found = _not_among(torch.tensor(read, dtype=torch.int64), torch.arange(len(others)))
    assert found.tolist() == others


# ---- the choice as a whole -----------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """What the mechanism asks of a read."""

    table_names: Sequence[str]
    shard_offsets: Sequence[tuple[int, int]]
    order_B: Tensor | None = None
    has_whole_rows: bool = True
    layout: Any = None
    bags: Any = None
    state: Any = None


def lookup(layout: Layout, bags: list[list[int]], gradient_BE: Any) -> Lookup:
    """Bag f * B + b holds feature f of example b."""
    ids = torch.tensor([i for bag in bags for i in bag], dtype=torch.int64)
    offsets = torch.tensor([0, *np.cumsum([len(bag) for bag in bags])])
    return Lookup(Bags(layout, ids, offsets), torch.as_tensor(gradient_BE, dtype=torch.float64))


# Two examples. Kernel one: rows 0 to 3 and 4 to 6, of which 0, 2 and 5 are read. Kernel two: many
# rows, two of them read.
ONE = Layout((0, 1), (1, 2), (4, 3))
TWO = Layout((0,), (1,), (9,))
READS = [Kernel(["a", "b"], [(0, 0), (0, 0)]), Kernel(["c"], [(0, 0)])]
LOOKUPS = [
    lookup(ONE, [[0, 0], [2], [1], []], [[0.3, 0.6, 0.8], [0.7, 5.0, 5.0]]),
    lookup(TWO, [[8], [8, 1]], [[0.2], [-9.0]]),
]
# Of row 0 example 0 has 2 x 0.3, of row 5 it has (0.6, 0.8); example 1 has more than Delta twice.
SCORES = [[0.6, 0.0, 0.7, 0.0, 0.0, 1.0, 0.0], [0.0, 1.0, *[0.0] * 6, 1.2]]


def asked(
    mechanism: ExponentialSelection, noise: float, step: int = 0, **more: Any
) -> list[RowChoice]:
    values: dict[str, Any] = {
        "reads": READS,
        "lookups": LOOKUPS,
        "first_of_unit_B": None,
        "ranks": ALONE,
    }
    values |= {"device": torch.device("cpu"), "expected_batch": 2.0, **more}
    return mechanism.choose_rows(
        BatchReads(noise=NOISE, noise_multiplier=noise, step=step, **values)
    )


def rows_of(answers: list[RowChoice], lookups: Sequence[Lookup] = LOOKUPS) -> list[list[int]]:
    """All rows that take part, per kernel; read and unread ones must not meet."""
    found = []
    for answer, look in zip(answers, lookups):
        row_U, others = look.bags.runs.row_U, answer.unread_rows_V
        assert not set(row_U.tolist()) & set(others.tolist())
        assert (others[1:] > others[:-1]).all()
        found.append(sorted([*answer.kept.row_U.tolist(), *others.tolist()]))
    return found


def inclusion(scores: list[float], scale: float, k: int) -> np.ndarray:
    """P(row among the k largest of score + Gumbel(scale)): k draws without replacement."""
    weight = np.exp(np.array(scores) / scale)
    chance = np.zeros(len(scores))
    for order in permutations(range(len(scores)), k):
        p, left = 1.0, float(weight.sum())
        for row in order:
            p, left = p * weight[row] / left, left - weight[row]
        chance[list(order)] += p
    return chance


@pytest.mark.parametrize(("k", "ratio"), [(1, 1.0), (3, 0.5)])
def test_rows_are_chosen_as_if_all_had_a_draw(k: int, ratio: float) -> None:
    """Sixteen rows of two kernels, five of them read: exact probabilities for every row."""
    mechanism, times = ExponentialSelection(num_rows=k, noise_ratio=ratio), 1200
    # sigma1 = ratio sigma2 and sigma1^-2 + sigma2^-2 = sigma^-2, with sigma = 0.5; Gumbel noise of
    # scale Delta / e0 with e0 = 2 / (sigma1 sqrt(k)) and Delta = 1.
    first = 0.5 * math.sqrt(1 + ratio**2)
    expected = inclusion([*SCORES[0], *SCORES[1]], first * math.sqrt(k) / 2, k)
    assert expected.max() / expected.min() > 1.5  # scores matter, and so does noise
    counts = np.zeros(16)
    for step in range(times):
        one, two = rows_of(asked(mechanism, 0.5, step))
        rows = [*one, *(7 + row for row in two)]
        assert len(rows) == k
        counts[rows] += 1
    # Binomial: 4.5 deviations for each of 16 rows, a false alarm in ten thousand keys.
    deviation = np.sqrt(times * expected * (1 - expected))
    assert (np.abs(counts - times * expected) < 4.5 * deviation).all()
    # Rows that nobody read are alike, and together they are seen better than one by one.
    for rows in ([1, 3, 4, 6], [7, *range(9, 15)]):
        share = expected[rows].sum() / k
        spread = math.sqrt(times * k * share * (1 - share))
        assert abs(counts[rows].sum() - times * k * share) < 4.5 * spread


def test_a_kernel_that_read_nothing_takes_part() -> None:
    empty = lookup(TWO, [[], []], np.zeros((2, 1)))
    mechanism = ExponentialSelection(num_rows=4)
    for step in range(50):
        answers = asked(mechanism, 5.0, step, reads=READS[1:], lookups=[empty])
        assert len(rows_of(answers, [empty])[0]) == 4


def test_fewer_rows_than_asked_for_are_all_taken() -> None:
    found = rows_of(asked(ExponentialSelection(num_rows=40), 1.0))
    assert found == [list(range(7)), list(range(9))]


@pytest.mark.parametrize(
    ("k", "expected"), [(1, [[], [8]]), (3, [[5], [1, 8]]), (5, [[0, 2, 5], [1, 8]])]
)
def test_without_noise_the_largest_scores_are_chosen(k: int, expected: list[list[int]]) -> None:
    assert rows_of(asked(ExponentialSelection(num_rows=k), 0.0)) == expected


def test_steps_and_kernels_draw_apart() -> None:
    mechanism = ExponentialSelection(num_rows=3)
    found = {str(rows_of(asked(mechanism, 50.0, step))) for step in range(30)}
    assert len(found) > 25  # 560 sets of three rows, nearly alike
    assert rows_of(asked(mechanism, 50.0, 3)) == rows_of(asked(mechanism, 50.0, 3))
    twins = [LOOKUPS[1], LOOKUPS[1]]
    reads = [READS[1], Kernel(["c"], [(9, 0)])]  # another piece of the same table
    pairs = [
        rows_of(asked(mechanism, 50.0, s, reads=reads, lookups=twins), twins) for s in range(40)
    ]
    assert sum(len(one) == len(two) for one, two in pairs) == 0  # three rows do not halve
    assert sum(bool(set(one) & set(two)) for one, two in pairs) < 30


# ---- what one unit can do ------------------------------------------------------------------------

bag = st.lists(st.integers(0, 3), max_size=3)
size = st.one_of(
    st.floats(-3, 3, width=32), st.sampled_from([1e20, 1e200, math.inf, -math.inf, math.nan])
)
example = st.tuples(bag, bag, st.lists(size, min_size=3, max_size=3))
SHARED = Layout((0, 0), (1,), (4,))


def scores(examples: list[Any], leaders: list[int], clip: float) -> Tensor:
    """Of all four rows, without noise. Two features share the table."""
    bags = [e[0] for e in examples] + [e[1] for e in examples]
    gradients = np.array([e[2][:2] for e in examples]).reshape(len(examples), 2)
    look = lookup(SHARED, bags, gradients)
    question = BatchReads(
        [Kernel(["a"], [(0, 0)])],
        [look],
        torch.tensor(leaders, dtype=torch.int64),
        ALONE,
        NOISE,
        0.0,
        2.0,
        0,
        torch.device("cpu"),
    )
    found = torch.zeros(4, dtype=torch.float64)
    mechanism = ExponentialSelection(num_rows=1, score_clip=clip)
    found[look.bags.runs.row_U] = mechanism._noisy_scores(question.reads[0], look, question).score_U
    return found


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    units=st.lists(st.lists(example, min_size=1, max_size=3), min_size=1, max_size=3),
    removed=st.integers(0, 2),
    clip=st.sampled_from([0.25, 1.0]),
)
def test_a_unit_raises_every_score_by_at_most_delta(
    units: list[list[Any]], removed: int, clip: float
) -> None:
    """Units of one to three examples, huge and broken gradients too."""

    def of(some: list[list[Any]]) -> Tensor:
        starts = np.cumsum([0, *(len(unit) for unit in some)])
        leaders = [int(s) for s, unit in zip(starts, some) for _ in unit]
        return scores([e for unit in some for e in unit], leaders, clip)

    rest = [unit for i, unit in enumerate(units) if i != removed % len(units)]
    raised = of(units) - of(rest)
    assert (raised >= -1e-9).all()
    assert (raised <= clip * (1 + 1e-9)).all()


def test_the_bound_is_reached_and_lookups_of_one_row_add_up() -> None:
    """Three lookups of row 1 by one example, over two features: 0.1 + 0.1 + 0.3."""
    gentle = ([1, 1], [1, 2], [0.1, 0.3, 0.0])
    assert scores([gentle], [0], 1.0).tolist() == pytest.approx([0.0, 0.5, 0.3, 0.0])
    wild = ([1], [], [1e30, 0.0, 0.0])
    assert scores([wild], [0], 1.0).tolist() == [0.0, 1.0, 0.0, 0.0]
    assert scores([gentle, gentle], [0, 0], 1.0).tolist() == pytest.approx([0.0, 1.0, 0.6, 0.0])
    assert scores([gentle, wild], [0, 1], 1.0).tolist() == pytest.approx([0.0, 1.5, 0.3, 0.0])


@pytest.mark.parametrize("name", ["num_rows", "noise_ratio", "score_clip"])
def test_settings_that_make_no_sense_are_refused(name: str) -> None:
    make: Callable[..., Any] = ExponentialSelection
    with pytest.raises(ValueError, match=f"Expected {name} > 0, found 0"):
        make(**({"num_rows": 3} | {name: 0}))

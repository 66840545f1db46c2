"""DP-AdaFEST on paper: its settings, its map, and which rows pass how often."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_dpsparse import AdaFEST
from lightning_dpsparse.engine.lookups import Bags, Layout
from lightning_dpsparse.engine.mechanism import BatchReads, RowChoice
from lightning_dpsparse.engine.step_inputs import Read, Table
from lightning_dpsparse.mechanisms.adafest import (
    survival,
    threshold_for_false_positives,
    threshold_for_half_survival,
)
from lightning_dpsparse.noise.keys import RunKey
from lightning_dpsparse.noise.sources import FastNoise
from tests.support.row_choice import PaperRead, ask, naive_map, paper_read, rows_read

KEY = RunKey.fixed(21)
Z = 4.5
"""Standard errors that are allowed: 7e-6 for one comparison, 6e-3 for all 900 of this file."""


# ---- settings ------------------------------------------------------------------------------------


def test_survival_is_a_normal_tail() -> None:
    assert survival(1.96, 1.0) == pytest.approx(0.0249979, rel=1e-5)
    assert survival(1.96 * 0.5, 0.5) == pytest.approx(0.0249979, rel=1e-5)  # not the variance
    assert survival(3.0, 2.0, contribution=4.0) == pytest.approx(0.6914625, rel=1e-6)
    assert survival(6.0, 1.0) == pytest.approx(9.86588e-10, rel=1e-5)  # no cancellation
    assert [survival(1.0, 0.0, contribution=c) for c in (0.5, 1.0, 1.5)] == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("per_step", [0.01, 1.0, 1e5])
@pytest.mark.parametrize("stddev", [0.3, 4.0])
def test_as_many_false_positives_as_asked(per_step: float, stddev: float) -> None:
    threshold = threshold_for_false_positives(per_step, 10**6, stddev)
    assert 10**6 * survival(threshold, stddev) == pytest.approx(per_step, rel=1e-6)


@pytest.mark.parametrize("per_step", [0, -1.0, 100, 101])
def test_an_impossible_number_of_false_positives_is_refused(per_step: float) -> None:
    with pytest.raises(ValueError, match="Expected between 0 and 100 false positives"):
        threshold_for_false_positives(per_step, 100, 1.0)


@pytest.mark.parametrize("clip_norm", [0.5, 2.0, 100.0])
def test_half_survival_is_a_half_at_that_many_examples(clip_norm: float) -> None:
    """Seven examples that read the same ten rows, and nothing else."""
    threshold = threshold_for_half_survival(7, 10, clip_norm)
    readers = [set(range(10))] * 7
    contribution = naive_map(readers, clip_norm)[0]
    assert survival(threshold, 0.8, contribution) == pytest.approx(0.5, abs=1e-12)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "found 0 of them"),
        ({"threshold": 1.0, "false_positives": 2.0}, "found 2 of them"),
        ({"threshold": 0.0, "half_survival": 2.0}, "found 2 of them"),
        ({"threshold": 1.0, "noise_ratio": 0.0}, "Expected noise_ratio > 0, found 0.0"),
        ({"threshold": 1.0, "noise_ratio": math.inf}, "Expected noise_ratio > 0, found inf"),
        ({"threshold": 1.0, "noise_ratio": math.nan}, "Expected noise_ratio > 0, found nan"),
        ({"threshold": 1.0, "map_clip_norm": -1.0}, "Expected map_clip_norm > 0, found -1.0"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(kwargs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaFEST(**kwargs)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 5.0, 40.0])
@pytest.mark.parametrize("clip_norm", [1.0, 3.0])
def test_the_two_queries_amount_to_the_plans_noise(ratio: float, clip_norm: float) -> None:
    mechanism = AdaFEST(threshold=1.0, noise_ratio=ratio, map_clip_norm=clip_norm)
    sigma1 = mechanism.map_stddev(0.7931) / clip_norm
    sigma2 = mechanism.gradient_noise(0.7931)
    assert sigma1 / sigma2 == pytest.approx(ratio)
    assert (sigma1**-2 + sigma2**-2) ** -0.5 == pytest.approx(0.7931, rel=1e-12)


def test_the_split_of_the_reference() -> None:
    mechanism = AdaFEST(threshold=1.0)
    assert mechanism.map_stddev(0.7931) == pytest.approx(4.044, abs=5e-4)
    assert mechanism.gradient_noise(0.7931) == pytest.approx(0.8088, abs=5e-5)


TABLES = [Table("ebc.t0.weight", 600, ("a", "b")), Table("ebc.t1.weight", 400, ("c",))]


def test_a_threshold_is_settled_by_the_model_and_its_noise() -> None:
    given = AdaFEST(threshold=3.0)
    assert given.resolve_thresholds(2.0, TABLES) is given
    wanted = AdaFEST(false_positives=10.0, map_clip_norm=2.0)
    settled = wanted.resolve_thresholds(0.5, TABLES)
    assert (settled.false_positives, settled.half_survival) == (None, None)
    assert settled.threshold is not None
    assert 1000 * survival(settled.threshold, wanted.map_stddev(0.5)) == pytest.approx(10.0)
    assert (settled.map_clip_norm, settled.noise_ratio) == (2.0, 5.0)
    half = AdaFEST(half_survival=6.0, table_thresholds={"t1": 9.0}).resolve_thresholds(0.5, TABLES)
    assert half.threshold == pytest.approx(6 / math.sqrt(3))  # three features, a row each
    assert half.table_thresholds == {"t1": 9.0}


# ---- the map -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Watched(AdaFEST):
    """Writes down V before noise: {(read, row): value}."""

    seen: dict[tuple[int, int], float] = field(default_factory=dict)

    def _passing(self, bags: Bags, read: Read, sums_U: Tensor, question: BatchReads) -> RowChoice:
        number = list(question.reads).index(read)
        rows = zip(bags.runs.row_U.tolist(), sums_U.tolist())
        self.seen.update({(number, row): value for row, value in rows if value})
        return super()._passing(bags, read, sums_U, question)


# Two kernels: features 0 and 1 share a table in the first, features 2 and 3 have theirs.
FIRST, SECOND = Layout((0, 0), (2,), (5,)), Layout((0, 1), (2, 2), (3, 4))


def map_of(
    examples: list[Any], sizes: list[int] | None, clip_norm: float
) -> dict[tuple[int, int], float]:
    """What AdaFEST adds up; `sizes` are the examples of each user."""
    reads = [
        PaperRead(
            paper_read(FIRST, [e[:2] for e in examples]).bags,
            ["first.weight"],
            [(0, 0)],
        ),
        paper_read(SECOND, [e[2:] for e in examples]),
    ]
    first_of_unit_B = None
    if sizes is not None:
        first_of_unit_B = torch.tensor(
            [sum(sizes[:u]) for u, size in enumerate(sizes) for _ in range(size)]
        )
    watched = Watched(threshold=1.0, map_clip_norm=clip_norm)
    watched.choose_rows(ask(reads, FastNoise(KEY), 0.0, first_of_unit_B=first_of_unit_B))
    return watched.seen


def distance(one: dict[Any, float], two: dict[Any, float]) -> float:
    return math.sqrt(sum((one.get(k, 0.0) - two.get(k, 0.0)) ** 2 for k in {*one, *two}))


bag = lambda rows: st.lists(st.integers(0, rows - 1), max_size=4)  # noqa: E731


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    users=st.lists(
        st.lists(st.tuples(bag(5), bag(5), bag(3), bag(4)), min_size=1, max_size=3),
        min_size=1,
        max_size=4,
    ),
    removed=st.integers(0, 3),
    clip_norm=st.sampled_from([0.3, 1.0, 5.0]),
    are_users=st.booleans(),
)
def test_removing_one_unit_moves_the_map_by_at_most_its_clip_norm(
    users: list[Any], removed: int, clip_norm: float, are_users: bool
) -> None:
    if not are_users:
        users = [[example] for user in users for example in user]
    removed %= len(users)
    rest = [user for u, user in enumerate(users) if u != removed]

    def whole(some: list[Any]) -> dict[tuple[int, int], float]:
        examples = [example for user in some for example in user]
        return map_of(examples, [len(user) for user in some] if are_users else None, clip_norm)

    moved = distance(whole(users), whole(rest) if rest else {})
    assert moved <= clip_norm * (1 + 1e-6)
    # And it is exactly what the unit's own rows come to.
    rows = {
        (number, row)
        for example in users[removed]
        for number, layout, part in ((0, FIRST, example[:2]), (1, SECOND, example[2:]))
        for row in rows_read(layout, [part])[0]
    }
    assert moved == pytest.approx(min(clip_norm, math.sqrt(len(rows))), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("clip_norm", [0.3, 1.0, 5.0, 7.0])
def test_26_rows_in_26_tables_are_clipped_as_one(clip_norm: float) -> None:
    layout = Layout(tuple(range(13)), (2,) * 13, (4,) * 13)
    names = [f"a{t}.weight" for t in range(13)], [f"b{t}.weight" for t in range(13)]
    reads = [paper_read(layout, [[[1]] * 13], table_names=n) for n in names]
    watched = Watched(threshold=1.0, map_clip_norm=clip_norm)
    watched.choose_rows(ask(reads, FastNoise(KEY), 0.0))
    assert len(watched.seen) == 26
    assert distance(watched.seen, {}) == pytest.approx(min(clip_norm, math.sqrt(26)), rel=1e-6)


def test_a_row_that_is_cut_by_columns_counts_once() -> None:
    """Three pieces of one table, all of them here: each has the row, the first one counts it."""
    layout = Layout((0,), (2,), (6,))
    reads = [
        paper_read(layout, [[[1, 4]], [[4]]], shard_offsets=[(0, 2 * c)], has_whole_rows=False)
        for c in range(3)
    ]
    watched = Watched(threshold=1.0, map_clip_norm=1.0)
    watched.choose_rows(ask(reads, FastNoise(KEY), 0.0))
    half, whole = 1 / math.sqrt(2), 1 + 1 / math.sqrt(2)
    expected = {(r, row): v for r in range(3) for row, v in ((1, half), (4, whole))}
    assert watched.seen == pytest.approx(expected)

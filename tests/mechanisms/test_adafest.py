"""DP-AdaFEST on paper: its settings, its map, and which rows pass how often."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_dpsparse import AdaFEST
from lightning_dpsparse.engine.draws import StackNoise
from lightning_dpsparse.engine.lookups import Bags, Layout
from lightning_dpsparse.engine.mechanism import Answer, Question
from lightning_dpsparse.engine.read import Read, Table
from lightning_dpsparse.mechanisms.adafest import (
    survival,
    threshold_for_false_positives,
    threshold_for_half_survival,
)
from lightning_dpsparse.noise.keys import RunKey, Stream
from lightning_dpsparse.noise.sources import FastNoise, NoiseSource, RowNoise
from tests.selecting import Example, PaperRead, ask, naive_map, paper_read, rows_read

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
    assert given.settled(2.0, TABLES) is given
    wanted = AdaFEST(false_positives=10.0, map_clip_norm=2.0)
    settled = wanted.settled(0.5, TABLES)
    assert (settled.false_positives, settled.half_survival) == (None, None)
    assert settled.threshold is not None
    assert 1000 * survival(settled.threshold, wanted.map_stddev(0.5)) == pytest.approx(10.0)
    assert (settled.map_clip_norm, settled.noise_ratio) == (2.0, 5.0)
    half = AdaFEST(half_survival=6.0, table_thresholds={"t1": 9.0}).settled(0.5, TABLES)
    assert half.threshold == pytest.approx(6 / math.sqrt(3))  # three features, a row each
    assert half.table_thresholds == {"t1": 9.0}


# ---- the map -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Watched(AdaFEST):
    """Writes down V before noise: {(read, row): value}."""

    seen: dict[tuple[int, int], float] = field(default_factory=dict)

    def _passing(self, bags: Bags, read: Read, sums_U: Tensor, question: Question) -> Answer:
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
    leader_B = None
    if sizes is not None:
        leader_B = torch.tensor(
            [sum(sizes[:u]) for u, size in enumerate(sizes) for _ in range(size)]
        )
    watched = Watched(threshold=1.0, map_clip_norm=clip_norm)
    watched.answer(ask(reads, FastNoise(KEY), 0.0, leader_B=leader_B))
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
    watched.answer(ask(reads, FastNoise(KEY), 0.0))
    assert len(watched.seen) == 26
    assert distance(watched.seen, {}) == pytest.approx(min(clip_norm, math.sqrt(26)), rel=1e-6)


def test_a_row_that_is_cut_by_columns_counts_once() -> None:
    """Three pieces of one table, all of them here: each has the row, the first one counts it."""
    layout = Layout((0,), (2,), (6,))
    reads = [
        paper_read(layout, [[[1, 4]], [[4]]], corners=[(0, 2 * c)], has_whole_rows=False)
        for c in range(3)
    ]
    watched = Watched(threshold=1.0, map_clip_norm=1.0)
    watched.answer(ask(reads, FastNoise(KEY), 0.0))
    half, whole = 1 / math.sqrt(2), 1 + 1 / math.sqrt(2)
    expected = {(r, row): v for r in range(3) for row, v in ((1, half), (4, whole))}
    assert watched.seen == pytest.approx(expected)


# ---- who passes ----------------------------------------------------------------------------------

COPIES, STEPS = 10, 400
"""The same seven and five rows, and the same readers, ten times over: quicker than ten times as
many steps."""
LAYOUT = Layout((0, 1, 0), (2, 2), (7 * COPIES, 5 * COPIES))
SMALL = Layout((0, 1, 0), (2, 2), (7, 5))
EXAMPLES: list[Example] = [
    [[1], [2], []],
    [[1, 1, 3], [2, 0], [1, 4]],
    [[0, 1], [4], [0]],
    [[6], [], [6, 1]],
    [[], [], []],
]
COPIED = [
    [[i + 7 * c for i in f0], [i + 5 * c for i in f1], [i + 7 * c for i in f2]]
    for c in range(COPIES)
    for f0, f1, f2 in EXAMPLES
]
SELECTED = [0, 1, 2, 5, 6, 9, 10]
SIGMA, RATIO, C1 = 0.105, 3.0, 1.5
STDDEV = C1 * SIGMA * math.sqrt(1 + RATIO**2)  # sigma1 C1 = 0.498: its square is another number


def copied(rows: list[int]) -> Tensor:
    """Rows of the small tables in all copies, sorted: (rows, copies) before they are flattened."""
    first = [[r + 7 * c for c in range(COPIES)] for r in rows if r < 7]
    second = [[r - 7 + 7 * COPIES + 5 * c for c in range(COPIES)] for r in rows if r >= 7]
    return torch.tensor(first + second)


def passes(mechanism: AdaFEST, noise: NoiseSource, selected_R: Tensor | None) -> Tensor:
    """Whether each row passed in each step."""
    read = paper_read(LAYOUT, COPIED, selected_R=selected_R)
    question, row_U = ask([read], noise, SIGMA), read.bags.runs.row_U
    result = torch.zeros(STEPS, LAYOUT.first_row[-1], dtype=torch.float64)
    for step in range(STEPS):
        (answer,) = mechanism.answer(replace(question, step=step))
        assert torch.isin(answer.kept.row_U, row_U).all()
        assert answer.others_V.diff().gt(0).all()
        assert not torch.isin(answer.others_V, row_U).any()  # each row once
        result[step, answer.kept.row_U] = 1.0
        result[step, answer.others_V] = 1.0
    return result


@pytest.mark.parametrize("source", [FastNoise, RowNoise])
@pytest.mark.parametrize(
    ("selected", "thresholds"), [(None, {}), (None, {"t1": 0.25}), (SELECTED, {"*t[1-9].w*": 0.25})]
)
def test_rows_pass_with_their_probability(
    source: Any, selected: list[int] | None, thresholds: dict[str, float]
) -> None:
    """P(V + N(0, (sigma1 C1)^2) >= tau) for every row: read once, often or never."""
    mechanism = AdaFEST(
        threshold=0.7, table_thresholds=thresholds, map_clip_norm=C1, noise_ratio=RATIO
    )
    among = None if selected is None else set(selected)
    contribution = naive_map(rows_read(SMALL, EXAMPLES, among), C1)
    selected_R = None if selected is None else copied(selected).flatten().sort().values
    found = passes(mechanism, source(KEY), selected_R)[:, copied(list(range(12)))]
    for row in range(12):
        threshold = 0.25 if thresholds and row >= 7 else 0.7
        z = (threshold - contribution.get(row, 0.0)) / STDDEV
        p = 0.5 * math.erfc(z / math.sqrt(2))
        p = p if among is None or row in among else 0.0
        # Binomial, over all 4,000 coins of a row's copies and over the 400 of each copy: 11
        # comparisons for each of twelve rows in six cases. No tolerance at all where p = 0.
        frequency = found[:, row].mean()
        assert abs(frequency - p) <= Z * math.sqrt(p * (1 - p) / (STEPS * COPIES)), row
        of_each = found[:, row].mean(0)
        assert (of_each - p).abs().max() <= Z * math.sqrt(p * (1 - p) / STEPS), row
        # Copies are independent: the variance of their sum is that of a binomial, whose own
        # deviation over n steps is about sqrt(2 / n) of it, here with some room for small p.
        spread = found[:, row].sum(1).var() - COPIES * p * (1 - p)
        kurtosis = (1 - 6 * p * (1 - p)) / (COPIES * p * (1 - p)) if p else 0.0
        error = COPIES * p * (1 - p) * math.sqrt((2 + kurtosis) / (STEPS - 1))
        assert abs(spread) <= Z * error, row


def test_the_cases_above_are_all_there() -> None:
    """Rows clipped and not, read and not, likely and unlikely to pass."""
    contribution = naive_map(rows_read(SMALL, EXAMPLES), C1)
    assert len(contribution) < 12
    assert {len(rows) for rows in rows_read(SMALL, EXAMPLES)} == {0, 2, 3, 5}  # C1^2 = 2.25
    among_selected = naive_map(rows_read(SMALL, EXAMPLES, set(SELECTED)), C1)
    assert any(among_selected[row] > contribution[row] for row in among_selected)
    assert min(contribution.values()) < 0.7 < max(contribution.values())


class Noted:
    """A real source that writes down the names of all that is drawn from it."""

    def __init__(self, source: NoiseSource) -> None:
        self._source, self.is_by_row, self.streams = source, source.is_by_row, list[Stream]()

    def fill_(self, out_RD: Tensor, stream: Stream, stddev: float = 1.0, **kwargs: Any) -> Tensor:
        self.streams.append(stream)
        return self._source.fill_(out_RD, stream, stddev, **kwargs)

    def uniform(self, count: int, stream: Stream, device: torch.device) -> Tensor:
        self.streams.append(stream)
        return self._source.uniform(count, stream, device)


@pytest.mark.parametrize("source", [FastNoise, RowNoise])
@pytest.mark.parametrize("thresholds", [{}, {"t1": 0.25}], ids=["one", "two"])
def test_no_two_draws_share_a_stream(source: Any, thresholds: dict[str, float]) -> None:
    """Two row blocks of the same tables, read and unread rows, two steps; never the gradient's."""
    noted = Noted(source(KEY))
    mechanism = AdaFEST(threshold=0.7, table_thresholds=thresholds)
    reads = [paper_read(SMALL, EXAMPLES, corners=[(7 * r, 0), (5 * r, 0)]) for r in range(2)]
    for step in range(2):
        mechanism.answer(ask(reads, noted, SIGMA, step))  # type: ignore[arg-type]
    assert len(set(noted.streams)) == len(noted.streams) >= 8
    assert {stream.purpose for stream in noted.streams}.isdisjoint({"gradient", "selection"})


def reads_without_first_table() -> list[PaperRead]:
    """Two rows on four ranks: the last two begin at row 2 and have none. The rest is their own.

    What a kernel draws as one must not be named by the empty piece: two ranks have that.
    """
    layout = Layout((0, 1), (2, 2), (0, 10), is_stacked=True)
    corners = [[(2, 0), (20, 0)], [(2, 0), (30, 0)]]
    return [paper_read(layout, [[[], [1, 4]], [[], [2]]], corners=c) for c in corners]


def test_ranks_that_have_nothing_of_the_first_table_have_their_own_mask() -> None:
    noted = Noted(FastNoise(KEY))
    for read in reads_without_first_table():
        AdaFEST(threshold=0.0).answer(ask([read], noted, 3.0))
    assert len(noted.streams) == 4
    assert len(set(noted.streams)) == 4


def test_ranks_that_have_nothing_of_the_first_table_have_their_own_noise() -> None:
    one, two = (
        StackNoise(
            FastNoise(KEY),
            read.layout.stacks[0],
            read.table_names,
            read.corners,
            read.layout.namesake(read.layout.stacks[0].tables),
        ).fill_(torch.empty(3, 2), "gradient", 0, torch.arange(3))
        for read in reads_without_first_table()
    )
    assert not torch.equal(one, two)


@pytest.mark.parametrize("source", [FastNoise, RowNoise])
def test_pieces_of_a_row_pass_together(source: Any) -> None:
    """A table that is cut by columns: the ranks that hold its pieces draw the same mask."""
    mechanism = AdaFEST(threshold=0.0)
    reads = [
        paper_read(SMALL, EXAMPLES, corners=[(0, 0), (0, 2 * c)], has_whole_rows=False)
        for c in range(2)
    ]
    for step in range(20):
        one, two = mechanism.answer(ask(reads, source(KEY), 5.0, step))
        assert torch.equal(one.kept.row_U, two.kept.row_U)
        assert torch.equal(one.others_V, two.others_V)
        assert 0 < one.kept.row_U.numel() + one.others_V.numel() < 12


def test_without_noise_the_threshold_itself_passes() -> None:
    """V >= tau, and rows that nobody read only if zero passes."""
    read = paper_read(SMALL, [[[1], [], []], [[1], [2], [3]], [[1], [], []]])
    for threshold, kept, others in ((1.0, [1], []), (0.5, [1, 3, 9], []), (0.0, [1, 3, 9], None)):
        mechanism = AdaFEST(threshold=threshold, map_clip_norm=1.0)
        (answer,) = mechanism.answer(ask([read], FastNoise(KEY), 0.0))
        assert answer.kept.row_U.tolist() == kept
        unread = [r for r in range(12) if r not in (1, 3, 9)]
        assert answer.others_V.tolist() == (unread if others is None else others)
    exactly = AdaFEST(threshold=1.0)
    (answer,) = exactly.answer(ask([paper_read(SMALL, [[[6], [], []]])], FastNoise(KEY), 0.0))
    assert answer.kept.row_U.tolist() == [6]

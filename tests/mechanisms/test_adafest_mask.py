"""Who passes AdaFEST's threshold: with what probability, and by whose draws."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dpsparse import AdaFEST
from lightning_dpsparse.engine.draws import StackNoise
from lightning_dpsparse.engine.lookups import Layout
from lightning_dpsparse.noise.keys import RunKey, Stream
from lightning_dpsparse.noise.sources import FastNoise, NoiseSource, RowNoise
from tests.support.row_choice import Example, PaperRead, ask, naive_map, paper_read, rows_read

KEY = RunKey.fixed(21)
Z = 4.5
"""Standard errors that are allowed: 7e-6 for one comparison, 6e-3 for all 900 of this file."""


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
        (answer,) = mechanism.choose_rows(replace(question, step=step))
        assert torch.isin(answer.kept.row_U, row_U).all()
        assert answer.unread_rows_V.diff().gt(0).all()
        assert not torch.isin(answer.unread_rows_V, row_U).any()  # each row once
        result[step, answer.kept.row_U] = 1.0
        result[step, answer.unread_rows_V] = 1.0
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
    reads = [paper_read(SMALL, EXAMPLES, shard_offsets=[(7 * r, 0), (5 * r, 0)]) for r in range(2)]
    for step in range(2):
        mechanism.choose_rows(ask(reads, noted, SIGMA, step))  # type: ignore[arg-type]
    assert len(set(noted.streams)) == len(noted.streams) >= 8
    assert {stream.purpose for stream in noted.streams}.isdisjoint({"gradient", "selection"})


def reads_without_first_table() -> list[PaperRead]:
    """Two rows on four ranks: the last two begin at row 2 and have none. The rest is their own.

    What a kernel draws as one must not be named by the empty piece: two ranks have that.
    """
    layout = Layout((0, 1), (2, 2), (0, 10), is_stacked=True)
    shard_offsets = [[(2, 0), (20, 0)], [(2, 0), (30, 0)]]
    return [paper_read(layout, [[[], [1, 4]], [[], [2]]], shard_offsets=c) for c in shard_offsets]


def test_ranks_that_have_nothing_of_the_first_table_have_their_own_mask() -> None:
    noted = Noted(FastNoise(KEY))
    for read in reads_without_first_table():
        AdaFEST(threshold=0.0).choose_rows(ask([read], noted, 3.0))
    assert len(noted.streams) == 4
    assert len(set(noted.streams)) == 4


def test_ranks_that_have_nothing_of_the_first_table_have_their_own_noise() -> None:
    one, two = (
        StackNoise(
            FastNoise(KEY),
            read.layout.stacks[0],
            read.table_names,
            read.shard_offsets,
            read.layout.stream_table(read.layout.stacks[0].tables),
        ).fill_(torch.empty(3, 2), "gradient", 0, torch.arange(3))
        for read in reads_without_first_table()
    )
    assert not torch.equal(one, two)


@pytest.mark.parametrize("source", [FastNoise, RowNoise])
def test_pieces_of_a_row_pass_together(source: Any) -> None:
    """A table that is cut by columns: the ranks that hold its pieces draw the same mask."""
    mechanism = AdaFEST(threshold=0.0)
    reads = [
        paper_read(SMALL, EXAMPLES, shard_offsets=[(0, 0), (0, 2 * c)], has_whole_rows=False)
        for c in range(2)
    ]
    for step in range(20):
        one, two = mechanism.choose_rows(ask(reads, source(KEY), 5.0, step))
        assert torch.equal(one.kept.row_U, two.kept.row_U)
        assert torch.equal(one.unread_rows_V, two.unread_rows_V)
        assert 0 < one.kept.row_U.numel() + one.unread_rows_V.numel() < 12


def test_without_noise_the_threshold_itself_passes() -> None:
    """V >= tau, and rows that nobody read only if zero passes."""
    read = paper_read(SMALL, [[[1], [], []], [[1], [2], [3]], [[1], [], []]])
    for threshold, kept, others in ((1.0, [1], []), (0.5, [1, 3, 9], []), (0.0, [1, 3, 9], None)):
        mechanism = AdaFEST(threshold=threshold, map_clip_norm=1.0)
        (answer,) = mechanism.choose_rows(ask([read], FastNoise(KEY), 0.0))
        assert answer.kept.row_U.tolist() == kept
        unread = [r for r in range(12) if r not in (1, 3, 9)]
        assert answer.unread_rows_V.tolist() == (unread if others is None else others)
    exactly = AdaFEST(threshold=1.0)
    (answer,) = exactly.choose_rows(ask([paper_read(SMALL, [[[6], [], []]])], FastNoise(KEY), 0.0))
    assert answer.kept.row_U.tolist() == [6]

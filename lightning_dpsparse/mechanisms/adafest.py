"""DP-AdaFEST: rows that enough examples read get noise (Ghazi et al. 2023, arXiv:2311.08357).

A batch reads few rows of a large table, and noise on all others is slow and does harm. So AdaFEST
first asks, with noise, how many examples read each row. Only rows that pass a threshold take part
in the step. Some rows pass that nobody read, which hides who read what; they are found without a
draw for every row (`noise/skipping.py`). Both queries see the same examples and are charged as one
Gaussian. `fest.py` has a variant that chooses among rows selected before training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from statistics import NormalDist
from typing import ClassVar

import torch
from torch import Tensor

from lightning_dpsparse.accounting.events import split_noise
from lightning_dpsparse.checks import check_mapping, check_number
from lightning_dpsparse.engine.contributions import contributions
from lightning_dpsparse.engine.lookups import Bags
from lightning_dpsparse.engine.mechanism import BatchReads, Mechanism, RowChoice
from lightning_dpsparse.engine.rounding import fixed_price
from lightning_dpsparse.engine.rows import found_in
from lightning_dpsparse.engine.state import PublicRows, StepNoise, TableKernel, TableState
from lightning_dpsparse.engine.step_inputs import Read, Table, add_up, renumber, short_name, take
from lightning_dpsparse.mechanisms.selection.state import selected_rows
from lightning_dpsparse.noise.keys import Stream
from lightning_dpsparse.noise.skipping import survivors
from lightning_dpsparse.refused import Refused

# B examples of all ranks, U distinct rows that a kernel read, R rows in a range


def survival(threshold: float, noise_stddev: float, contribution: float = 0.0) -> float:
    """Probability that a row passes: P(contribution + N(0, noise_stddev^2) >= threshold).

    The paper's Appendix B.2 divides by the variance where the standard deviation belongs.

    >>> survival(4.0, 4.0), survival(4.0, 4.0, contribution=4.0)
    (0.15865525393145707, 0.5)
    """
    if noise_stddev == 0:
        return float(contribution >= threshold)
    return 0.5 * math.erfc((threshold - contribution) / (noise_stddev * math.sqrt(2.0)))


def threshold_for_false_positives(per_step: float, num_rows: int, noise_stddev: float) -> float:
    """The threshold that `per_step` of `num_rows` rows pass, as expected, though nobody read them.

    tau = sigma1 C1 Psi^-1(false positives / rows)

    >>> round(threshold_for_false_positives(100, 26_000_000, noise_stddev=4.0), 3)
    17.894
    """
    if not 0 < per_step < num_rows:
        raise Refused(
            f"Expected between 0 and {num_rows:,} false positives a step, found {per_step}. There "
            "are no more rows that may pass."
        )
    return -noise_stddev * NormalDist().inv_cdf(per_step / num_rows)


def threshold_for_half_survival(
    examples: float, rows_per_example: int, map_clip_norm: float = 1.0
) -> float:
    """The threshold that a row passes in half of the steps if `examples` examples always read it.

    tau = n min(1, C1 / sqrt(m)), where every example reads m rows, over all tables.

    >>> round(threshold_for_half_survival(10, rows_per_example=26), 3)
    1.961
    """
    return examples * min(1.0, map_clip_norm / math.sqrt(rows_per_example))


@dataclass(frozen=True, kw_only=True)
class AdaFEST(Mechanism):
    """Updates, with noise, the rows whose noisy number of readers passes a threshold; no others.

    V = sum_b clip(v_b, C1) + N(0, sigma1^2 C1^2), with v_b = 1 on every row that b reads, over all
    tables; rows with V >= tau take part, read or not; g = sum_b clip(g_b on those rows and the
    dense layers, C) + N(0, sigma2^2 C^2). The plan's noise multiplier is that of both together,
    sigma^-2 = sigma1^-2 + sigma2^-2. Any fused optimizer works. Set exactly one of threshold,
    false_positives and half_survival.
    """

    threshold: float | None = None
    """tau: a row is updated if its noisy number of readers V is at least this. The unit is examples
    of a batch, each weighted as map_clip_norm says."""

    false_positives: float | None = None
    """Instead of threshold: the expected number of rows that are updated in a step though nobody
    read them, over all tables that have no threshold of their own."""

    half_survival: float | None = None
    """Instead of threshold: the number of examples of a batch that must read a row for it to be
    updated in half of the steps. It assumes that examples have one id in every feature."""

    table_thresholds: Mapping[str, float] = field(default_factory=dict)
    """tau of single tables, by name. A name may be a pattern as in a shell (user_*), and the first
    match counts."""

    map_clip_norm: float = 1.0
    """C1: the most that one unit may move V, in norm over all rows. An example that reads m rows
    adds C1 / sqrt(m) to each of them, or one if that is less."""

    noise_ratio: float = 5.0
    """sigma1 / sigma2: noise multiplier of V over that of the gradients. A larger ratio spends less
    of the budget on choosing rows. The paper found 5 to 10 best."""

    is_private: ClassVar[bool] = True
    threat_model: ClassVar[str] = (
        "The adversary sees every model on the way, after each step and with it which rows moved, "
        "and knows all other data."
    )

    def __post_init__(self) -> None:
        given = [self.threshold, self.false_positives, self.half_survival]
        if sum(value is not None for value in given) != 1:
            raise Refused(
                "Expected one of threshold, false_positives and half_survival, found "
                f"{sum(value is not None for value in given)} of them. Set exactly one."
            )
        if self.threshold is not None:
            check_number("threshold", self.threshold)
        for name in ("false_positives", "half_survival"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), above=0)
        check_number("map_clip_norm", self.map_clip_norm, above=0, remedy="The default is 1.0.")
        check_number("noise_ratio", self.noise_ratio, above=0, remedy="From 5 to 10 is usual.")
        check_mapping("table_thresholds", self.table_thresholds)
        for table, threshold in self.table_thresholds.items():
            check_number(f"table_thresholds[{table!r}]", threshold)

    def check_tables(self, tables: Sequence[Table]) -> None:
        for pattern in self.table_thresholds:
            if not any(_matches(table.name, pattern) for table in tables):
                raise Refused(
                    f"Expected names of tables in table_thresholds, found {pattern!r}, which "
                    f"matches none of {[table.short_name for table in tables]}. Name one of them."
                )

    def gradient_noise(self, noise_multiplier: float) -> float:
        return split_noise(noise_multiplier, self.noise_ratio)[1]

    def map_stddev(self, noise_multiplier: float) -> float:
        """Standard deviation of the noise on each number of V: sigma1 C1."""
        return split_noise(noise_multiplier, self.noise_ratio)[0] * self.map_clip_norm

    def rows_that_may_pass(self, tables: Sequence[Table]) -> int:
        """Number of rows that use the common threshold."""
        return sum(
            t.num_rows for t in tables if _own_threshold(self.table_thresholds, t.name) is None
        )

    def resolve_thresholds(self, noise_multiplier: float, tables: Sequence[Table]) -> AdaFEST:
        if self.threshold is not None:
            return self
        if self.false_positives is not None:
            if noise_multiplier == 0:
                raise Refused(
                    "Expected noise with false_positives, found noise_multiplier=0: there would be "
                    "none. Set threshold or half_survival."
                )
            threshold = threshold_for_false_positives(
                self.false_positives,
                self.rows_that_may_pass(tables),
                self.map_stddev(noise_multiplier),
            )
        else:
            assert self.half_survival is not None
            num_features = sum(len(table.features) for table in tables)
            threshold = threshold_for_half_survival(
                self.half_survival, num_features, self.map_clip_norm
            )
        return replace(self, threshold=threshold, false_positives=None, half_survival=None)

    def open_table(self, kernel: TableKernel, noise: StepNoise) -> TableState:
        return PublicRows(kernel, noise)

    def choose_rows(self, batch: BatchReads) -> list[RowChoice]:
        """Choose the rows that pass the threshold, by nothing but the ids of the whole batch."""
        return batch.choose_by_ids(self._choose)

    def _choose(self, batch: BatchReads) -> list[RowChoice]:
        """Choose the rows that pass the threshold, from the reads of the whole batch.

        Guarantees: adding or removing one unit moves V, over all tables and ranks together, by at
        most C1 in norm. Every row gets a draw of its own, whether anybody read it or not.
        """
        ranks, reads = batch.ranks, batch.reads
        bags = [read.bags for read in reads]
        pairs = [
            contributions(b, renumber(batch.first_of_unit_B, read.order_B), _among(b, read))
            for b, read in zip(bags, reads)
        ]
        # The norm goes over all tables: every rank counts the rows that it holds, each row once.
        count_B = torch.zeros(ranks.num_examples, device=batch.device)
        for b, read, pair in zip(bags, reads, pairs):
            add_up(count_B, pair.square_norms(_first_columns(b, read)), read.order_B)
        ranks.sum(count_B)
        bound, stddev = self.map_clip_norm, self.map_stddev(batch.noise_multiplier)
        if stddev:
            bound *= 1.0 - fixed_price(stddev, batch.expected_batch)
        weight_B = count_B.rsqrt_().mul_(bound).clamp_max_(1.0)

        return [
            self._passing(b, read, pair.sums(take(weight_B, read.order_B)), batch)
            for b, read, pair in zip(bags, reads, pairs)
        ]

    def _passing(self, bags: Bags, read: Read, sums_U: Tensor, batch: BatchReads) -> RowChoice:
        """Choose the rows of one kernel with V >= tau, whether they were read or not."""
        row_U, layout = bags.runs.row_U, bags.layout
        stddev = self.map_stddev(batch.noise_multiplier)
        keeps, others = [], []
        for span in self._spans(bags, read, is_by_row=batch.noise.is_by_row):
            first, stop = layout.first_row[span.tables.start], layout.first_row[span.tables.stop]
            here, selected_R = slice(None), selected_rows(read)
            if len(span.tables) < len(layout.widths):
                here = slice(*torch.searchsorted(row_U, row_U.new_tensor([first, stop])).tolist())
                selected_R = _between(selected_R, first, stop)
            passes = _all_coins if batch.noise.is_by_row else _few_coins
            rows = _Rows(
                row_U[here] - first if first else row_U[here],
                sums_U[here],
                stop - first,
                None if selected_R is None else selected_R - first,
            )
            keep, found = passes(rows, span, stddev, batch)
            keeps.append(keep)
            others.append(found + first if first else found)
        keep_U = torch.cat(keeps) if len(keeps) > 1 else keeps[0]
        is_among_U = _among(bags, read)
        if is_among_U is not None:
            keep_U &= is_among_U
        unread_rows_V = torch.cat(others) if len(others) > 1 else others[0]
        return RowChoice(bags.runs.only(keep_U), unread_rows_V)

    def _spans(self, bags: Bags, read: Read, *, is_by_row: bool) -> list[_Span]:
        """Groups of neighbouring tables that have one threshold and share a stream of draws.

        All pieces of a table that is cut by columns must get the same draws. So such a table has a
        stream of its own, which is named as if the piece began at the table's first column.
        """
        num_tables = len(bags.layout.widths)
        if read.has_whole_rows and not self.table_thresholds and not is_by_row:
            tables = [range(num_tables)]
        else:
            tables = [range(t, t + 1) for t in range(num_tables)]
        names = [bags.layout.stream_table(span) for span in tables]
        return [
            _Span(
                span,
                read.table_names[name],
                (read.shard_offsets[name][0], 0),
                self._threshold_of(read.table_names[name]),
            )
            for span, name in zip(tables, names)
        ]

    def _threshold_of(self, path: str) -> float:
        own = _own_threshold(self.table_thresholds, path)
        assert self.threshold is not None
        return self.threshold if own is None else own


def _own_threshold(thresholds: Mapping[str, float], path: str) -> float | None:
    """Threshold of the first pattern that matches the table's name or path, or None."""
    for pattern, threshold in thresholds.items():
        if _matches(path, pattern):
            return threshold
    return None


def _matches(path: str, pattern: str) -> bool:
    """Whether a pattern (as in a shell) is for the table at this path, by its path or its name."""
    return fnmatchcase(short_name(path), pattern) or fnmatchcase(path, pattern)


@dataclass(frozen=True)
class _Span:
    """Neighbouring tables of a kernel that have one threshold and share a stream of draws."""

    tables: range
    name: str
    shard_offset: tuple[int, int]
    threshold: float

    def stream(self, purpose: str, step: int, part: int = 0) -> Stream:
        return Stream(purpose, self.name, step, self.shard_offset, part)


@dataclass(frozen=True)
class _Rows:
    """The rows of a span, numbered from the first row of the span."""

    row_U: Tensor
    """Rows that were read, sorted."""
    sums_U: Tensor
    """V without noise, on each row that was read."""
    num_rows: int
    selected_R: Tensor | None
    """Rows that may take part, sorted; None means all rows."""


def _few_coins(rows: _Rows, span: _Span, stddev: float, batch: BatchReads) -> tuple[Tensor, Tensor]:
    """Whether each row that was read passes, and the other rows that pass.

    Every row that was read gets a draw. Among the others it skips from one that passes to the next.
    """
    noise, step = batch.noise, batch.step
    noisy_U = rows.sums_U
    if stddev:
        drawn_U1 = noisy_U.new_empty(noisy_U.numel(), 1)
        noise.fill_(drawn_U1, span.stream("map", step), stddev)
        noisy_U = drawn_U1.view(-1).add_(rows.sums_U)
    keep_U = noisy_U >= span.threshold

    def uniform(count: int, part: int) -> Tensor:
        return noise.uniform(count, span.stream("survivors", step, part), batch.device)

    # Coins are tossed for all rows. Those of rows that were read are dropped: these had a draw.
    selected_R = rows.selected_R
    count = rows.num_rows if selected_R is None else selected_R.numel()
    rows_V = survivors(count, survival(span.threshold, stddev), uniform)
    rows_V = rows_V if selected_R is None else selected_R[rows_V]
    has_own_V = found_in(rows.row_U, rows_V)
    return keep_U, rows_V[~has_own_V] if bool(has_own_V.any()) else rows_V


def _all_coins(rows: _Rows, span: _Span, stddev: float, batch: BatchReads) -> tuple[Tensor, Tensor]:
    """The same as `_few_coins`, with a draw for every row.

    Sources of noise whose draws belong to rows need this. It is slow.
    """
    noisy_R = rows.sums_U.new_zeros(rows.num_rows, 1)
    batch.noise.fill_(noisy_R, span.stream("map", batch.step), stddev)
    noisy_R[rows.row_U, 0] += rows.sums_U
    passes_R = (noisy_R >= span.threshold).squeeze(1)
    keep_U = passes_R[rows.row_U]
    passes_R[rows.row_U] = False
    rows_V = passes_R.nonzero().squeeze(1)
    return keep_U, rows_V if rows.selected_R is None else rows_V[found_in(rows.selected_R, rows_V)]


def _among(bags: Bags, read: Read) -> Tensor | None:
    """Whether each row that was read may take part; None means that all may."""
    selected_R = selected_rows(read)
    return None if selected_R is None else found_in(selected_R, bags.runs.row_U)


def _first_columns(bags: Bags, read: Read) -> Tensor | None:
    """Whether each row that was read is counted on this rank; None means that all are.

    Of a table that is cut by columns, only the piece with the first column counts its rows.
    """
    counts_T = [column == 0 for _, column in read.shard_offsets]
    if all(counts_T):
        return None
    row_U = bags.runs.row_U
    starts = row_U.new_tensor(bags.layout.first_row[1:])
    table_U = torch.bucketize(row_U, starts, right=True)
    return torch.tensor(counts_T, device=row_U.device)[table_U]


def _between(sorted_R: Tensor | None, first: int, stop: int) -> Tensor | None:
    if sorted_R is None:
        return None
    ends = torch.searchsorted(sorted_R, sorted_R.new_tensor([first, stop])).tolist()
    return sorted_R[ends[0] : ends[1]]

"""Exponential selection: the rows with the largest gradients, chosen with Gumbel noise.

AdaFEST chooses rows by how many examples read them. This mechanism chooses by how large the
examples' gradients on a row are, and updates the same number of rows in every step. The rows with
the largest noisy scores are what the exponential mechanism would choose, one row after the other.

Reference: Zhang, Mironov and Hejazinia 2021, Wide Network Learning with Differential Privacy
(arXiv:2103.01294). It is the baseline of Ghazi et al. 2023, Figures 3 and 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_dpsparse.accounting.events import (
    DpEvent,
    composed,
    exponential,
    gaussian,
    split_noise,
)
from lightning_dpsparse.checks import check_number, check_whole
from lightning_dpsparse.engine.contributions import pair_norms
from lightning_dpsparse.engine.lookups import Lookup
from lightning_dpsparse.engine.mechanism import BatchReads, Mechanism, RowChoice
from lightning_dpsparse.engine.state import PublicRows, StepNoise, TableKernel, TableState
from lightning_dpsparse.engine.step_inputs import Read, Table, renumber, short_name
from lightning_dpsparse.noise.keys import Stream
from lightning_dpsparse.refused import Refused

# U distinct rows that a kernel read, V rows that nobody read, k rows that are chosen, W ranks

_MOST_ROWS = 2**31
"""Most rows that a step may choose."""
_HELD_ROWS = 2**20
"""Number of rows whose scores fit into memory in any case."""


@dataclass(frozen=True, kw_only=True)
class ExponentialSelection(Mechanism):
    """Updates k rows of all tables in a step, with noise, and no others.

    score_r = sum_b min(||g_b on row r||, Delta); the k largest of score_r + Gumbel(Delta / e0) take
    part. This equals k choices by the exponential mechanism, one after the other, each of range e0:
    a unit lowers no score, and raises none by more than Delta. Gradients on these rows get noise as
    in AdaFEST. The budget is split as if the choices were a Gaussian query with noise multiplier
    sigma1 = ratio sigma2, so that e0 = 2 / (sigma1 sqrt(k)). The choices are charged as what they
    are.
    """

    num_rows: int
    """k: number of rows, over all tables, that are updated in a step."""

    noise_ratio: float = 1.0
    """sigma1 / sigma2: a larger ratio gives less of the budget to the choices of rows, and more to
    the gradients."""

    score_clip: float = 1.0
    """Delta: the most that one unit may add to a row's score, which is a sum of gradient norms."""

    is_private: ClassVar[bool] = True
    threat_model: ClassVar[str] = (
        "The adversary sees every model on the way, after each step and with it which rows moved, "
        "and knows all other data."
    )

    def __post_init__(self) -> None:
        check_whole("num_rows", self.num_rows, most=_MOST_ROWS, expected="num_rows > 0")
        check_number("noise_ratio", self.noise_ratio, above=0, remedy="The default is 1.0.")
        check_number("score_clip", self.score_clip, above=0, remedy="The default is 1.0.")

    def check_tables(self, tables: Sequence[Table]) -> None:
        total = sum(table.num_rows for table in tables)
        if self.num_rows > max(total, _HELD_ROWS):
            raise Refused(
                f"Expected num_rows of at most the {total:,} rows of all tables, found "
                f"{self.num_rows:,}. Lower it, or use DPSGD, which updates all rows."
            )

    def epsilon_per_row(self, noise_multiplier: float) -> float:
        """epsilon0, the range of each choice.

        In zCDP k choices of range e cost k e^2 / 8, and a Gaussian costs 1 / (2 sigma^2).
        """
        return 2.0 / (split_noise(noise_multiplier, self.noise_ratio)[0] * math.sqrt(self.num_rows))

    def gradient_noise(self, noise_multiplier: float) -> float:
        return split_noise(noise_multiplier, self.noise_ratio)[1]

    def event(self, noise_multiplier: float) -> DpEvent:
        """What the choices and the noisy sum cost together: they see the same sample."""
        if noise_multiplier == 0:
            return gaussian(0.0)
        choice = exponential(self.epsilon_per_row(noise_multiplier))
        noisy_sum = gaussian(self.gradient_noise(noise_multiplier))
        return composed([(choice, self.num_rows), (noisy_sum, 1)])

    def open_table(self, kernel: TableKernel, noise: StepNoise) -> TableState:
        if not kernel.has_whole_rows:
            names = ", ".join(repr(short_name(name)) for name in kernel.table_names)
            raise Refused(
                f"Expected all columns of a row on one rank with {type(self).__name__}, found a "
                f"table cut by columns among {names}. Place it table-wise or row-wise."
            )
        return PublicRows(kernel, noise)

    def choose_rows(self, batch: BatchReads) -> list[RowChoice]:
        """Choose the k rows with the largest noisy scores, over all tables and ranks."""
        if batch.whole_batch is not None:
            raise Refused(
                "Expected the whole batch in one part, found more: "
                f"{type(self).__name__} chooses rows by all its gradients. Leave "
                "max_physical_batch out, or draw fewer examples."
            )
        drawn = [
            self._noisy_scores(read, lookup, batch)
            for read, lookup in zip(batch.reads, batch.lookups)
        ]
        nothing = torch.empty(0, dtype=torch.float64, device=batch.device)
        mine = torch.cat([nothing, *(score for d in drawn for score in (d.score_U, d.score_V))])
        ranks, k = batch.ranks, self.num_rows
        best_WK = mine.new_full((ranks.world_size, k), 0.0)
        best = mine.topk(min(k, mine.numel())).values
        best_WK[ranks.rank] = -torch.inf
        best_WK[ranks.rank, : best.numel()] = best
        ranks.sum(best_WK)
        least = best_WK.flatten().topk(k).values[-1]
        return [
            RowChoice(
                lookup.bags.runs.only(d.score_U >= least),
                d.row_V[d.score_V >= least].sort().values,
            )
            for lookup, d in zip(batch.lookups, drawn)
        ]

    def _noisy_scores(self, read: Read, lookup: Lookup, batch: BatchReads) -> _Scores:
        """Noisy scores of all rows that were read, and the k largest of all other rows."""
        row_U, layout = lookup.bags.runs.row_U, lookup.layout
        pairs = pair_norms(lookup, renumber(batch.first_of_unit_B, read.order_B))
        bounded_P = pairs.norm_P.nan_to_num_(self.score_clip).clamp_max_(self.score_clip).double()
        score_U = bounded_P.new_zeros(row_U.numel()).index_add_(0, pairs.position_P, bounded_P)

        name = layout.stream_table(range(len(layout.widths)))

        def uniform(count: int, what: str, part: int = 0) -> Tensor:
            stream = Stream(
                what, read.table_names[name], batch.step, read.shard_offsets[name], part
            )
            return batch.noise.uniform(count, stream, row_U.device)

        scale = 0.0
        if batch.noise_multiplier:
            scale = self.score_clip / self.epsilon_per_row(batch.noise_multiplier)
        score_U -= scale * (-uniform(row_U.numel(), "scores").log()).log_()
        # Rows that nobody read score zero, and their noise has one distribution. So its largest
        # values have a closed form, and each may belong to any of these rows.
        num_others = layout.first_row[-1] - row_U.numel()
        count = min(self.num_rows, num_others) if scale else 0
        score_V = scale * _largest_gumbels(num_others, uniform(count, "other scores"))
        at_V = _distinct(num_others, count, lambda size, part: uniform(size, "other rows", part))
        return _Scores(score_U, score_V, _not_among(row_U, at_V))


@dataclass(frozen=True)
class _Scores:
    """Noisy scores of one kernel's rows: of all that were read (U), and of some others (V)."""

    score_U: Tensor
    score_V: Tensor
    row_V: Tensor


def _largest_gumbels(total: int, uniform_K: Tensor) -> Tensor:
    """The largest of `total` standard Gumbel draws, in decreasing order.

    For uniforms U, -log of the j-th largest is a sum of E_i / (total - i) with E_i ~ Exp(1), and a
    Gumbel is -log(-log U).
    """
    left_K = total - torch.arange(uniform_K.numel(), device=uniform_K.device)
    return -(-uniform_K.log() / left_K).cumsum(0).log_()


def _distinct(total: int, count: int, uniform: Callable[[int, int], Tensor]) -> Tensor:
    """Draw `count` distinct numbers below `total`, in random order."""
    if total <= 4 * count:
        return uniform(total, 0).argsort()[:count]
    drawn, part = uniform(0, 0).long(), 0
    while True:
        fresh = ((1.0 - uniform(count + 16, part)) * total).long()
        drawn, part = torch.cat([drawn, fresh]), part + 1
        value, order = torch.sort(drawn, stable=True)
        is_first = torch.ones_like(value, dtype=torch.bool)
        is_first[1:] = value[1:] != value[:-1]
        places = order[is_first].sort().values  # where each number was drawn first
        if places.numel() >= count:
            return drawn[places[:count]]


def _not_among(row_U: Tensor, at_V: Tensor) -> Tensor:
    """The rows at these places in the list of all rows, from which `row_U` were left out."""
    gap_U = row_U - torch.arange(row_U.numel(), device=row_U.device)
    return at_V + torch.searchsorted(gap_U, at_V, right=True)

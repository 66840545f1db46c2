"""Synthetic clicks in Criteo's shape, for machines without Criteo's data.

An example is a pure function of (seed, index), so any number of them is made on the fly and the
same seed gives the same data. Ids follow a power law, popular ids change from day to day, and a
teacher model draws the label. The teacher's own probabilities give the best AUC that a model can
reach, so that a measured AUC can be judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from lightning.pytorch.utilities import rank_zero_info
from numpy.typing import NDArray
from typing_extensions import override

from lightning_dpsparse.checks import check_number, check_share, check_whole, check_whole_list
from lightning_dpsparse.data.batch import ClickData, ClickDataset, Clicks
from lightning_dpsparse.hashing import U64, mix, salt, unit
from lightning_dpsparse.refused import Refused

# B examples, F categorical features, M most ids in a bag, C count features

ADAFEST_NUM_ROWS = [
    1472, 577, 82741, 18940, 305, 23, 1172, 633, 3, 9090, 5918, 64300, 3207,
    27, 1550, 44262, 10, 5485, 2161, 3, 56473, 17, 15, 27360, 104, 12934,
]  # fmt: skip
"""Vocabulary sizes of Criteo's 26 features: Ghazi et al. 2023, Table 3."""

NUM_COUNTS = 13
_MOST_EXAMPLES = 2**62
"""Largest number of examples, or of rows of a table."""
_MOST_IDS, _MOST_SEED = 100_000, 2**128
_NUM_PAIRS = 10

# Purposes of hash words. No two kinds of draws share one.
_ID, _LENGTH, _COUNT, _LABEL, _CHURN, _SCRAMBLE, _MAIN, _PAIR, _COUNT_WEIGHT, _WHICH = range(10)


class SyntheticClicks(ClickDataset):
    """Examples `start` to `stop` of an endless stream.

    Args:
        start: Index of the first example.
        stop: Index after the last example.
        num_rows: Rows of each feature's table.
        examples_per_day: How many examples make a day.
        seed: Seed of the stream. The seed of training does not change it.
        zipf: Exponent of the ids' popularity: 0 is uniform, 1.05 resembles Criteo.
        max_ids_per_bag: With 1 every bag holds one id; otherwise bags hold 0 to this many.
        drift: Fraction of the popular places that another id takes over every day.
        signal: Standard deviation of the teacher's logit.
        click_rate: Click rate of an example whose logit is average.
    """

    def __init__(
        self,
        start: int,
        stop: int,
        num_rows: list[int],
        examples_per_day: int,
        seed: int = 0,
        zipf: float = 1.05,
        max_ids_per_bag: int = 1,
        drift: float = 0.0,
        signal: float = 1.5,
        click_rate: float = 0.2,
    ) -> None:
        check_share("drift", drift, remedy="The default is 0.")
        check_number("click_rate", click_rate, above=0, below=1, remedy="The default is 0.2.")
        check_whole_list("num_rows", num_rows, most=_MOST_EXAMPLES)
        if not num_rows:
            raise Refused("Expected num_rows of at least one feature, found none. Name one.")
        check_whole("examples_per_day", examples_per_day, most=_MOST_EXAMPLES)
        expected = "max_ids_per_bag of at least 1"
        check_whole("max_ids_per_bag", max_ids_per_bag, most=_MOST_IDS, expected=expected)
        check_number("zipf", zipf, least=0, remedy="The default is 1.05.")
        check_number("signal", signal, remedy="The default is 1.5.")
        check_whole("seed", seed, -_MOST_SEED, _MOST_SEED)
        check_whole("start", start, 0, _MOST_EXAMPLES)
        check_whole("stop", stop, start, _MOST_EXAMPLES)
        self.start, self.stop, self.num_rows = start, stop, num_rows
        self.examples_per_day, self.seed, self.zipf = examples_per_day, seed, zipf
        self.max_ids_per_bag, self.drift = max_ids_per_bag, drift
        self.signal, self.bias = signal, float(np.log(click_rate / (1 - click_rate)))
        self._rows_F = np.array(num_rows, dtype=np.uint64)
        self._scramble_F = np.array([_coprime(rows, seed, f) for f, rows in enumerate(num_rows)])

    @override
    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def day_starts(self) -> list[int]:
        """Index of the first example of each day in this stretch.

        >>> SyntheticClicks(0, 25, [4], examples_per_day=10).day_starts
        [0, 10, 20]
        """
        first_whole = -(-self.start // self.examples_per_day) * self.examples_per_day
        later = range(first_whole - self.start, len(self), self.examples_per_day)
        return sorted({0, *later})

    @override
    def __getitems__(self, indices: Sequence[int]) -> Clicks:
        index_B = np.asarray(indices, dtype=np.uint64) + np.uint64(self.start)
        ids_BFM, present_BFM, counts_BC = self._features(index_B)
        clicked_B = self._uniform(index_B, _LABEL, 1)[:, 0] < self._probability(
            ids_BFM, present_BFM, counts_BC
        )
        present_FBM = present_BFM.transpose(1, 0, 2)
        return Clicks(
            labels_B=clicked_B.astype(np.float32),
            counts_BC=counts_BC.astype(np.float32),
            lengths_FB=present_FBM.sum(2),
            ids_L=ids_BFM.transpose(1, 0, 2)[present_FBM].astype(np.int64),
        )

    def bayes_auc(self, num_examples: int = 200_000) -> float:
        """AUC of the teacher's own probabilities on the first examples, which no model can exceed.

        AUC = sum_ij p_i (1 - p_j) [p_i > p_j] / (sum_i p_i sum_j (1 - p_j)): labels integrated out.
        """
        index_B = np.arange(min(num_examples, len(self)), dtype=np.uint64) + np.uint64(self.start)
        p = np.sort(self._probability(*self._features(index_B)))
        misses_below = np.cumsum(1 - p) - (1 - p)
        return float((p * misses_below).sum() / (p.sum() * (1 - p).sum()))

    def _uniform(self, index_B: U64, purpose: int, lanes: int) -> NDArray[np.float64]:
        """Numbers in [0, 1), (B, lanes): one for every seed, purpose, index and lane."""
        word_B = mix(index_B ^ salt(self.seed, purpose))
        return unit(mix(word_B[:, None] + mix(np.arange(lanes, dtype=np.uint64))))

    def _features(self, index_B: U64) -> tuple[U64, NDArray[np.bool_], NDArray[np.float64]]:
        num_features, most = len(self.num_rows), self.max_ids_per_bag
        unit_BFM = self._uniform(index_B, _ID, num_features * most).reshape(-1, num_features, most)
        ids_BFM = self._ids_from_ranks(self._ranks(unit_BFM), index_B)
        if most == 1:
            present_BFM = np.ones(ids_BFM.shape, dtype=bool)
        else:
            length_BF = np.floor(self._uniform(index_B, _LENGTH, num_features) * (most + 1))
            present_BFM = np.arange(most) < length_BF[:, :, None]
        counts_BC = np.floor(np.exp(5.0 * self._uniform(index_B, _COUNT, NUM_COUNTS)) - 1.0)
        return ids_BFM, present_BFM, counts_BC

    def _ranks(self, unit_BFM: NDArray[np.float64]) -> U64:
        """Ranks of popularity with density ~ rank^-zipf, by inverting the continuous power law."""
        end_F1 = self._rows_F.astype(np.float64)[:, None] + 1.0
        if abs(self.zipf - 1.0) < 1e-6:
            value = end_F1**unit_BFM
        else:
            power = 1.0 - self.zipf
            value = ((end_F1**power - 1.0) * unit_BFM + 1.0) ** (1.0 / power)
        return np.minimum(
            value.astype(np.uint64) - np.uint64(1), self._rows_F[:, None] - np.uint64(1)
        )

    def _ids_from_ranks(self, rank_BFM: U64, index_B: U64) -> U64:
        """Scatter popular ids over the table. Each day other ids take over some of the ranks."""
        rows_F1 = self._rows_F[:, None]
        if self.drift:
            day_B11 = (index_B // np.uint64(self.examples_per_day))[:, None, None]
            word_BFM = mix(rank_BFM ^ salt(self.seed, _CHURN))
            churns_BFM = unit(word_BFM) < self.drift
            stride_BFM = mix(word_BFM) % rows_F1
            moved_BFM = (rank_BFM + day_B11 * stride_BFM) % rows_F1
            rank_BFM = np.where(churns_BFM, moved_BFM, rank_BFM)
        return (rank_BFM * self._scramble_F[:, None]) % rows_F1

    def _probability(
        self, ids_BFM: U64, present_BFM: NDArray[np.bool_], counts_BC: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """The teacher's click probability: effects of ids, ten pairs of features, and counts."""
        main_BF = self._effects(ids_BFM, present_BFM, _MAIN)
        side_BF = self._effects(ids_BFM, present_BFM, _PAIR)
        num_features = len(self.num_rows)
        pick = mix(np.arange(2 * _NUM_PAIRS, dtype=np.uint64) ^ salt(self.seed, _WHICH))
        left, right = (pick % np.uint64(num_features)).reshape(2, -1).astype(np.int64)
        weight_C = (
            2 * unit(mix(np.arange(NUM_COUNTS, dtype=np.uint64) ^ salt(self.seed, _COUNT_WEIGHT)))
            - 1
        )
        # log1p of a count is nearly uniform on 0 to 5: mean 2.5, standard deviation 5 / sqrt(12).
        standard_BC = (np.log1p(counts_BC) - 2.5) / (5 / np.sqrt(12))
        logit_B = (
            0.7 * main_BF.mean(1) * np.sqrt(num_features)
            + 0.5 * (side_BF[:, left] * side_BF[:, right]).mean(1) * np.sqrt(_NUM_PAIRS)
            + 0.5 * (standard_BC * weight_C).mean(1) * np.sqrt(3 * NUM_COUNTS)
        )
        probability: NDArray[np.float64] = 1 / (1 + np.exp(-(self.bias + self.signal * logit_B)))
        return probability

    def _effects(
        self, ids_BFM: U64, present_BFM: NDArray[np.bool_], purpose: int
    ) -> NDArray[np.float64]:
        """A fixed number of mean 0 and variance 1 for every id, averaged over the bag."""
        salts_F1 = np.array([salt(self.seed, purpose, f) for f in range(len(self.num_rows))])[
            :, None
        ]
        effect_BFM = (unit(mix(ids_BFM ^ salts_F1)) - 0.5) * np.sqrt(12)
        length_BF = np.maximum(present_BFM.sum(2), 1)
        mean_BF: NDArray[np.float64] = (effect_BFM * present_BFM).sum(2) / length_BF
        return mean_BF


def _coprime(rows: int, seed: int, feature: int) -> np.uint64:
    """A multiplier that permutes 0 .. rows - 1."""
    candidate = int(salt(seed, _SCRAMBLE, feature) % np.uint64(rows)) or 1
    while np.gcd(candidate, rows) != 1:
        candidate += 1
    return np.uint64(candidate)


class SyntheticData(ClickData):
    """Synthetic clicks, day by day: training days first, then validation, then test.

    Args:
        batch_size: Examples per step, over all ranks.
        num_rows: Rows of each feature's table. By default Table 3 of the AdaFEST paper.
        examples_per_day: How many examples make a day.
        train_days: Days to train on.
        val_days: Days after them to validate on.
        test_days: Days after those to test on.
        seed: Seed of the stream of examples.
        zipf: Exponent of the ids' popularity: 0 is uniform, 1.05 resembles Criteo.
        max_ids_per_bag: With 1 every bag holds one id; otherwise bags hold 0 to this many.
        drift: Fraction of the popular places that another id takes over every day.
        signal: Standard deviation of the teacher's logit: larger is easier.
        click_rate: Click rate of an average example.
        num_workers: Processes that make batches beside training.
    """

    def __init__(
        self,
        batch_size: int = 2048,
        num_rows: list[int] | None = None,
        examples_per_day: int = 1_000_000,
        train_days: int = 1,
        val_days: int = 1,
        test_days: int = 1,
        seed: int = 0,
        zipf: float = 1.05,
        max_ids_per_bag: int = 1,
        drift: float = 0.0,
        signal: float = 1.5,
        click_rate: float = 0.2,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, num_workers)
        days = {"train_days": train_days, "val_days": val_days, "test_days": test_days}
        for name, count in days.items():
            expected = f"numbers of days of at least 0 in {name}"
            check_whole(name, count, 0, expected=expected)
        check_whole("examples_per_day", examples_per_day, most=_MOST_EXAMPLES)
        if sum(days.values()) * examples_per_day > _MOST_EXAMPLES:
            raise Refused(
                f"Expected at most {_MOST_EXAMPLES:,} examples in all days, found more. Lower "
                "examples_per_day or the numbers of days."
            )
        ends = np.cumsum([0, train_days, val_days, test_days]) * examples_per_day
        self.train_set, self.val_set, self.test_set = (
            SyntheticClicks(
                int(start),
                int(stop),
                num_rows=ADAFEST_NUM_ROWS if num_rows is None else num_rows,
                examples_per_day=examples_per_day,
                seed=seed,
                zipf=zipf,
                max_ids_per_bag=max_ids_per_bag,
                drift=drift,
                signal=signal,
                click_rate=click_rate,
            )
            for start, stop in pairwise(ends)
        )

    @override
    def setup(self, stage: str) -> None:
        if stage == "fit":
            best, name = self.bayes_auc(), "validation" if len(self.val_set) else "test"
            rank_zero_info(f"Synthetic clicks: no model's {name} AUROC can exceed {best:.3f}.")

    def bayes_auc(self) -> float:
        """The best AUC that a model can reach on validation days, or else on test days."""
        held_out = self.val_set if len(self.val_set) else self.test_set
        assert isinstance(held_out, SyntheticClicks)
        return held_out.bayes_auc(100_000)

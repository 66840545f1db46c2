"""Canaries go into the data as they are, and leave everybody else where they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lightning.pytorch import LightningDataModule

from lightning_dpsparse.audit.canaries import WithCanaries, auditable, insert_canaries
from lightning_dpsparse.data import Clicks, SyntheticClicks, SyntheticData, collate

ROWS = [50, 7, 3]


def base() -> SyntheticClicks:
    return SyntheticClicks(0, 30, ROWS, examples_per_day=20, max_ids_per_bag=3)


def bags(clicks: Clicks) -> list[tuple[Any, ...]]:
    """Every example by itself: label, counts, and the ids of each feature."""
    features = collate(clicks).sparse_features
    by_feature = [features[key].to_dense() for key in features.keys()]  # noqa: SIM118
    return [
        (
            float(clicks.labels_B[b]),
            tuple(clicks.counts_BC[b].tolist()),
            *(tuple(bag[b].tolist()) for bag in by_feature),
        )
        for b in range(len(clicks.labels_B))
    ]


def test_every_example_is_where_it_was_asked_for() -> None:
    data = base()
    canaries = data.random_examples(4, seed=1)
    which = np.array([2, 2, 0])
    both = WithCanaries(data, canaries, which)
    assert len(both) == 33
    indices = [31, 4, 30, 29, 32, 4]
    expected = [
        bags(data.__getitems__([i]))[0] if i < 30 else bags(canaries)[which[i - 30]]
        for i in indices
    ]
    assert bags(both.__getitems__(indices)) == expected
    assert bags(both.__getitems__([])) == []
    assert both.day_starts == data.day_starts


def test_numbers_come_as_a_feature_of_their_own() -> None:
    data = base()
    both = WithCanaries(data, data.random_examples(4, 1), np.array([3, 0]), is_numbered=True)
    found = collate(both.__getitems__([31, 5, 30])).sparse_features["cat_3"]
    assert found.lengths().tolist() == [1, 0, 1]
    assert found.values().tolist() == [0, 3]


def test_each_canary_is_a_user_of_their_own() -> None:
    data = base()
    data.users = np.arange(30) // 3  # type: ignore[attr-defined]
    both = WithCanaries(data, data.random_examples(2, 1), np.array([0, 0, 1]))
    assert both.users.tolist() == [*(np.arange(30) // 3).tolist(), 10, 11, 12]


def test_random_examples_are_anywhere_and_by_seed() -> None:
    data = base()
    one, again, other = (data.random_examples(400, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one, again))
    assert not np.array_equal(one.ids_L, other.ids_L)
    ids = one.ids_L.reshape(3, 400)
    assert [set(row) for row in ids[1:]] == [set(range(7)), set(range(3))]
    # 400 fair coins: six sigma.
    assert abs(one.labels_B.mean() - 0.5) < 6 * 0.5 / 20


def test_a_data_module_trains_on_them() -> None:
    data = SyntheticData(num_rows=ROWS, batch_size=8, examples_per_day=20, train_days=1, val_days=1)
    data.setup("fit")
    insert_canaries(data, data.train_set.random_examples(4, 1), np.arange(4), is_numbered=True)
    insert_canaries(data, data.train_set.random_examples(5, 1), np.arange(5), is_numbered=True)
    loader = data.train_dataloader()
    assert len(loader.dataset) == 25  # type: ignore[arg-type]
    assert next(iter(loader)).sparse_features.keys() == ["cat_0", "cat_1", "cat_2", "canary"]
    assert next(iter(data.val_dataloader())).sparse_features.keys() == ["cat_0", "cat_1", "cat_2"]


def test_other_data_modules_are_refused() -> None:
    with pytest.raises(ValueError, match=r"derived from .*ClickData, found LightningDataModule"):
        auditable(LightningDataModule())

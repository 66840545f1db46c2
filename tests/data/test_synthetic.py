"""Synthetic clicks: a pure function of seed and index, with a known ceiling."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import binary_auroc

from lightning_dpsparse.data import SyntheticClicks, SyntheticData, collate
from lightning_dpsparse.data.synthetic import ADAFEST_NUM_ROWS

ROWS = [1000, 7, 3]


def clicks(**kwargs: object) -> SyntheticClicks:
    settings: dict[str, object] = {"num_rows": ROWS, "examples_per_day": 1000}
    return SyntheticClicks(0, 20_000, **(settings | kwargs))  # type: ignore[arg-type]


def test_an_example_does_not_depend_on_the_batch_it_comes_in() -> None:
    data = clicks(max_ids_per_bag=3)
    together = collate(data.__getitems__([5, 9, 5]))
    alone = collate(data.__getitems__([9]))
    assert torch.equal(together.dense_features[1], alone.dense_features[0])
    for key in together.sparse_features.keys():  # noqa: SIM118 (a KeyedJaggedTensor)
        assert (
            together.sparse_features[key].to_dense()[1].tolist()
            == alone.sparse_features[key].to_dense()[0].tolist()
        )
    assert together.labels[0] == together.labels[2]


def test_parts_continue_each_other() -> None:
    whole = clicks().__getitems__(range(100, 200))
    settings = {"num_rows": ROWS, "examples_per_day": 1000}
    part = SyntheticClicks(100, 200, **settings).__getitems__(range(100))  # type: ignore[arg-type]
    assert all(np.array_equal(a, b) for a, b in zip(whole, part))


def test_another_seed_is_another_stream() -> None:
    one, two = clicks(seed=1).__getitems__(range(1000)), clicks(seed=2).__getitems__(range(1000))
    assert (one.ids_L != two.ids_L).mean() > 0.2
    assert (one.labels_B != two.labels_B).mean() > 0.1


def test_ids_fit_their_tables_and_reach_all_of_a_small_one() -> None:
    ids = clicks().__getitems__(range(20_000)).ids_L.reshape(3, -1)
    for feature, rows in enumerate(ROWS):
        assert ids[feature].min() >= 0
        assert ids[feature].max() < rows
    assert len(np.unique(ids[1])) == 7
    assert len(np.unique(ids[2])) == 3


@pytest.mark.parametrize("zipf", [0.0, 1.0, 1.5])
def test_popularity_follows_the_power_law(zipf: float) -> None:
    ids = clicks(zipf=zipf).__getitems__(range(20_000)).ids_L.reshape(3, -1)[0]
    counts = np.sort(np.bincount(ids, minlength=1000))[::-1]
    edges = np.arange(1, 1002, dtype=float)
    mass = np.diff(np.log(edges) if zipf == 1 else edges ** (1 - zipf) / (1 - zipf))
    expected = 20_000 * mass / mass.sum()
    # A Poisson count stays within 5 standard deviations; sorting spreads equal ones as far.
    assert np.abs(counts - expected).max() <= 5 * np.sqrt(expected.max()) + 5


def test_bags_hold_zero_to_the_given_number_of_ids() -> None:
    batch = clicks(max_ids_per_bag=3).__getitems__(range(5000))
    lengths, counts = np.unique(batch.lengths_FB, return_counts=True)
    assert lengths.tolist() == [0, 1, 2, 3]
    # 15,000 bags over four lengths: 3,750 each, standard deviation 53.
    assert np.abs(counts - 3750).max() < 5 * 53
    assert batch.lengths_FB.sum() == len(batch.ids_L)


def test_popular_ids_change_from_day_to_day_by_the_given_fraction() -> None:
    def popular(day: int, drift: float) -> set[int]:
        start = day * 1000
        ids = clicks(drift=drift, zipf=1.5).__getitems__(range(start, start + 1000)).ids_L[:1000]
        return set(np.argsort(-np.bincount(ids, minlength=1000))[:10].tolist())

    assert len(popular(0, 0.0) & popular(9, 0.0)) >= 8  # sampling noise alone
    assert 1 <= len(popular(0, 0.5) & popular(9, 0.5)) <= 8
    assert len(popular(0, 1.0) & popular(9, 1.0)) <= 1


def test_the_bayes_auc_is_that_of_the_teachers_probabilities() -> None:
    data = clicks()
    index = np.arange(20_000, dtype=np.uint64)
    p = data._probability(*data._features(index))
    y = data.__getitems__(range(20_000)).labels_B
    found = binary_auroc(torch.from_numpy(p), torch.from_numpy(y).long()).item()
    # Hanley and McNeil: about 0.0035 standard error at 4,000 clicks.
    assert found == pytest.approx(data.bayes_auc(), abs=4 * 0.0035)
    assert 0.75 < data.bayes_auc() < 0.9


def test_the_days_of_training_validation_and_test_do_not_overlap() -> None:
    data = SyntheticData(examples_per_day=100, train_days=18, val_days=2, test_days=4)
    assert [(s.start, s.stop) for s in (data.train_set, data.val_set, data.test_set)] == [  # type: ignore[attr-defined]
        (0, 1800), (1800, 2000), (2000, 2400)
    ]  # fmt: skip
    assert data.train_set.num_rows == ADAFEST_NUM_ROWS


def test_the_empty_batch_has_every_feature() -> None:
    batch = collate(clicks().__getitems__([]))
    assert batch.sparse_features.keys() == ["cat_0", "cat_1", "cat_2"]
    assert batch.sparse_features.stride() == 0
    assert batch.dense_features.shape == (0, 13)


def test_batches_that_ranks_cannot_share_are_refused() -> None:
    class Trainer:
        world_size = 3

    data = SyntheticData(batch_size=100, examples_per_day=1000)
    data.trainer = Trainer()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="multiple of the 3 ranks that share it, found 100"):
        data.train_dataloader()


def test_too_little_data_for_one_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"found 10 examples\. Lower batch_size"):
        SyntheticData(batch_size=100, examples_per_day=10).train_dataloader()


def test_drift_is_a_fraction() -> None:
    with pytest.raises(ValueError, match="found 2"):
        clicks(drift=2.0)

"""From arrays of examples to the batches that TorchRec's models take.

Reading examples one by one in Python is slow. A `ClickDataset` is therefore read many examples at a
time, as a `Clicks` of numpy arrays; `collate` turns these into a batch of TorchRec, and `ClickData`
is the Lightning data module above it. `criteo.py`, `movielens.py` and `synthetic.py` derive from
it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple, cast

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from typing_extensions import override

from lightning_dpsparse.checks import check_whole
from lightning_dpsparse.refused import Refused

_MOST_WORKERS = 4096

# B examples, F categorical features, L ids in all bags together


class Clicks(NamedTuple):
    """Some examples as arrays. Bags lie feature by feature, as TorchRec lays them out."""

    labels_B: NDArray[np.float32]
    counts_BC: NDArray[np.float32]
    lengths_FB: NDArray[np.int64]
    ids_L: NDArray[np.int64]


class ClickDataset(Dataset[Clicks], ABC):
    """A map-style data set that is read many examples at a time, in any order."""

    num_rows: list[int]
    """Ids of feature f lie in 0 .. num_rows[f] - 1."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitems__(self, indices: Sequence[int]) -> Clicks:
        """The examples with these indices. A `DataLoader` asks for a whole batch at once."""

    @override
    def __getitem__(self, index: int) -> Clicks:
        return self.__getitems__([index])

    def random_examples(self, count: int, seed: int) -> Clicks:
        """Examples that nobody has: each feature has a uniform id, and the label is a fair coin."""
        draws = np.random.default_rng(seed)
        num_counts = self.__getitems__([]).counts_BC.shape[1]
        counts_BC = np.floor(np.exp(5.0 * draws.random((count, num_counts))) - 1.0)
        rows_F1 = np.array(self.num_rows, dtype=np.int64)[:, None]
        return Clicks(
            labels_B=draws.integers(2, size=count).astype(np.float32),
            counts_BC=counts_BC.astype(np.float32),
            lengths_FB=np.ones((len(self.num_rows), count), dtype=np.int64),
            ids_L=draws.integers(rows_F1, size=(len(self.num_rows), count)).reshape(-1),
        )


def join(first: Clicks, second: Clicks) -> Clicks:
    """The examples of `first`, followed by those of `second`.

    Bags lie feature by feature, so the ids of the two alternate by feature.

    >>> one = Clicks(np.ones(1), np.zeros((1, 0)), np.array([[1], [2]]), np.array([1, 2, 2]))
    >>> two = Clicks(np.zeros(1), np.zeros((1, 0)), np.array([[2], [0]]), np.array([7, 8]))
    >>> join(one, two).lengths_FB.tolist(), join(one, two).ids_L.tolist()
    ([[1, 2], [2, 0]], [1, 7, 8, 2, 2])
    """
    turns = zip(_ids_by_feature(first), _ids_by_feature(second))
    return Clicks(
        labels_B=np.concatenate([first.labels_B, second.labels_B]),
        counts_BC=np.concatenate([first.counts_BC, second.counts_BC]),
        lengths_FB=np.concatenate([first.lengths_FB, second.lengths_FB], axis=1),
        ids_L=np.concatenate(list(chain.from_iterable(turns))),
    )


def select(clicks: Clicks, index_B: NDArray[np.int64]) -> Clicks:
    """The examples with these indices, in the order given. An index may occur more than once.

    >>> some = Clicks(np.ones(2), np.zeros((2, 0)), np.array([[1, 2]]), np.array([4, 5, 6]))
    >>> select(some, np.array([1, 0, 1])).ids_L.tolist()
    [5, 6, 4, 5, 6]
    """
    lengths_FB = clicks.lengths_FB[:, index_B]
    begin_FB = np.cumsum(clicks.lengths_FB).reshape(clicks.lengths_FB.shape) - clicks.lengths_FB
    length_N, begin_N = lengths_FB.reshape(-1), begin_FB[:, index_B].reshape(-1)
    within_L = np.arange(length_N.sum()) - np.repeat(np.cumsum(length_N) - length_N, length_N)
    return Clicks(
        labels_B=clicks.labels_B[index_B],
        counts_BC=clicks.counts_BC[index_B],
        lengths_FB=lengths_FB,
        ids_L=clicks.ids_L[np.repeat(begin_N, length_N) + within_L],
    )


def _ids_by_feature(clicks: Clicks) -> list[NDArray[np.int64]]:
    return np.split(clicks.ids_L, np.cumsum(clicks.lengths_FB.sum(1))[:-1])


def collate(clicks: Clicks, names: Sequence[str] | None = None) -> Batch:
    """A batch for the model. It may have no example, because Poisson sampling can draw none.

    Features are called cat_0, cat_1 and so on, unless `names` are given.

    >>> empty = Clicks(np.zeros(0), np.zeros((0, 13)), np.zeros((2, 0), int), np.zeros(0, int))
    >>> collate(empty).sparse_features.keys(), collate(empty).sparse_features.stride()
    (['cat_0', 'cat_1'], 0)
    """
    num_features, batch_size = clicks.lengths_FB.shape
    return Batch(
        dense_features=torch.from_numpy(clicks.counts_BC),
        sparse_features=KeyedJaggedTensor(
            keys=list(names or (f"cat_{i}" for i in range(num_features))),
            values=torch.from_numpy(clicks.ids_L),
            lengths=torch.from_numpy(clicks.lengths_FB.reshape(-1)),
            stride=batch_size,
        ),
        labels=torch.from_numpy(clicks.labels_B),
    )


class ClickData(LightningDataModule):
    """Loaders over `ClickDataset`s, with one batch size for the whole job.

    `batch_size` counts the examples of all ranks together, so that a recipe trains the same model
    on one device and on eight.
    """

    train_set: ClickDataset
    val_set: ClickDataset
    test_set: ClickDataset

    def __init__(self, batch_size: int, num_workers: int) -> None:
        super().__init__()
        check_whole("batch_size", batch_size, expected="batch_size of at least 1")
        check_whole("num_workers", num_workers, 0, _MOST_WORKERS, remedy="The default is 0.")
        self.batch_size, self.num_workers = batch_size, num_workers

    @staticmethod
    def collate(clicks: Clicks) -> Batch:
        """A batch for the model. Data whose features have names of their own overrides this."""
        return collate(clicks)

    @override
    def train_dataloader(self) -> DataLoader[Clicks]:
        return self._loader(self.train_set, train=True)

    @override
    def val_dataloader(self) -> DataLoader[Clicks]:
        return self._loader(self.val_set)

    @override
    def test_dataloader(self) -> DataLoader[Clicks]:
        return self._loader(self.test_set)

    @override
    def predict_dataloader(self) -> DataLoader[Clicks]:
        return self._loader(self.test_set)

    @override
    def transfer_batch_to_device(
        self, batch: Batch, device: torch.device, dataloader_idx: int
    ) -> Batch:
        return batch.to(device, non_blocking=True)  # Lightning would wait for the copy

    def _loader(self, dataset: ClickDataset, *, train: bool = False) -> DataLoader[Clicks]:
        world_size = self.trainer.world_size if self.trainer is not None else 1
        if self.batch_size % world_size:
            raise Refused(
                f"Expected batch_size to be a multiple of the {world_size} ranks that share it, "
                f"found {self.batch_size}. Change batch_size or the number of ranks."
            )
        if train and len(dataset) < self.batch_size:
            raise Refused(
                f"Expected at least one batch of {self.batch_size} training examples, found "
                f"{len(dataset)} examples. Lower batch_size."
            )
        return DataLoader(
            dataset,
            batch_size=self.batch_size // world_size,
            shuffle=train,
            drop_last=train,
            collate_fn=cast(
                Callable[[list[Clicks]], Batch], self.collate
            ),  # takes __getitems__'s result
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )

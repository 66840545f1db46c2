"""MovieLens as watches in order of time, and the windows of them that a recommender learns from.

A rating stands for a watch, whatever its stars. A window is a watch to predict and the watches
before it; it depends on one user only, so removing a user changes nobody else's windows.
Users are split once, by a public hash: nobody who is tested on was trained on. `ratings.py` reads
the files, and `models/two_tower.py` and `models/sasrec.py` learn from the windows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch
from typing_extensions import override

from lightning_dpsparse.checks import check_number, check_path, check_whole
from lightning_dpsparse.data.batch import ClickData, ClickDataset, Clicks, collate
from lightning_dpsparse.data.ratings import Ratings, check_num_items, read_ratings
from lightning_dpsparse.hashing import mix, salt, unit
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sampling.units import Ints

# N watches, U users (U1: one more), T watches of a user, B examples, L ids in all bags

FEATURES = ("context", "label")

_MOST_WATCHES, _MOST_WINDOWS, _MOST_SEED = 2**31, 2**20, 2**128

# Purposes of hash words and of generators. No two kinds of draws share one.
_SPLIT, _WINDOW, _SYNTHETIC = range(3)


@dataclass(frozen=True, eq=False)
class Timelines:
    """What each user watched, in order of time. The rows of user u begin at offsets_U1[u]."""

    users_U: Ints
    offsets_U1: Ints
    rows_N: Ints
    num_items: int

    @classmethod
    def of(cls, ratings: Ratings) -> Timelines:
        """Sort ratings by user and time. Watches of the same second stay in the order of the file.

        >>> ids = [np.array(column) for column in ([8, 2, 8, 8], [0, 1, 2, 3], [30, 7, 10, 30])]
        >>> found = Timelines.of(Ratings(*ids, num_items=4))
        >>> found.users_U.tolist(), found.offsets_U1.tolist(), found.rows_N.tolist()
        ([2, 8], [0, 1, 4], [1, 2, 0, 3])
        """
        order_N = np.lexsort((ratings.times_N, ratings.users_N))
        users_U, counts_U = np.unique(ratings.users_N, return_counts=True)
        return cls(users_U, _offsets(counts_U), ratings.rows_N[order_N], ratings.num_items)

    @property
    def lengths_U(self) -> Ints:
        return np.diff(self.offsets_U1)

    def only(self, keep_U: NDArray[np.bool_]) -> Timelines:
        """The timelines of the users that are kept."""
        rows_N = self.rows_N[np.repeat(keep_U, self.lengths_U)]
        offsets_U1 = _offsets(self.lengths_U[keep_U])
        return Timelines(self.users_U[keep_U], offsets_U1, rows_N, self.num_items)

    def split(self, train_share: float) -> tuple[Timelines, Timelines]:
        """Users to train on and the others, by a public hash of a user's number.

        Guarantees: on which side a user is depends on no other user and on no seed.
        """
        check_number("train_share", train_share, above=0, below=1, remedy="The default is 0.8.")
        trains_U = unit(mix(self.users_U.astype(np.uint64) ^ salt(_SPLIT))) < train_share
        return self.only(trains_U), self.only(~trains_U)


def _offsets(counts_U: Ints) -> Ints:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts_U)])


class MovieLensWindows(ClickDataset):
    """Examples of some users. An example is a window: a watch to predict, and those before it.

    Features: 0 is the context, a bag of the 1 to `context_length` movies that the user watched
    before, the latest last; 1 is the label, a bag of the movie watched next.

    Guarantees: an example depends on its own user's timeline and on nobody else's.

    Args:
        timelines: What each user watched. A user with fewer than two watches has no example.
        context_length: The most watches in a context.
        examples_per_user: None makes an example of every watch but a user's first. Otherwise a user
            has exactly so many, and their windows are drawn anew every epoch (Ning et al. 2022,
            EANA). Such an example is nothing fixed that could be added or removed, so the privacy
            unit should then be the user. For the unit 'example' leave it None.
        seed: Seed of the windows that are drawn. The seed of training does not change them.
    """

    def __init__(
        self,
        timelines: Timelines,
        context_length: int = 20,
        examples_per_user: int | None = None,
        seed: int = 0,
    ) -> None:
        _check_windows(context_length, examples_per_user, seed)
        self.num_rows = [timelines.num_items] * len(FEATURES)
        self.context_length, self.seed = context_length, seed
        self.examples_per_user = examples_per_user
        self._timelines = timelines.only(timelines.lengths_U > 1)
        examples_U = self._timelines.lengths_U - 1
        if examples_per_user is not None:
            examples_U[:] = examples_per_user
        self._first_example_U1 = _offsets(examples_U)
        # It is in shared memory, so that workers that live for several epochs see it change.
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()

    @override
    def __len__(self) -> int:
        return int(self._first_example_U1[-1])

    @property
    def users(self) -> Ints:
        """The user of each example."""
        return np.repeat(self._timelines.users_U, np.diff(self._first_example_U1))

    def set_epoch(self, epoch: int) -> None:
        """Draw other windows from now on, in the workers of the loader too."""
        self._epoch[0] = epoch

    @override
    def __getitems__(self, indices: Sequence[int]) -> Clicks:
        index_B = np.asarray(indices, dtype=np.int64)
        user_B = np.searchsorted(self._first_example_U1, index_B, side="right") - 1
        slot_B = index_B - self._first_example_U1[user_B]
        window_B = slot_B if self.examples_per_user is None else self._drawn(user_B, slot_B)
        position_B = 1 + window_B
        label_B = self._timelines.offsets_U1[user_B] + position_B
        length_B = np.minimum(position_B, self.context_length)
        # Context b is the stretch of watches that ends before label_B[b].
        shift_L = np.repeat(label_B - np.cumsum(length_B), length_B)
        context_L = np.arange(shift_L.size) + shift_L
        return _watches(length_B, self._timelines.rows_N[np.concatenate([context_L, label_B])])

    def _drawn(self, user_B: Ints, slot_B: Ints) -> Ints:
        """One of the user's windows for every slot, by a hash of seed, epoch, user and slot."""
        key = salt(self.seed, _WINDOW, int(self._epoch[0]))
        # By the number of the user and not by the place: other users must not matter.
        user_word_B = mix(self._timelines.users_U[user_B].astype(np.uint64) ^ key)
        unit_B = unit(mix(user_word_B + mix(slot_B.astype(np.uint64))))
        return (unit_B * (self._timelines.lengths_U[user_B] - 1)).astype(np.int64)

    @override
    def random_examples(self, count: int, seed: int) -> Clicks:
        """Examples that nobody has: a full context and a label of uniform rows."""
        length_B = np.full(count, self.context_length)
        draws = np.random.default_rng(seed)
        return _watches(length_B, draws.integers(self.num_rows[0], size=length_B.sum() + count))


def _watches(length_B: Ints, ids_L: Ints) -> Clicks:
    """Clicks of contexts of these lengths, with one label each. Every example is a positive."""
    return Clicks(
        labels_B=np.ones(length_B.size, dtype=np.float32),
        counts_BC=np.zeros((length_B.size, 0), dtype=np.float32),
        lengths_FB=np.stack([length_B, np.ones_like(length_B)]),
        ids_L=ids_L,
    )


def _check_windows(context_length: int, examples_per_user: int | None, seed: int) -> None:
    expected = "context_length and examples_per_user of at least 1"
    check_whole("context_length", context_length, most=_MOST_WINDOWS, expected=expected)
    if examples_per_user is not None:
        remedy = "None takes all windows."
        check_whole(
            "examples_per_user",
            examples_per_user,
            1,
            _MOST_WINDOWS,
            expected=expected,
            remedy=remedy,
        )
    check_whole("seed", seed, 0, _MOST_SEED)


class WatchData(ClickData, ABC):
    """Batches of `context` and `label`: some users to train on, the others to validate and test on.

    Args:
        batch_size: Examples per step, over all ranks.
        context_length: The most watches in a context.
        examples_per_user: Windows of every user, drawn anew at `set_epoch`; None takes them all.
        eval_examples_per_user: Windows of every held-out user, the same in every epoch.
        train_share: Fraction of the users to train on.
        seed: Which windows are drawn.
        num_workers: Processes that make batches beside training.
    """

    train_set: MovieLensWindows

    def __init__(
        self,
        batch_size: int = 64,
        context_length: int = 20,
        examples_per_user: int | None = None,
        eval_examples_per_user: int = 10,
        train_share: float = 0.8,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, num_workers)
        for examples in (examples_per_user, eval_examples_per_user):
            _check_windows(context_length, examples, seed)
        check_number("train_share", train_share, above=0, below=1, remedy="The default is 0.8.")
        self.context_length, self.train_share, self.seed = context_length, train_share, seed
        self._examples_per_user = examples_per_user, eval_examples_per_user

    @abstractmethod
    def timelines(self) -> Timelines:
        """What all users watched."""

    @override
    def setup(self, stage: str) -> None:
        if hasattr(self, "train_set"):
            return
        train, held_out = self.timelines().split(self.train_share)
        length, (k, held_out_k) = self.context_length, self._examples_per_user
        self.train_set = MovieLensWindows(train, length, k, self.seed)
        self.val_set = self.test_set = MovieLensWindows(held_out, length, held_out_k, self.seed)
        rank_zero_info(f"Watches of {train.num_items:,} movies, up to {length} before each.")

    def set_epoch(self, epoch: int) -> None:
        """Draw other training windows from now on. Those of evaluation stay as they are."""
        self.train_set.set_epoch(epoch)

    @staticmethod
    @override
    def collate(clicks: Clicks) -> Batch:
        return collate(clicks, FEATURES)


class MovieLensData(WatchData):
    """MovieLens 1M, 10M, 20M or latest, as GroupLens publishes them.

    Args:
        folder: Where the release was unpacked: ratings.csv or ratings.dat is in it.
        num_items: How many movies there are, if no movies.csv or movies.dat says so.
        settings: The arguments of `WatchData`.
    """

    def __init__(self, folder: str, *, num_items: int | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        check_path("folder", folder, remedy="Name where the release was unpacked.")
        check_num_items(num_items)
        self.folder, self.num_items = folder, num_items

    @override
    def timelines(self) -> Timelines:
        return Timelines.of(read_ratings(Path(self.folder), self.num_items))


class SyntheticMovieLens(WatchData):
    """A stand-in for MovieLens, for machines without it, that is the same for the same seed.

    Row r is of genre r mod 10, in which popularity falls as 1 / rank. A user has a favourite genre
    and mostly stays there.

    Args:
        num_users: How many users there are to train and to test on.
        num_items: How many movies there are.
        watches_per_user: How many movies every user watches.
        settings: The arguments of `WatchData`.
    """

    def __init__(
        self,
        num_users: int = 2000,
        num_items: int = 1000,
        watches_per_user: int = 50,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        sizes = {"num_users": num_users, "num_items": num_items}
        for name, size in (sizes | {"watches_per_user": watches_per_user}).items():
            check_whole(name, size, most=_MOST_WATCHES, expected=f"{name} of at least 1")
        if num_users * watches_per_user > _MOST_WATCHES:
            raise Refused(
                f"Expected at most {_MOST_WATCHES:,} watches in all, found {num_users:,} users "
                f"with {watches_per_user:,} each. Lower one of them."
            )
        self.num_items, self._shape = num_items, (num_users, watches_per_user)

    @override
    def timelines(self) -> Timelines:
        draws, num_users = np.random.default_rng([self.seed, _SYNTHETIC]), self._shape[0]
        num_genres = min(10, self.num_items)
        favourite_U1 = draws.integers(num_genres, size=(num_users, 1))
        any_UT = draws.integers(num_genres, size=self._shape)
        genre_UT = np.where(draws.random(self._shape) < 0.9, favourite_U1, any_UT)
        # Invert the continuous law with density 1 / rank. Rows beyond whole genres stay unseen.
        rank_UT = (self.num_items // num_genres + 1) ** draws.random(self._shape)
        rows_UT = genre_UT + num_genres * (rank_UT.astype(np.int64) - 1)
        offsets_U1 = np.arange(num_users + 1) * self._shape[1]
        return Timelines(np.arange(num_users), offsets_U1, rows_UT.reshape(-1), self.num_items)

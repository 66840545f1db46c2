"""Examples that nobody has, put into the training data to see what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from lightning.pytorch import LightningDataModule
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch
from typing_extensions import override

from lightning_dpsparse.data.batch import ClickData, ClickDataset, Clicks, collate, join, select
from lightning_dpsparse.refused import Refused

Ints = NDArray[np.int64]

CANARY = "canary"
"""The feature that says which canary an example is; other examples have an empty bag."""

# B examples, E extra examples, F features


class WithCanaries(ClickDataset):
    """A training set with more examples behind it.

    Args:
        base: The data as it is.
        canaries: The canaries there are, each once.
        which_E: The canary that each extra example is a copy of.
        is_numbered: Whether examples get a feature more, with the canary's number.
    """

    def __init__(
        self, base: ClickDataset, canaries: Clicks, which_E: Ints, *, is_numbered: bool = False
    ) -> None:
        self.base, self.canaries = base, canaries
        self.which_E, self.is_numbered = which_E, is_numbered
        self.num_rows = base.num_rows
        if hasattr(base, "users"):  # each canary is somebody of their own
            users = np.asarray(base.users)
            self.users = np.concatenate([users, users.max(initial=0) + 1 + np.arange(len(which_E))])
        if hasattr(base, "day_starts"):
            self.day_starts = base.day_starts

    @override
    def __len__(self) -> int:
        return len(self.base) + len(self.which_E)

    @override
    def __getitems__(self, indices: Sequence[int]) -> Clicks:
        index_B, size = np.asarray(indices, dtype=np.int64), len(self.base)
        is_extra_B = index_B >= size
        which = self.which_E[index_B[is_extra_B] - size]
        both = join(
            self.base.__getitems__(index_B[~is_extra_B].tolist()), select(self.canaries, which)
        )
        order_B = np.argsort(np.argsort(is_extra_B, kind="stable"), kind="stable")
        found = select(both, order_B)
        if not self.is_numbered:
            return found
        return found._replace(
            lengths_FB=np.vstack([found.lengths_FB, is_extra_B.astype(np.int64)]),
            ids_L=np.concatenate([found.ids_L, which]),
        )

    @override
    def random_examples(self, count: int, seed: int) -> Clicks:
        return self.base.random_examples(count, seed)

    def set_epoch(self, epoch: int) -> None:
        """For data that is drawn anew every epoch."""
        if hasattr(self.base, "set_epoch"):
            self.base.set_epoch(epoch)


class NumberedCollate:
    """A data module's own batches, with the canaries' numbers as a feature more."""

    def __init__(self, data: ClickData) -> None:
        nobody = data.train_set.__getitems__([])
        names = data.collate(nobody).sparse_features.keys()
        self._names = [*(name for name in names if name != CANARY), CANARY]

    def __call__(self, clicks: Clicks) -> Batch:
        return collate(clicks, self._names[: len(clicks.lengths_FB)])  # others have no number


def insert(data: ClickData, canaries: Clicks, which_E: Ints, *, is_numbered: bool = False) -> None:
    """Have `data`, once set up, train on canaries too; those of an earlier audit go."""
    base = data.train_set
    if isinstance(base, WithCanaries):
        data.train_set = base = base.base
    if is_numbered:
        data.collate = NumberedCollate(data)  # type: ignore[method-assign]
    data.train_set = WithCanaries(base, canaries, which_E, is_numbered=is_numbered)


def auditable(data: LightningDataModule | Any) -> ClickData:
    """`data`, or an error if canaries cannot be put into it."""
    if not isinstance(data, ClickData):
        raise Refused(
            "Expected a data module derived from lightning_dpsparse.data.ClickData, found "
            f"{type(data).__name__}: canaries cannot be put into it. Derive from it, with a "
            "ClickDataset as train_set."
        )
    return data


def mark_as_audited(strategy: Any) -> None:
    """Have the privacy report say what is in the data."""
    plan = getattr(strategy, "privacy", None)
    if plan is not None:
        mark = "An audit put canaries into the training data: the model is for study."
        strategy.privacy = replace(plan, taints=(*plan.taints, mark))

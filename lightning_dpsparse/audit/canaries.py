"""Canaries: random examples that are put into the training data.

Nobody has these examples, so what a model knows about them it learned from their presence alone.
`insert_canaries` adds them behind a data set; the attacks in `one_run.py` and `secret_sharer.py`
then look for them in the trained model. A model that was trained with canaries is for study only,
and `mark_as_audited` makes its privacy report say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from lightning.pytorch import LightningDataModule
from lightning.pytorch.strategies import Strategy
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch
from typing_extensions import override

from lightning_dpsparse.data.batch import ClickData, ClickDataset, Clicks, collate, join, select
from lightning_dpsparse.plugin.strategy import DPSparseStrategy
from lightning_dpsparse.refused import Refused

Ints = NDArray[np.int64]

CANARY = "canary"
"""Name of the feature that holds a canary's number; other examples have an empty bag there."""
MOST_CANARIES = 100_000_000
"""Most canaries, copies or references of an audit: they are held in memory."""
_MARK = "An audit put canaries into the training data: the model is for study."

# B examples, E extra examples, F features


class WithCanaries(ClickDataset):
    """A training set with copies of canaries behind its own examples.

    Args:
        base: The data set without canaries.
        canaries: All canaries, each once.
        which_E: The canary that each extra example is a copy of.
        is_numbered: Whether examples get one more feature, which holds the canary's number.
    """

    def __init__(
        self, base: ClickDataset, canaries: Clicks, which_E: Ints, *, is_numbered: bool = False
    ) -> None:
        self.base, self.canaries = base, canaries
        self.which_E, self.is_numbered = which_E, is_numbered
        self.num_rows = base.num_rows
        if hasattr(base, "users"):  # each copy of a canary gets a user of its own
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
        """Pass the epoch on to data that is drawn anew in every epoch."""
        if hasattr(self.base, "set_epoch"):
            self.base.set_epoch(epoch)


class NumberedCollate:
    """Makes the batches of a data module, with the numbers of the canaries as one more feature."""

    def __init__(self, data: ClickData) -> None:
        no_examples = data.train_set.__getitems__([])
        names = data.collate(no_examples).sparse_features.keys()
        self._names = [*(name for name in names if name != CANARY), CANARY]

    def __call__(self, clicks: Clicks) -> Batch:
        # Validation and test data have no numbers: they use all names but the last.
        return collate(clicks, self._names[: len(clicks.lengths_FB)])


def insert_canaries(
    data: ClickData, canaries: Clicks, which_E: Ints, *, is_numbered: bool = False
) -> None:
    """Add canaries to the training set of `data`, in place of those of an earlier audit.

    `data` must have been set up. `which_E` says which canary each extra example is a copy of.
    """
    base = data.train_set
    if isinstance(base, WithCanaries):
        data.train_set = base = base.base
    if is_numbered:
        data.collate = NumberedCollate(data)  # type: ignore[method-assign]
    data.train_set = WithCanaries(base, canaries, which_E, is_numbered=is_numbered)


def auditable(data: LightningDataModule | Any) -> ClickData:
    """`data` itself; it is refused if canaries cannot be put into it."""
    if not isinstance(data, ClickData):
        raise Refused(
            "Expected a data module derived from lightning_dpsparse.data.ClickData, found "
            f"{type(data).__name__}: canaries cannot be put into it. Derive from it, with a "
            "ClickDataset as train_set."
        )
    return data


def mark_as_audited(strategy: Strategy) -> None:
    """Have the privacy report, where there will be one, say what is in the data."""
    if not isinstance(strategy, DPSparseStrategy) or strategy.privacy is None:
        return
    taints = strategy.privacy.taints
    if _MARK not in taints:
        strategy.amend_plan(taints=(*taints, _MARK))

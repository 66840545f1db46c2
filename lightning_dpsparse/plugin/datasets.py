"""What can be told of a data set without reading an example of it.

A private run has to know whether two data sets share examples: whether one example would count
twice, whether validation looks at training data, whether weights have seen the data before. Subsets
and concatenations of PyTorch's say which data set their examples are really in. For everything
else, a data set has a name (`digest`), made of its class and its size, that goes into checkpoints.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sized
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Subset

from lightning_dpsparse.refused import Refused

Ints = NDArray[np.int64]

# N examples


def _places(dataset: Any, bases: list[object]) -> tuple[Ints, Ints]:
    """Where every example really is: the number of its data set in `bases`, and its number there.

    Data sets that are not in `bases` yet are added to it.
    """
    if isinstance(dataset, Subset):
        base_N, index_N = _places(dataset.dataset, bases)
        chosen = np.asarray(dataset.indices, dtype=np.int64)
        return base_N[chosen], index_N[chosen]
    if isinstance(dataset, ConcatDataset):
        parts = [_places(part, bases) for part in dataset.datasets]
        base_N, index_N = (np.concatenate(side) for side in zip(*parts))
        return base_N, index_N
    known = [number for number, base in enumerate(bases) if base is dataset]
    if not known:
        bases.append(dataset)
        known = [len(bases) - 1]
    size = len(cast(Sized, dataset))
    return np.full(size, known[0], dtype=np.int64), np.arange(size, dtype=np.int64)


def _is_wrapper(dataset: object) -> bool:
    return isinstance(dataset, (Subset, ConcatDataset))


def users_of(dataset: Any) -> object:
    """Whose each example is, as the data set says; None if it does not.

    A subset asks the data set that it is a part of, and a concatenation asks all its parts. Users
    of one name in two parts are one user, whose examples in both count together.
    """
    users = getattr(dataset, "users", None)
    if users is not None:
        return cast(object, users)
    if isinstance(dataset, Subset):
        of_all = users_of(dataset.dataset)
        chosen = np.asarray(dataset.indices, dtype=np.int64)
        return None if of_all is None else np.asarray(of_all)[chosen]
    if isinstance(dataset, ConcatDataset):
        parts = [users_of(part) for part in dataset.datasets]
        if any(part is None for part in parts):
            return None
        arrays = [np.asarray(part) for part in parts]
        if len({array.dtype.kind in "OUS" for array in arrays}) > 1:
            raise Refused(
                "Expected users of one kind in all parts of a ConcatDataset, found numbers in some "
                "and texts in others: they would never be the same person. Give all parts one kind."
            )
        return np.concatenate(arrays)
    return None


def check_no_repeats(dataset: object) -> None:
    """Refuse a data set that is known to hold an example more than once."""
    if not _is_wrapper(dataset):
        return
    base_N, index_N = _places(dataset, [])
    places = np.unique(np.stack([base_N, index_N]), axis=1).shape[1]
    if places < len(base_N):
        raise Refused(
            f"Expected every example once in the data set, found {len(base_N) - places:,} of them "
            f"again in {type(dataset).__name__}: one example would count as several. List each "
            "once, and train longer; or set unit=Users(max_examples=...) and `users`."
        )


def shares_examples(one: object, other: object) -> bool:
    """Whether two data sets are known to have an example in common."""
    if one is None or other is None:
        return False
    if not _is_wrapper(one) and not _is_wrapper(other):
        return one is other
    try:
        bases: list[object] = []
        mine, theirs = _places(one, bases), _places(other, bases)
    except TypeError:  # of unknown size
        return False
    size = max(int(mine[1].max(initial=0)), int(theirs[1].max(initial=0))) + 1
    return bool(np.isin(theirs[0] * size + theirs[1], mine[0] * size + mine[1]).any())


_MOST_PARTS = 16
"""A concatenation of more parts than this gets one short name for all of them."""


def digest(dataset: object) -> str | None:
    """A name for a data set, by what it is and its size, or by its own `privacy_id`.

    No example has a say in it: it goes into checkpoints. Two data sets of one kind and size are
    taken to be the same, unless each has a `privacy_id` that says otherwise. A subset is named
    after the whole, and a concatenation after its parts.
    """
    if dataset is None:
        return None
    names = sorted(set(_names(dataset)))
    if len(names) > _MOST_PARTS:
        names = [_short("+".join(names))]
    return "+".join(names)


def may_share(one: str | None, other: str | None) -> bool:
    """Whether data sets of these names may have examples in common. None is an unknown name.

    >>> may_share("ab+cd", "cd"), may_share("ab", "cd"), may_share("ab", None)
    (True, False, True)
    """
    return one is None or other is None or not set(one.split("+")).isdisjoint(other.split("+"))


def _names(dataset: Any) -> list[str]:
    name = getattr(dataset, "privacy_id", None)
    if name is None and isinstance(dataset, Subset):
        return _names(dataset.dataset)
    if name is None and isinstance(dataset, ConcatDataset):
        return [name for part in dataset.datasets for name in _names(part)]
    if name is None:
        kind = type(dataset)
        try:
            size = len(dataset)
        except TypeError:
            size = -1
        name = f"{kind.__module__}.{kind.__qualname__}, {size} examples"
    return [_short(str(name))]


def _short(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]

"""What is drawn: examples, examples of users who are held to a cap, or whole users.

A cap keeps a user's first k examples in the order of the data. Which are kept depends on no other
user.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_dpsparse.refused import Refused

Ints = NDArray[np.int64]


class Units(Protocol):
    """A numbered set of things to draw from."""

    @property
    def count(self) -> int: ...
    def examples(self, drawn: Ints) -> tuple[Ints, list[int] | None]:
        """The examples behind some units, and how many each unit has (None: one each)."""
        ...

    def bounds(self, day_starts: Sequence[int]) -> list[int]:
        """Where each day's units begin, with the end. Days begin at these examples."""
        ...


@dataclass(frozen=True)
class AllExamples:
    """Every example of the data."""

    count: int

    def examples(self, drawn: Ints) -> tuple[Ints, None]:
        return drawn, None

    def bounds(self, day_starts: Sequence[int]) -> list[int]:
        return [*day_starts, self.count]


class CappedExamples:
    """At most `max_examples` examples of every user, each drawn by itself."""

    def __init__(self, users_N: Sequence[int] | Ints, max_examples: int) -> None:
        order_N, starts_U = _by_user(users_N)
        self._kept = np.sort(order_N[_within_cap(order_N.size, starts_U, max_examples)])
        self.num_users = starts_U.size

    @property
    def count(self) -> int:
        return int(self._kept.size)

    def examples(self, drawn: Ints) -> tuple[Ints, None]:
        return self._kept[drawn], None

    def bounds(self, day_starts: Sequence[int]) -> list[int]:
        return [*np.searchsorted(self._kept, day_starts).tolist(), self.count]


class WholeUsers:
    """Users, each with at most `max_examples` examples that come together.

    Users are numbered in the order of their first examples.
    """

    def __init__(self, users_N: Sequence[int] | Ints, max_examples: int) -> None:
        order_N, starts_U = _by_user(users_N)
        kept = _within_cap(order_N.size, starts_U, max_examples)
        sizes_U = np.minimum(np.diff(np.append(starts_U, order_N.size)), max_examples)
        examples = order_N[kept]
        starts_U = np.cumsum(sizes_U) - sizes_U
        first_U = examples[starts_U] if examples.size else starts_U
        rank_U = np.argsort(first_U, kind="stable")
        self._examples, self._starts, self._sizes = examples, starts_U[rank_U], sizes_U[rank_U]
        self._first = first_U[rank_U]
        self.num_users = self.count

    @property
    def count(self) -> int:
        return int(self._sizes.size)

    def examples(self, drawn: Ints) -> tuple[Ints, list[int]]:
        pieces = [
            self._examples[start : start + size]
            for start, size in zip(self._starts[drawn].tolist(), self._sizes[drawn].tolist())
        ]
        flat = np.concatenate([np.zeros(0, dtype=np.int64), *pieces])
        return flat, self._sizes[drawn].tolist()

    def bounds(self, day_starts: Sequence[int]) -> list[int]:
        return [*np.searchsorted(self._first, day_starts).tolist(), self.count]


def check_users(users_N: NDArray[Any], num_examples: int) -> None:
    """Refuse what does not say whose each example is, by a number or a text for each."""
    is_plain = users_N.dtype.kind in "biufUS"
    if users_N.dtype.kind == "O":  # texts from a table, say
        is_plain = {type(user) for user in users_N.ravel()} in ({str}, {int}, {bytes}, set())
    if users_N.shape != (num_examples,) or not is_plain:
        raise Refused(
            f"Expected {num_examples:,} users, one for each example, found {users_N.dtype} of "
            f"shape {users_N.shape}. Give each example its user's number."
        )
    if users_N.dtype.kind == "f" and not np.isfinite(users_N).all():
        raise Refused(
            "Expected a user for every example, found numbers that are not finite: examples "
            "without a user would protect nobody. Give each a number."
        )


def check_day_starts(starts: NDArray[Any], num_examples: int) -> None:
    """Refuse what does not say at which example each day begins."""
    is_list = starts.ndim == 1 and starts.size > 0 and starts.dtype.kind in "iu"
    if not is_list or (np.diff(starts.astype(np.int64)) < 0).any():
        raise Refused(
            "Expected day_starts to be the numbers of the days' first examples, in order, found "
            f"{starts.dtype} of shape {starts.shape}, or another order. Give whole numbers."
        )
    if starts.min() < 0 or starts.max() > num_examples:
        raise Refused(
            f"Expected day_starts from 0 to {num_examples:,}, the number of examples, found other. "
            "Give the numbers of the days' first examples."
        )


def check_one_day(users_N: Sequence[int] | Ints, day_starts: Sequence[int]) -> None:
    """Refuse users with examples on several days where the plan says that there are none."""
    users = np.unique(np.asarray(users_N), return_inverse=True)[1]
    day_N = np.searchsorted(np.asarray(day_starts), np.arange(users.size), side="right")
    pairs = np.unique(np.stack([users, day_N]), axis=1)
    if np.unique(users).size != pairs.shape[1]:
        raise Refused(
            "Expected every user to live in one day, as the plan says, found users with examples "
            "on several. Set in_one_day to False: days then add up."
        )


def _by_user(users_N: Sequence[int] | Ints) -> tuple[Ints, Ints]:
    """Examples sorted by user, in their order within one, and where each user begins."""
    users = np.asarray(users_N)
    order = np.argsort(users, kind="stable").astype(np.int64)
    is_first = np.ones(users.size, dtype=bool)
    is_first[1:] = users[order][1:] != users[order][:-1]
    return order, np.flatnonzero(is_first).astype(np.int64)


def _within_cap(size: int, starts_U: Ints, max_examples: int) -> NDArray[np.bool_]:
    sizes_U = np.diff(np.append(starts_U, size))
    position = np.arange(size) - np.repeat(starts_U, sizes_U)
    return position < max_examples

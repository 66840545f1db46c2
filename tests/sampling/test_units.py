"""Caps on users, and what is drawn of them."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_dpsparse.sampling.units import (
    AllExamples,
    CappedExamples,
    WholeUsers,
    check_one_day,
)

USERS = [7, 3, 7, 7, 9, 3, 7]


def everything(units: CappedExamples | WholeUsers) -> list[int]:
    examples: list[int] = units.examples(np.arange(units.count))[0].tolist()
    return examples


@pytest.mark.parametrize("kind", [CappedExamples, WholeUsers])
def test_a_user_keeps_the_first_examples(kind: type[CappedExamples | WholeUsers]) -> None:
    assert sorted(everything(kind(USERS, 2))) == [0, 1, 2, 4, 5]
    assert sorted(everything(kind(USERS, 9))) == list(range(7))
    assert sorted(everything(kind(USERS, 1))) == [0, 1, 4]
    assert kind(USERS, 2).num_users == 3


@pytest.mark.parametrize("kind", [CappedExamples, WholeUsers])
def test_who_else_is_there_does_not_matter(kind: type[CappedExamples | WholeUsers]) -> None:
    """Without user 3, the others keep the same examples."""
    kept = {(USERS[i], i) for i in everything(kind(USERS, 2))}
    rest = [i for i, user in enumerate(USERS) if user != 3]
    without = {(USERS[rest[i]], rest[i]) for i in everything(kind([USERS[i] for i in rest], 2))}
    assert without == {pair for pair in kept if pair[0] != 3}


def test_users_come_whole_and_together() -> None:
    units = WholeUsers(USERS, 3)
    assert units.count == 3
    examples, sizes = units.examples(np.array([0, 2]))  # by first example: users 7, 3, 9
    assert examples.tolist() == [0, 2, 3, 4]
    assert sizes == [3, 1]
    nobody, none = units.examples(np.zeros(0, dtype=np.int64))
    assert nobody.tolist() == none == []


def test_days_bound_what_is_drawn() -> None:
    assert AllExamples(7).bounds([0, 3]) == [0, 3, 7]
    assert CappedExamples(USERS, 2).bounds([0, 3]) == [0, 3, 5]  # examples 0 1 2 | 4 5
    assert WholeUsers([1, 1, 2, 3, 3], 5).bounds([0, 3]) == [0, 2, 3]


def test_users_on_two_days_are_found() -> None:
    check_one_day([1, 1, 2, 3, 3], [0, 3])
    with pytest.raises(ValueError, match="Expected every user to live in one day"):
        check_one_day([1, 1, 2, 1, 3], [0, 3])

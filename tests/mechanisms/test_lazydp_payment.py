"""Paying everything: the same on any number of threads, and torch's own number stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dpsparse import LazyDP
from lightning_dpsparse.engine.state import finish
from lightning_dpsparse.noise.keys import RunKey
from lightning_dpsparse.noise.sources import FastNoise, RowNoise, SecureNoise
from tests.support.debts import indebted


class OneStack:
    """The state of a kernel's tables, and a kernel, of one stack."""

    def __init__(self, source: Any) -> None:
        self.debts, clock, self.weight = indebted(source, LazyDP(chunk_rows=128))
        clock.tick(0, 1.0, 0.5)
        clock.tick(1, 1.0, 0.25)
        self.is_noted = False
        self.kernel = self

    def pending_work(self) -> Iterator[Callable[[], None]]:
        for chunk in self.debts.chunks():
            yield partial(self.debts.pay_chunk, *chunk)

    @contextmanager
    def writing(self) -> Iterator[None]:
        yield

    def note_work_done(self) -> None:
        self.is_noted = True


def paid(source: Any, threads: int) -> Tensor:
    before = torch.get_num_threads()
    stack: Any = OneStack(source(RunKey.fixed(2)))
    try:
        torch.set_num_threads(threads)
        finish([stack])
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert stack.is_noted
    weight: Tensor = stack.weight
    return weight


@pytest.mark.parametrize("source", [FastNoise, SecureNoise, RowNoise])
def test_threads_pay_what_one_would(source: Any) -> None:
    alone = paid(source, 1)
    assert (alone != 0).double().mean() > 0.9999  # a draw is nothing once in a million
    for _ in range(5):
        assert torch.equal(paid(source, 4), alone)

"""A row pays for every step exactly once, with the right spread, however often it is read."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from lightning_dpsparse import LazyDP
from lightning_dpsparse.mechanisms.lazydp.debts import Debts
from lightning_dpsparse.mechanisms.lazydp.weight_grid import is_felt, payment_grid
from lightning_dpsparse.noise.keys import RunKey, Stream
from lightning_dpsparse.noise.sources import FastNoise, NoiseSource, RowNoise, SecureNoise
from tests.support.debts import NAMES, SHARD_OFFSETS, STDDEV, STEPS, WIDTH, indebted

NEVER, ONCE, OFTEN = slice(0, 1000), slice(1000, 2000), slice(2000, 3000)


def learning_rate(step: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * step / STEPS))


def pay_all(debts: Debts) -> None:
    for chunk in debts.chunks():
        debts.pay_chunk(*chunk)


def run(source: NoiseSource, mechanism: LazyDP, weight_decay: float = 0.0) -> Tensor:
    """Rows that are never read, once (some early, some late), and in every step."""
    debts, clock, weight = indebted(source, mechanism)
    for step in range(STEPS):
        once = torch.arange(ONCE.start, ONCE.stop)
        rows = [once[once % STEPS == step], torch.arange(OFTEN.start, OFTEN.stop)]
        debts.pay(debts.bill(torch.cat(rows)))
        clock.tick(step, STDDEV, learning_rate(step), weight_decay)
    pay_all(debts)
    return weight


def right_stddev(weight_decay: float = 0.0) -> float:
    variance = 0.0
    for step in range(STEPS):
        keep = 1 - learning_rate(step) * weight_decay
        variance = keep**2 * variance + (learning_rate(step) * STDDEV) ** 2
    return math.sqrt(variance)


@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@pytest.mark.parametrize("aggregate", [True, False])
@pytest.mark.parametrize("source", [FastNoise, SecureNoise])
def test_rows_are_alike_whether_read_never_once_or_often(
    source: type[NoiseSource], aggregate: bool, weight_decay: float
) -> None:
    """16,000 draws a group: Kolmogorov-Smirnov at 1e-4 sees a standard deviation 4% off, and the
    mean square has a standard error of 1.1%."""
    mechanism = LazyDP(aggregate=aggregate, chunk_rows=700)
    weight = run(source(RunKey.fixed(3)), mechanism, weight_decay) / right_stddev(weight_decay)
    for group in (NEVER, ONCE, OFTEN):
        draws = weight[group].flatten().double()
        assert stats.kstest(draws.numpy(), "norm").pvalue > 1e-4
        assert abs(float(draws.square().mean()) - 1) < 5 * math.sqrt(2 / draws.numel())
    assert len(weight.unique(dim=0)) == len(weight)  # no draw was used twice


def test_replayed_draws_are_those_of_eager_noise() -> None:
    source, decay = RowNoise(RunKey.fixed(3)), 0.1
    eager = torch.zeros(3000, WIDTH, dtype=torch.float64)
    for step in range(STEPS):
        for table, (name, shard_offset) in enumerate(zip(NAMES, SHARD_OFFSETS)):
            part = eager[1500 * table : 1500 * (table + 1)]
            drawn = source.fill_(
                torch.empty(1500, WIDTH), Stream("gradient", name, step, shard_offset)
            )
            rate = learning_rate(step)
            part.mul_(1 - rate * decay).sub_(rate * STDDEV * drawn.double())
    lazy = run(source, LazyDP(aggregate=False, chunk_rows=700), decay)
    torch.testing.assert_close(lazy.double(), eager, rtol=0, atol=1e-6)


def test_who_has_paid_owes_nothing() -> None:
    debts, clock, weight = indebted(FastNoise(RunKey.fixed(1)), LazyDP(chunk_rows=700))
    clock.tick(0, 1.0, 1.0)
    debts.pay(debts.bill(torch.tensor([5, 9])))
    before = weight.clone()
    assert debts.owing(torch.tensor([4, 5, 9, 10])).tolist() == [4, 10]
    pay_all(debts)
    assert torch.equal(weight[[5, 9]], before[[5, 9]])
    again = weight.clone()
    pay_all(debts)
    assert torch.equal(weight, again)


class Failing(FastNoise):
    """Fails once, at a given draw."""

    def __init__(self, key: RunKey, at: int) -> None:
        super().__init__(key)
        self.left = at

    def fill_(self, *args: object, **kwargs: object) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise MemoryError("no memory for noise")
        return super().fill_(*args, **kwargs)  # type: ignore[arg-type]


def test_a_payment_that_failed_goes_on_and_nobody_pays_twice() -> None:
    """Who paid before the failure, in whole chunks, does not move again; all others pay."""
    debts, clock, weight = indebted(Failing(RunKey.fixed(1), at=3), LazyDP(chunk_rows=700))
    clock.tick(0, 1.0, 1.0)
    with pytest.raises(MemoryError):
        pay_all(debts)
    halfway = weight.clone()
    assert (halfway[:1400] != 0).all()
    assert (halfway[1400:] == 0).all()
    pay_all(debts)
    assert torch.equal(weight[:1400], halfway[:1400])
    draws = weight.flatten().double()
    assert stats.kstest(draws.numpy(), "norm").pvalue > 1e-4


def test_the_mechanism_promises_the_released_model_only() -> None:
    assert LazyDP.is_private
    assert "memory of the running job" in LazyDP.threat_model


@pytest.mark.parametrize(("largest", "least"), [(0.1, 2.0**-21), (3.0, 2.0**-17)])
def test_noise_that_weights_have_no_digits_for_is_refused(largest: float, least: float) -> None:
    """Eight spacings of the grid on which float32 holds four times the largest weight."""
    weights = [torch.full((3, 4), largest)]
    grid = payment_grid(weights, least)
    assert grid == least / 8
    with pytest.raises(ValueError, match="have no digits left for it"):
        payment_grid(weights, least * 0.99)
    assert is_felt(least, grid)
    assert not is_felt(least * 0.99, grid)  # where a schedule brings it there, the tables rest


def test_a_grid_is_no_finer_than_noise_needs() -> None:
    """Large noise: weights may grow to 256 of its standard deviations."""
    assert payment_grid([torch.zeros(1, 1)], 1.0) == 2.0**-16
    assert payment_grid([torch.zeros(1, 1)], 0.0) is None

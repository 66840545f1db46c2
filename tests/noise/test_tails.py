"""Noise has tails: nobody is given away by a draw that no other data could have led to."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from lightning_dpsparse.noise import keystream, tails
from lightning_dpsparse.noise.keys import RunKey, Stream
from lightning_dpsparse.noise.sources import FastNoise, SecureNoise
from lightning_dpsparse.noise.tails import deepen_tails_

STREAM = Stream("gradient", "table_0", step=3)


def uniform(count: int) -> Tensor:
    return 1.0 - torch.rand(count, dtype=torch.float64)


def test_draws_beyond_are_normal_and_the_others_stay() -> None:
    """With the tail at one standard deviation a third of the draws is made anew.

    200,000 draws of a fixed seed: a Kolmogorov-Smirnov test rejects the right law once in 10^6.
    """
    torch.manual_seed(0)
    before = 3.0 * torch.randn(200, 1000)
    after = deepen_tails_(before.clone(), 3.0, uniform, tail=1.0)
    beyond = before.abs() > 3.0
    assert torch.equal(after[~beyond], before[~beyond])
    assert torch.equal(after.sign(), before.sign())
    assert (after[beyond] != before[beyond]).double().mean() > 0.999
    assert bool((after[beyond].abs() >= 3.0 * (1 - 1e-6)).all())
    assert stats.kstest(after.flatten().double() / 3.0, "norm").pvalue > 1e-6


def test_the_furthest_draw_is_that_of_53_bits_beyond_the_tail() -> None:
    drawn = deepen_tails_(
        torch.tensor([-5.5, 0.0, 5.1]), 1.0, lambda n: torch.full((n,), 2.0**-53).double()
    )
    furthest = -stats.norm.ppf(2.0**-53 * stats.norm.sf(tails.TAIL))
    assert furthest > 9.7
    torch.testing.assert_close(drawn, torch.tensor([-furthest, 0.0, furthest]).float())


def test_nothing_is_drawn_where_nothing_is_beyond() -> None:
    def never(count: int) -> Tensor:
        raise AssertionError

    drawn = torch.tensor([4.9, -4.9])
    assert torch.equal(deepen_tails_(drawn.clone(), 1.0, never), drawn)
    assert deepen_tails_(torch.empty(0), 1.0, never).numel() == 0


@pytest.mark.parametrize("way", ["fill", "add"])
def test_torchs_own_draws_have_their_tails_deepened(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tail from 2.5 on that begins at 50, every draw is below 2.5 or above 50."""
    monkeypatch.setattr(torch.special, "ndtri", lambda u: torch.full_like(u, -50.0))
    monkeypatch.setattr(tails.deepen_tails_, "__defaults__", (2.5,))
    drawn = torch.zeros(1, 60_000)
    _draw(FastNoise, drawn, way)
    _check_share(drawn)


@pytest.mark.parametrize("kind", [FastNoise, SecureNoise])
@pytest.mark.parametrize("way", ["fill", "add"])
def test_draws_of_a_keystream_have_their_tails_deepened(
    kind: Any, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, before two and two are turned."""
    monkeypatch.setattr(torch.special, "ndtri", lambda u: torch.full_like(u, -50.0))
    monkeypatch.setattr(keystream, "TAIL", 2.5)
    drawn = torch.zeros(1, 3 * keystream._CHUNK)
    _draw(kind, drawn, way)
    y, z = drawn.view(3, 2, -1).double().unbind(1)
    c, s = math.cos(1.0), math.sin(1.0)
    _check_share(torch.stack([c * y - s * z, s * y + c * z]))


def _draw(kind: Any, out: Tensor, way: str) -> None:
    source = kind(RunKey.fixed(7))
    source.fill_(out, STREAM, 2.0) if way == "fill" else source.add_(out, STREAM, 2.0)


def _check_share(drawn: Tensor) -> None:
    far = drawn.abs() > 5.0 * (1 + 1e-5)
    torch.testing.assert_close(
        drawn[far].abs(), torch.full_like(drawn[far], 100.0), rtol=1e-5, atol=0
    )
    share = math.erfc(2.5 / math.sqrt(2.0))
    assert abs(far.double().mean() - share) < 5 * math.sqrt(share / drawn.numel())

"""Noise is normal, streams never meet, and no seed of the user's reaches it."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_dpsparse.noise.grid import grid_of
from lightning_dpsparse.noise.keys import RunKey, Stream
from lightning_dpsparse.noise.sources import FastNoise, NoiseSource, RowNoise, SecureNoise

SOURCES = [FastNoise, SecureNoise, RowNoise]
KEY = RunKey.fixed(7)
STREAM = Stream("gradient", "table_0", step=3)


def draw(
    source: NoiseSource, stream: Stream = STREAM, rows: int = 1000, columns: int = 100
) -> Tensor:
    return source.fill_(torch.full((rows, columns), float("nan")), stream)


@pytest.mark.parametrize("kind", SOURCES)
def test_draws_are_standard_normal(kind: Any) -> None:
    """10^6 draws of a fixed key; every bound is five standard errors."""
    x = draw(kind(KEY), rows=10_000).double().flatten()
    n = x.numel()
    assert abs(x.mean()) < 5 / math.sqrt(n)
    assert abs(x.square().mean() - 1) < 5 * math.sqrt(2 / n)  # a std of 0.996 or 1.004 fails
    assert abs(x.pow(4).mean() - 3) < 5 * math.sqrt(96 / n)
    for threshold in (1.0, 2.0, 3.0, 4.0):
        p = math.erfc(threshold / math.sqrt(2))
        assert (
            abs((x.abs() > threshold).double().mean() - p) < 5 * math.sqrt(p * (1 - p) / n) + 5 / n
        )
    # Neighbours along rows and columns are uncorrelated.
    y = x.view(10_000, 100)
    for a, b in ((y[1:], y[:-1]), (y[:, 1:], y[:, :-1])):
        assert abs((a * b).mean()) < 5 / math.sqrt(a.numel())


@pytest.mark.parametrize("kind", SOURCES)
def test_the_standard_deviation_scales_the_draws(kind: Any) -> None:
    plain = draw(kind(KEY))
    scaled = kind(KEY).fill_(torch.empty(1000, 100), STREAM, 0.25)
    torch.testing.assert_close(scaled, 0.25 * plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", SOURCES)
def test_any_field_of_a_stream_makes_other_draws(kind: Any) -> None:
    source = kind(KEY)
    streams = [
        STREAM,
        Stream("mask", "table_0", 3),
        Stream("gradient", "table_1", 3),
        Stream("gradient", "table_0", 4),
        *([] if kind is RowNoise else [Stream("gradient", "table_0", 3, (500, 0))]),
        *([] if kind is RowNoise else [Stream("gradient", "table_0", 3, (0, 500))]),
        *([] if kind is RowNoise else [Stream("gradient", "table_0", 3, part=1)]),
    ]
    drawn = [draw(source, stream) for stream in streams] + [draw(kind(RunKey.fixed(8)))]
    for a, b in combinations(drawn, 2):
        assert (a == b).float().mean() < 1e-3
        assert abs((a * b).mean()) < 5 / math.sqrt(a.numel())


@pytest.mark.parametrize("kind", SOURCES)
def test_the_same_key_and_stream_replay(kind: Any) -> None:
    assert torch.equal(draw(kind(RunKey.fixed(7))), draw(kind(RunKey.fixed(7))))


@pytest.mark.parametrize("kind", SOURCES)
def test_noise_is_added_to_what_is_there(kind: Any) -> None:
    """Chunk by chunk, none like another, with the deviation that was asked for."""
    size = 3 * (1 << 17) + 5
    start = torch.arange(size, dtype=torch.float32)[None] / size
    added = kind(KEY).add_(start.clone(), STREAM, 2.0) - start
    assert abs(added.square().mean() - 4) < 5 * 4 * math.sqrt(2 / size)
    one, two, three = added[0, : size - 5].view(3, -1)
    for a, b in ((one, two), (two, three), (one, three)):
        assert abs((a * b).mean()) < 5 * 4 / math.sqrt(a.numel())
    assert torch.equal(added, kind(KEY).add_(start.clone(), STREAM, 2.0) - start)
    other = Stream("gradient", "table_0", 4)
    assert not torch.equal(added, kind(KEY).add_(start.clone(), other, 2.0) - start)


@pytest.mark.parametrize("kind", SOURCES)
def test_seeding_everything_does_not_reach_it_nor_the_other_way_round(kind: Any) -> None:
    runs = []
    for _ in range(2):
        pl.seed_everything(0, verbose=False)
        runs.append((draw(kind(RunKey())), torch.randn(3)))
    assert (runs[0][0] == runs[1][0]).float().mean() < 1e-3  # fresh noise under one seed
    assert torch.equal(runs[0][1], runs[1][1])  # and the user's generator is not disturbed


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("stddev", [1.0, 0.3])
def test_draws_are_multiples_of_the_grid(kind: Any, stddev: float) -> None:
    filled = kind(KEY).fill_(torch.empty(100, 100), STREAM, stddev)
    added = kind(KEY).add_(torch.full((1, 10_000), 0.123), STREAM, stddev)
    for values in (filled, added):
        whole = values.double() / grid_of(stddev)
        assert torch.equal(whole, whole.round())


@pytest.mark.parametrize("split", [300, 999])
def test_row_noise_does_not_depend_on_how_a_table_is_cut(split: int) -> None:
    source = RowNoise(KEY)
    whole = draw(source)
    low = draw(source, STREAM, split, 60)
    high = draw(source, Stream("gradient", "table_0", 3, shard=(split, 60)), 1000 - split, 40)
    assert torch.equal(low, whole[:split, :60])
    assert torch.equal(high, whole[split:, 60:])
    rows = torch.tensor([999, 0, 5])
    assert torch.equal(source.fill_(torch.empty(3, 100), STREAM, rows_R=rows), whole[rows])


def test_a_key_does_not_show() -> None:
    key = RunKey()
    assert key.secret.hex() not in repr(key)
    assert str(key.secret) not in repr(key)
    assert key != RunKey()
    assert not key.is_fixed
    assert RunKey.fixed(1).is_fixed


def test_keys_have_128_bits() -> None:
    with pytest.raises(ValueError, match="Expected a key of 16 bytes, found 3"):
        RunKey(b"abc")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", SOURCES)
def test_draws_on_a_gpu_are_standard_normal(kind: Any) -> None:
    x = kind(KEY).fill_(torch.empty(10_000, 100, device="cuda"), STREAM).double()
    assert abs(x.square().mean() - 1) < 5 * math.sqrt(2 / x.numel())

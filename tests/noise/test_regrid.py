"""From one grid to another: the new one is reached alike, whatever the old one was."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from lightning_dpsparse.noise.grid import grid_of
from lightning_dpsparse.noise.keys import RunKey, Stream
from lightning_dpsparse.noise.regrid import regrid_
from lightning_dpsparse.noise.sources import FastNoise, RowNoise, SecureNoise

SOURCES = [FastNoise, SecureNoise, RowNoise]
STREAM = Stream("landing", "table_0", step=3)


@pytest.mark.parametrize("kind", SOURCES)
def test_dither_is_uniform(kind: Any) -> None:
    drawn = kind(RunKey.fixed(7)).dither_(torch.empty(2000, 128), STREAM).double()
    n = drawn.numel()
    assert drawn.min() >= -0.5
    assert drawn.max() <= 0.5
    assert abs(drawn.mean()) < 5 / math.sqrt(12 * n)
    assert abs(drawn.square().mean() - 1 / 12) < 5 * math.sqrt(1 / 180 / n)
    counts = torch.histc(drawn.float(), 64, -0.5, 0.5)
    chi2 = ((counts - n / 64) ** 2 / (n / 64)).sum()
    assert chi2 < 63 + 5 * math.sqrt(2 * 63)
    neighbours = (drawn.flatten()[1:] * drawn.flatten()[:-1]).mean()
    assert abs(neighbours) < 5 / 12 / math.sqrt(n)


@pytest.mark.parametrize("kind", SOURCES)
def test_dither_is_named_by_its_stream(kind: Any) -> None:
    source, other = kind(RunKey.fixed(7)), kind(RunKey.fixed(8))
    drawn = source.dither_(torch.empty(40, 8), STREAM)
    assert torch.equal(drawn, source.dither_(torch.empty(40, 8), STREAM))
    for stream in (Stream("landing", "table_0", 4), Stream("owed", "table_0", 3)):
        assert not torch.equal(drawn, source.dither_(torch.empty(40, 8), stream))
    assert not torch.equal(drawn, other.dither_(torch.empty(40, 8), STREAM))


def test_dither_by_row_follows_the_row() -> None:
    source = RowNoise(RunKey.fixed(7))
    whole = source.dither_(torch.empty(40, 8), STREAM)
    rows = torch.tensor([3, 17, 30])
    assert torch.equal(whole[rows], source.dither_(torch.empty(3, 8), STREAM, rows))


@pytest.mark.parametrize("scale", [0.7, 0.31, 1.0, 2.3, 13.7])
def test_every_number_of_the_new_grid_is_reached_alike(scale: float) -> None:
    """Each of 2^14 neighbouring multiples of the spacing, with each of 2^16 moves.

    Where the old spacing covers a cell of the new grid k times over or a k-th of it, a cell has the
    share scale of it: up to one move in a cell's many.
    """
    moves = (np.arange(1 << 16) + 0.5) / (1 << 16) - 0.5
    values = np.arange(1 << 9, dtype=np.float64)
    counts: dict[float, int] = {}
    for value in values:
        column = torch.full((1, len(moves)), float(value), dtype=torch.float64)
        landed = regrid_(column, 1.0, scale, 1.0, torch.from_numpy(moves)[None])
        found, count = np.unique(landed.numpy(), return_counts=True)
        for at, n in zip(found.tolist(), count.tolist()):
            counts[at] = counts.get(at, 0) + n
    inner = np.array([counts.get(float(at), 0) for at in range(2, int(scale * 500))])
    expected = len(moves) / scale
    assert np.abs(inner / expected - 1).max() < 3 * scale * 2.0**-16 + 1e-9


def test_without_moves_some_are_never_reached() -> None:
    """The leak itself: this is what `regrid_` is for."""
    values = torch.arange(512.0, dtype=torch.float64)[None]
    landed = regrid_(values, 1.0, 1.6, 1.0, torch.zeros_like(values))
    assert len(landed.unique()) == 512
    assert landed.max() > 800


@pytest.mark.parametrize("kind", SOURCES)
def test_landed_noise_keeps_its_law(kind: Any) -> None:
    """Scaled row by row: mean, variance, and whole multiples of the new grid."""
    source, grid = kind(RunKey.fixed(9)), 2.0**-20
    scales = torch.tensor([0.003, 0.07, 0.0011]).double().repeat_interleave(4000)
    drawn = source.fill_(torch.empty(12000, 16), STREAM)
    dither = source.dither_(torch.empty_like(drawn), Stream("other", "table_0", 3))
    landed = regrid_(drawn, grid_of(1.0), scales, grid, dither).double()
    assert torch.equal(landed, (landed / grid).round() * grid)
    for part, scale in zip(landed.view(3, -1), (0.003, 0.07, 0.0011)):
        n = part.numel()
        assert abs(part.mean()) < 5 * scale / math.sqrt(n)
        assert abs(part.square().mean() / scale**2 - 1) < 5 * math.sqrt(2 / n)
        parity = (part / grid).remainder(2).mean()
        assert abs(parity - 0.5) < 5 * 0.5 / math.sqrt(n)

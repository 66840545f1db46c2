"""The law of the noise, computed number by number, not sampled."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.special import ndtr

from lightning_dpsparse.noise import keystream
from lightning_dpsparse.noise.grid import grid_of, round_to_
from lightning_dpsparse.noise.keystream import Keystream, hidden_share

Array = NDArray[np.float64]
CHUNK, BLUR = keystream._CHUNK, keystream._BLUR


class Dictated:
    """A cipher whose next words, and the bits that blur them, are given."""

    def __init__(self) -> None:
        self.words, self.halves = np.zeros(0, np.int32), np.zeros(0, np.int16)

    def update_into(self, zeros: Any, out: bytearray) -> None:
        count = len(self.words)
        assert len(zeros) == 8 * count
        out[: 4 * count] = self.words.tobytes()
        out[4 * count : 8 * count] = self.halves.tobytes()

    def update(self, zeros: bytes) -> bytes:
        return np.random.default_rng(0).bytes(len(zeros))


def whole_numbers(words: NDArray[np.int64], stddev: float, halves: Any = None) -> Array:
    stream, cipher = Keystream(bytes(16)), Dictated()
    cipher.words = words.astype(np.int32)
    cipher.halves = np.zeros(2 * len(words), np.int16) if halves is None else halves
    stream._bytes = cipher  # type: ignore[assignment]
    assert grid_of(stddev) == 1.0
    return stream.normal_(torch.empty(len(words)), stddev).double().numpy()


def distinct_words() -> Iterator[tuple[NDArray[np.int64], int]]:
    """Positive words that float32 tells apart, and how many words each stands for."""
    octaves = [(0, 1 << 24, 1), *((1 << e, 1 << (e + 1), 1 << (e - 23)) for e in range(24, 31))]
    for first, stop, step in octaves:
        for start in range(first, stop, CHUNK * step):
            yield np.arange(start, min(stop, start + CHUNK * step), step), step


@pytest.mark.parametrize(
    "stddev",
    [
        pytest.param(2.0**19, id="coarsest"),
        pytest.param(1.37 * 2.0**19, id="finer", marks=pytest.mark.slow),
    ],
)
def test_every_number_has_the_probability_of_a_blurred_rounded_gaussian(stddev: float) -> None:
    """Up to a factor of 1 +- 2e-5 wherever words are not replaced; and the score, the slope of the
    logarithm, is right to 2e-3 in root mean square. A shift of standard deviations d, spread over
    any number of coordinates, then has a privacy loss whose variance is d^2 (1 + 4e-6)."""
    scale = stddev * math.sqrt(1 - keystream._BLUR_VARIANCE / stddev**2)
    size = int(4.1 * stddev)
    near = np.zeros(size)
    for words, step in distinct_words():
        keep = words < keystream._NEAR
        if keep.any():
            found = whole_numbers(words[keep], stddev).astype(np.int64)
            near += step * np.bincount(found, minlength=size)
    probability = blurred(near / 2.0**31)
    tail = 2 * ndtr(-np.maximum(0.0, np.arange(size + 1) - 0.5) / scale)
    ideal = blurred(tail[:-1] - tail[1:])
    inside = np.abs(np.arange(len(ideal)) - len(ideal) // 2) < 4.0 * scale - BLUR
    error = probability[inside] / ideal[inside] - 1
    assert np.abs(error).max() < 2e-5
    score_error = np.diff(error) * stddev
    assert math.sqrt((score_error**2 * ideal[inside][1:]).sum()) < 2e-3


def blurred(positive: Array) -> Array:
    """A law on whole numbers from that of their absolute values, after the two uniform draws."""
    law = np.concatenate([positive[:0:-1] / 2, positive[:1], positive[1:] / 2])
    for _ in range(2):
        total = np.concatenate([[0.0], np.cumsum(law)])
        law = (total[BLUR:] - total[:-BLUR]) / BLUR
    return law


def test_negative_words_lead_to_the_opposite_numbers() -> None:
    words = np.arange(1, 2**31 - 2**20, 104_729)
    assert np.array_equal(whole_numbers(-words, 2.0**19), -whole_numbers(words, 2.0**19))


def test_the_blur_is_the_difference_of_two_uniform_draws() -> None:
    """All 2^16 halves: each of 2^15 values twice, from either side, with opposite signs."""
    halves = np.arange(-(2**15), 2**15).astype(np.int16)
    none = np.zeros_like(halves)
    words = np.zeros(2**16, np.int64)
    one = whole_numbers(words, 2.0**19, np.concatenate([halves, none]))
    other = whole_numbers(words, 2.0**19, np.concatenate([none, halves]))
    assert np.array_equal(np.sort(one), np.repeat(np.arange(BLUR), 2))
    assert np.array_equal(other, -one)


def test_words_beyond_four_standard_deviations_are_drawn_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exactly those: the last one inside lies at 4.0, and the share beyond is that of the law."""
    near, stddev = keystream._NEAR, 2.0**19
    inside = np.array([near - 1, -near + 1, 0])
    beyond = np.array([near, near + 1, 2**31 - 1, -near - 1, -(2**31)])
    assert np.abs(whole_numbers(inside, stddev)).max() == pytest.approx(4 * stddev, rel=2e-3)
    monkeypatch.setattr(torch.special, "ndtri", lambda u: torch.full_like(u, -50.0))
    scale = stddev * hidden_share(1.0)
    found = whole_numbers(np.concatenate([inside, beyond]), stddev)
    assert np.abs(found[:3]).max() < 4.01 * stddev
    assert np.allclose(found[3:], 50 * scale * np.array([1, 1, 1, -1, -1]), rtol=1e-6)
    assert pytest.approx(ndtr(-4.0), rel=5e-3) == keystream._BEYOND
    assert pytest.approx(4.0, abs=1e-3) == keystream.TAIL


def test_tails_follow_their_law_as_far_as_53_bits_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    right = torch.special.ndtri

    def watched(u: torch.Tensor) -> torch.Tensor:
        asked.extend(u.tolist())
        return right(u)

    monkeypatch.setattr(torch.special, "ndtri", watched)
    monkeypatch.setattr(
        Keystream, "uniform", lambda self, n: torch.full((n,), 2.0**-53, dtype=torch.float64)
    )
    found = whole_numbers(np.array([2**31 - 1, -(2**31)]), 2.0**19) / 2.0**19
    assert asked == [2.0**-53 * keystream._BEYOND] * 2
    assert found[0] == -found[1] > 9.3


def test_most_of_a_draw_is_gaussian() -> None:
    """What the accountant relies on: a deviation smaller by one or three parts in ten thousand."""
    assert 1 - 3.3e-4 < hidden_share(1.0) < 1 - 3.2e-4
    assert 1 - 8.3e-5 < hidden_share(1.0 - 2.0**-20) < 1 - 8.0e-5


@pytest.mark.parametrize("stddev", [1.0, 0.99, 1.5e-3, 7e4, 1e-30, 1e30])
def test_a_grid_is_a_power_of_two_with_2_to_the_19_spacings_to_a_standard_deviation(
    stddev: float,
) -> None:
    grid = grid_of(stddev)
    assert math.frexp(grid)[0] == 0.5
    assert 2**19 <= stddev / grid < 2**20


def test_numbers_go_to_the_nearest_multiple() -> None:
    values = torch.tensor([0.26, 0.24, -0.26, 0.0, 1.0e9, -7.75])
    assert round_to_(values.clone(), 0.5).tolist() == [0.5, 0.0, -0.5, 0.0, 1.0e9, -8.0]

"""Words of a keystream become normal draws on a grid. (Their law is in `test_law.py`.)"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from lightning_dpsparse.noise import erfinv, keystream
from lightning_dpsparse.noise.grid import grid_of
from lightning_dpsparse.noise.keystream import Keystream

KEY = bytes(range(16))
CHUNK = keystream._CHUNK


def drawn(count: int, stddev: float = 1.0) -> Tensor:
    return Keystream(KEY).normal_(torch.full((count,), torch.nan), stddev)


def as_numbers(words: Tensor) -> Tensor:
    return torch.mul(words.to(torch.int32), 2.0**-31)


@pytest.mark.parametrize("has_mkl", [True, False])
def test_erfinv_is_within_a_few_units_in_the_last_place(
    has_mkl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_mkl:
        monkeypatch.setattr(erfinv, "_VMS_ERF_INV", None)
    elif erfinv._VMS_ERF_INV is None:
        pytest.skip("this torch comes without MKL")
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (100_000,), generator=generator)
    # Near zero, and as near one as draws are not made anew.
    words = torch.cat([words, torch.arange(-5000, 5000), 2**31 - torch.arange(1300, 100_000, 7)])
    x = as_numbers(words)
    found = torch.from_numpy(erfinv.erfinv_(x.numpy().copy())).double()
    torch.testing.assert_close(found, torch.erfinv(x.double()), rtol=5e-7, atol=0)
    ends = erfinv.erfinv_(np.array([-1.0, 0.0, 1.0], np.float32))
    assert ends.tolist() == [-math.inf, 0.0, math.inf]


def test_the_cipher_is_aes_in_counter_mode() -> None:
    """AES-128 of the block zero under the key zero: H of the first test case of GCM."""
    block = bytes.fromhex("66e94bd4ef8a2c3b884cfa59ca342b2e")
    expected = 1.0 - (np.frombuffer(block, dtype="<u8") >> np.uint64(11)) * 2.0**-53
    assert Keystream(bytes(16)).uniform(2).tolist() == expected.tolist()


def test_draws_are_normal() -> None:
    """A Kolmogorov-Smirnov test of 700,001 draws, more than a few chunks and an odd number, which
    rejects the right law once in 10^6."""
    assert stats.kstest(drawn(700_001, 3.0).double() / 3.0, "norm").pvalue > 1e-6


def test_neighbours_and_halves_of_a_chunk_are_independent() -> None:
    """Chi-square of 8 x 8 cells that should hold as many pairs each."""
    cells = torch.distributions.Normal(0.0, 1.0).cdf(drawn(CHUNK)).mul(8).long().clamp_max(7)
    for pairs in (cells.view(2, -1), cells.view(-1, 2).t()):
        counts = torch.bincount(8 * pairs[0] + pairs[1], minlength=64)
        assert stats.chisquare(counts.numpy()).pvalue > 1e-6


@pytest.mark.parametrize("stddev", [1.0, 0.3, 1e-7])
def test_draws_lie_on_the_grid_and_take_what_they_are_added_to_there(stddev: float) -> None:
    """Also beside a number that is none of its multiples, small or large."""
    grid = grid_of(stddev)
    start = torch.tensor([0.0, 0.4 * grid, 100.3 * grid, stddev / 3, -5 * stddev]).repeat(1000)
    added = Keystream(KEY).add_(start.clone(), stddev).double() / grid
    assert torch.equal(added, added.round())
    whole = (start.double() / grid).round()
    assert torch.equal(added - whole, drawn(5000, stddev).double() / grid)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 2, 5, CHUNK + 3])
def test_any_numbers_can_be_overwritten_or_added_to(dtype: torch.dtype, count: int) -> None:
    expected = drawn(count, 0.5).to(dtype)
    filled = Keystream(KEY).normal_(torch.full((count, 1), torch.nan, dtype=dtype), 0.5)
    # Where a draw was made anew, a number of few digits was rounded twice.
    torch.testing.assert_close(filled.view(-1), expected)
    added = Keystream(KEY).add_(torch.ones(1, count, dtype=dtype), 0.5)
    assert added.dtype == dtype
    torch.testing.assert_close(added.view(-1), expected + 1)


def test_draws_of_a_stream_go_on() -> None:
    stream = Keystream(KEY)
    one, two = (stream.normal_(torch.empty(1000), 1.0) for _ in range(2))
    assert abs((one * two).mean()) < 5 / math.sqrt(1000)

"""What is released is on one public grid: its low bits tell nothing, and its price is paid."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from scipy import sparse
from scipy.stats import chi2, kstest

from lightning_dpsparse.estimators.mean import noisy_mean
from lightning_dpsparse.estimators.output import perturbed_minimiser
from lightning_dpsparse.estimators.release import (
    Kind,
    laplace,
    priced_clip_norm,
    priced_sensitivity,
    release_point,
    release_sum,
    spacing_of,
)
from lightning_dpsparse.estimators.rows import Array, as_rows, clip_rows
from lightning_dpsparse.estimators.sketch import (
    draw_sketch,
    sketched_clip_norm,
    sketched_mean,
    sketched_rows,
)

KINDS: list[Kind] = ["gaussian", "laplace"]


class Silent(np.random.Generator):
    """A generator whose noise is zero: what is left is what the noise would hide."""

    def __init__(self) -> None:
        super().__init__(np.random.PCG64(0))

    def standard_normal(self, size: int) -> Array:  # type: ignore[override]
        return np.zeros(size)

    def geometric(self, p: float, size: int) -> Any:  # type: ignore[override]
        return np.ones(size, np.int64)

    def random(self, size: int) -> Array:  # type: ignore[override]
        return np.zeros(size)


def whole(values_D: Array, spacing: float) -> list[int]:
    """Values in spacings. Fails where one is not on the grid: no tolerance."""
    found = [Fraction(float(value)) / Fraction(spacing) for value in values_D]
    assert all(number.denominator == 1 for number in found)
    return [int(number) for number in found]


def is_at_most(moved: list[int], bound: float, spacing: float, kind: Kind) -> bool:
    """Whether a vector of whole numbers is no longer than the bound. Exact."""
    limit = Fraction(bound) / Fraction(spacing)
    if kind == "laplace":
        return sum(map(abs, moved)) <= limit
    return sum(number**2 for number in moved) <= limit**2


# ---- on the grid -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("noise_multiplier", [0.01, 0.7, 4.22, 300.0])
def test_every_release_is_on_the_grid(kind: Kind, noise_multiplier: float) -> None:
    source = np.random.default_rng(0)
    rows_ND = source.normal(size=(9, 40))
    sum_D = noisy_mean(
        rows_ND, divisor=1.0, clip_norm=0.3, noise_multiplier=noise_multiplier, kind=kind
    )
    assert len(set(whole(sum_D, spacing_of(0.3, noise_multiplier)))) == 40
    point_D = perturbed_minimiser(
        rows_ND[0], sensitivity=0.3, radius=math.inf, noise_multiplier=noise_multiplier, kind=kind
    )
    assert len(set(whole(point_D, spacing_of(0.3, noise_multiplier)))) == 40


def test_a_sketch_is_measured_on_the_grid() -> None:
    """Recovery sees nothing but multiples: those of the same noise on the same rows."""
    source = np.random.default_rng(1)
    rows_ND, sketch_MD = source.normal(size=(9, 30)), draw_sketch(12, 30, source)
    bound = sketched_clip_norm(0.3, 12)
    settings: dict[str, Any] = {"noise_multiplier": 2.0, "noise": np.random.default_rng(2)}
    measured_M = release_sum(
        sketched_rows(rows_ND, sketch_MD, 0.3), 12, clip_norm=bound, **settings
    )
    whole(measured_M, spacing_of(bound, 2.0))
    settings["noise"] = np.random.default_rng(2)
    mean_D = sketched_mean(rows_ND, sketch_MD, divisor=1.0, clip_norm=0.3, **settings)
    np.testing.assert_allclose(sketch_MD @ mean_D, measured_M, atol=1e-6)


@pytest.mark.parametrize("noise_multiplier", [2.0**-8, 0.3, 1.0, 77.0])
def test_the_noise_has_thirty_digits(noise_multiplier: float) -> None:
    spacing = spacing_of(0.37, noise_multiplier)
    assert math.frexp(spacing)[0] == 0.5  # a power of two
    assert 2.0**29 <= noise_multiplier * 0.37 / spacing < 2.0**30
    assert spacing_of(0.37, noise_multiplier / 1e6) >= spacing_of(0.37, 2.0**-8)


def test_without_noise_nothing_is_rounded() -> None:
    third_D = np.array([1.0, -1.0]) / 3.0
    np.testing.assert_array_equal(
        release_point(third_D, sensitivity=1.0, noise_multiplier=0.0), third_D
    )
    found_D = release_sum([as_rows(third_D[None])], 2, clip_norm=1.0, noise_multiplier=0.0)
    np.testing.assert_array_equal(found_D, third_D)
    assert (
        release_sum([], 3, clip_norm=1.0, noise_multiplier=1.0, noise=Silent()).tolist()
        == [0.0] * 3
    )


def test_numbers_too_large_for_an_integer_are_cut_off() -> None:
    point_D = np.array([1e300, -1e300, 1.0])
    found_D = release_point(point_D, sensitivity=1.0, noise_multiplier=1.0, noise=Silent())
    assert found_D.tolist() == [2.0**33, -(2.0**33), 1.0]


# ---- the law of the noise --------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sigma", [0.01, 1.5])
def test_mean_and_variance_are_those_that_the_event_assumes(kind: Kind, sigma: float) -> None:
    d, clip_norm = 200_000, 0.7
    rows_ND = sparse.csr_array((np.full(d, 1e-7), (np.zeros(d, int), np.arange(d))))
    found_D = noisy_mean(
        rows_ND,
        divisor=1.0,
        clip_norm=clip_norm,
        noise_multiplier=sigma,
        kind=kind,
        noise=np.random.default_rng(3),
    )
    noise_D = (found_D - 1e-7) / (sigma * clip_norm)
    variance, fourth = (1.0, 3.0) if kind == "gaussian" else (2.0, 24.0)
    # Five standard deviations of a mean of d draws, and of a mean of their squares.
    assert abs(noise_D.mean()) < 5 * (variance / d) ** 0.5
    assert abs((noise_D**2).mean() - variance) < 5 * ((fourth - variance**2) / d) ** 0.5
    # The chance of a larger distance is 2 exp(-2 d x^2): 1e-6.
    assert kstest(noise_D, "norm" if kind == "gaussian" else "laplace").statistic < 2.7 / d**0.5


class Lucky(np.random.Generator):
    """A generator whose coins show heads so many times in the first calls, and tails after."""

    def __init__(self, heads: int, calls: int = 1) -> None:
        super().__init__(np.random.PCG64(4))
        self.heads, self.calls = heads, calls

    def geometric(self, p: float, size: int) -> Any:  # type: ignore[override]
        self.calls -= 1
        return np.full(size, self.heads + 1 if self.calls >= 0 else 1)


def test_laplace_draws_far_out_leave_no_whole_number_out() -> None:
    """At 20 scales, steps between neighbouring draws are smaller than between whole numbers.

    The logarithm of a uniform number of 53 bits has steps of 2^-24 there, 32 spacings or more.
    """
    count, start = 20_000, 29 * math.log(2.0)
    drawn = np.abs(laplace(Lucky(29), count))
    assert start <= drawn.min()
    assert drawn.max() < start + math.log(2.0)
    digits = np.bincount(np.rint(drawn * 2.0**29).astype(np.int64) % 32, minlength=32)
    statistic = float(np.sum((digits - count / 32) ** 2) / (count / 32))
    assert statistic < chi2.ppf(1 - 1e-6, 31)


def test_laplace_draws_have_no_end() -> None:
    """After 32 heads coins are tossed anew, and numpy's own limit of 53 is never met."""
    assert 32 <= np.abs(laplace(Lucky(52), 1))[0] / math.log(2.0) < 33
    assert 96 <= np.abs(laplace(Lucky(52, calls=3), 1))[0] / math.log(2.0) < 97


# ---- what one example moves ------------------------------------------------------------------


def neighbours(seeds: int) -> Iterator[tuple[Array, Array]]:
    """Rows at the clip and beyond, sums that cancel or grow, and the same with one row less."""
    for seed in range(seeds):
        source = np.random.default_rng(seed)
        n, d = int(source.integers(1, 40)), int(source.integers(1, 30))
        rows_ND = source.normal(size=(n, d)) * 10.0 ** source.integers(-3, 9, (n, 1))
        if seed % 3 == 1:
            rows_ND = np.abs(rows_ND)
        if seed % 3 == 2:
            rows_ND[::2] = -rows_ND[: rows_ND[::2].shape[0]]
        rows_ND[int(source.integers(n))] *= 1e9
        yield rows_ND, np.delete(rows_ND, int(np.abs(rows_ND).max(1).argmax()), 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sigma", [0.05, 3.0, 1000.0])
def test_removing_one_example_moves_the_rounded_sum_by_at_most_the_priced_clip(
    kind: Kind, sigma: float
) -> None:
    """No tolerance. The example removed is one that was clipped, so the bound is nearly met."""
    clip_norm = 0.7
    spacing = spacing_of(clip_norm, sigma)
    settings: dict[str, Any] = {"clip_norm": clip_norm, "noise_multiplier": sigma, "kind": kind}
    for rows_ND, fewer_ND in neighbours(60):
        d = rows_ND.shape[1]
        sums = [
            whole(noisy_mean(part, divisor=1.0, noise=Silent(), **settings), spacing)
            for part in (rows_ND, fewer_ND)
        ]
        moved = [one - other for one, other in zip(*sums)]
        assert is_at_most(moved, priced_clip_norm(clip_norm, d), spacing, kind)
        assert not is_at_most(moved, clip_norm * (1 - 1e-3) - d * spacing, spacing, kind)


def test_removing_one_example_moves_the_rounded_sketch_by_at_most_the_priced_clip() -> None:
    for seed, (rows_ND, fewer_ND) in enumerate(neighbours(40)):
        d = rows_ND.shape[1] + 1
        sketch_MD = draw_sketch(max(1, d // 2), d, np.random.default_rng(seed)) * 3.0
        size = sketch_MD.shape[0]
        bound = sketched_clip_norm(0.7, size)
        sums = [
            whole(
                release_sum(
                    sketched_rows(np.pad(part, ((0, 0), (0, 1))), sketch_MD, 0.7),
                    size,
                    clip_norm=bound,
                    noise_multiplier=2.0,
                    noise=Silent(),
                ),
                spacing_of(bound, 2.0),
            )
            for part in (rows_ND, fewer_ND)
        ]
        moved = [one - other for one, other in zip(*sums)]
        priced = priced_clip_norm(bound, size)
        assert is_at_most(moved, priced, spacing_of(bound, 2.0), "gaussian")


@pytest.mark.parametrize("kind", KINDS)
def test_a_rounded_point_moves_by_at_most_the_priced_sensitivity(kind: Kind) -> None:
    """No tolerance. Without the price, about half of the neighbours would be too far apart."""
    sensitivity, sigma, beyond = 0.7, 3.0, 0
    spacing = spacing_of(sensitivity, sigma)
    for seed in range(200):
        source = np.random.default_rng(seed)
        d = int(source.integers(1, 50))
        point_D, step_D = source.normal(size=(2, d))
        step_D *= sensitivity * (1 - 1e-14) / np.linalg.norm(step_D, 2 if kind == "gaussian" else 1)
        points = [
            whole(
                release_point(
                    p_D,
                    sensitivity=sensitivity,
                    noise_multiplier=sigma,
                    kind=kind,
                    noise=Silent(),
                ),
                spacing,
            )
            for p_D in (point_D, point_D + step_D)
        ]
        moved = [one - other for one, other in zip(*points)]
        beyond += not is_at_most(moved, sensitivity, spacing, kind)
        assert is_at_most(moved, priced_sensitivity(sensitivity, sigma, d, kind), spacing, kind)
    assert beyond > 50


def test_the_noise_is_for_the_priced_sensitivity() -> None:
    """Much noise, on a coarse grid: in l1 ten thousand spacings add more than half."""
    d, sigma = 10_000, 4e4
    for kind in KINDS:
        priced = priced_sensitivity(1.0, sigma, d, kind)
        numbers = d**0.5 if kind == "gaussian" else d
        assert priced == 1.0 + numbers * spacing_of(1.0, sigma)
        point_D = release_point(
            np.zeros(d),
            sensitivity=1.0,
            noise_multiplier=sigma,
            kind=kind,
            noise=np.random.default_rng(5),
        )
        source = np.random.default_rng(5)
        drawn_D = source.standard_normal(d) if kind == "gaussian" else laplace(source, d)
        np.testing.assert_allclose(
            point_D, drawn_D * sigma * priced, atol=0.51 * spacing_of(1.0, sigma)
        )
    assert priced_sensitivity(1.0, sigma, d, "laplace") > 1.5


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_clipped_in_float64_is_no_longer_than_the_priced_clip(kind: Kind) -> None:
    """Some are longer than the clip, by a few bits: against fractions."""
    source, beyond = np.random.default_rng(11), 0
    for row_D in clip_rows(source.normal(size=(300, 20)), 0.3, 2 if kind == "gaussian" else 1):
        row = [abs(Fraction(float(value))) for value in row_D.data]
        power = 2 if kind == "gaussian" else 1
        length = sum(value**power for value in row)
        beyond += length > Fraction(0.3) ** power
        assert length <= Fraction(priced_clip_norm(0.3, 20)) ** power
    assert beyond > 10


@pytest.mark.parametrize("kind", KINDS)
def test_the_noise_of_a_sum_is_for_the_priced_clip(kind: Kind) -> None:
    """Whole numbers tell a scale from another that is larger by 5e-11."""
    d, sigma, spacing = 200_000, 3.0, spacing_of(1.0, 3.0)
    found_D = release_sum(
        [], d, clip_norm=1.0, noise_multiplier=sigma, kind=kind, noise=np.random.default_rng(12)
    )
    source = np.random.default_rng(12)
    drawn_D = source.standard_normal(d) if kind == "gaussian" else laplace(source, d)
    scales = [sigma * priced_clip_norm(1.0, d), sigma]
    expected = [np.rint(drawn_D * (scale / spacing)) * spacing for scale in scales]
    np.testing.assert_array_equal(found_D, expected[0])
    assert (found_D != expected[1]).sum() > 1_000


def test_the_order_of_the_examples_does_not_show() -> None:
    """Sums in float64 depend on it in their last bits: another row less, another order."""
    source = np.random.default_rng(6)
    rows_ND = source.normal(size=(500, 20))

    def released(order_N: Any) -> Array:
        return noisy_mean(
            rows_ND[order_N],
            divisor=1.0,
            clip_norm=1.0,
            noise_multiplier=1.0,
            noise=np.random.default_rng(7),
        )

    first_D = released(np.arange(500))
    for _ in range(5):
        np.testing.assert_array_equal(released(source.permutation(500)), first_D)


# ---- low bits --------------------------------------------------------------------------------


def off_grid(values_D: Array, spacing: float) -> float:
    """The share of values that are no multiples of the spacing."""
    multiples_D = values_D / spacing
    return float(np.mean(multiples_D != np.rint(multiples_D)))


def test_low_bits_tell_a_plain_sum_from_another_and_not_a_released_one() -> None:
    """An attacker asks whether a number is a multiple of 2^-45. (Mironov 2012)

    The sum is either 0 or 1000 and the noise has standard deviation one. Float64 has no other
    numbers than multiples of 2^-44 beyond 512, and plenty near zero.
    """
    d, question = 4_000, 2.0**-45
    sums = [np.zeros(d), np.full(d, 1000.0)]
    naive = [sum_D + np.random.default_rng(8).normal(size=d) for sum_D in sums]
    assert off_grid(naive[0], question) > 0.9
    assert off_grid(naive[1], question) == 0.0  # told for certain, by one number
    spacing = spacing_of(1.0, 1.0)
    assert off_grid(naive[1], spacing) > 0.9

    released = [
        release_point(
            sum_D, sensitivity=1.0, noise_multiplier=1.0, noise=np.random.default_rng(9 + i)
        )
        for i, sum_D in enumerate(sums)
    ]
    for values_D in released:
        assert off_grid(values_D, question) == 0.0
        assert off_grid(values_D, spacing) == 0.0
        # And the last bits of the whole numbers are those of coins: 63 degrees of freedom.
        counts = np.bincount(np.rint(values_D / spacing).astype(np.int64) % 64, minlength=64)
        statistic = float(np.sum((counts - d / 64) ** 2) / (d / 64))
        assert chi2.ppf(1e-6, 63) < statistic < chi2.ppf(1 - 1e-6, 63)


def test_differences_of_two_releases_are_on_the_grid_and_those_of_plain_sums_are_not() -> None:
    source, spacing = np.random.default_rng(10), spacing_of(1.0, 2.0)
    rows_ND = source.normal(size=(30, 300))
    settings: dict[str, Any] = {"divisor": 1.0, "clip_norm": 1.0, "noise_multiplier": 2.0}
    new_D = noisy_mean(rows_ND, **settings) - noisy_mean(rows_ND[1:], **settings)
    assert off_grid(new_D, spacing) == 0.0
    old_D = (
        rows_ND.sum(0) + source.normal(0, 2, 300) - rows_ND[1:].sum(0) - source.normal(0, 2, 300)
    )
    assert off_grid(old_D, spacing) > 0.9

"""Sketches: what is recovered, and that the clip bounds them whatever the matrix."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from lightning_dpsparse.accounting.events import gaussian
from lightning_dpsparse.estimators.rows import Array
from lightning_dpsparse.estimators.sketch import (
    draw_sketch,
    event_of_sketch,
    recover,
    sketch_size,
    sketched_clip_norm,
    sketched_mean,
    sketched_rows,
)
from tests.support.estimator_examples import matrices, sparse_rows


def sketched_sum(vectors_ND: Array, sketch_MD: Array, clip_norm: float) -> Array:
    parts = sketched_rows(vectors_ND, sketch_MD, clip_norm)
    return sum((part.toarray().sum(0) for part in parts), np.zeros(sketch_MD.shape[0]))


@given(vectors_ND=matrices(), stretch=st.sampled_from([1e-3, 1.0, 1e3]))
@settings(deadline=None)
def test_removing_one_example_moves_the_sketched_sum_by_at_most_its_clip(
    vectors_ND: Array, stretch: float
) -> None:
    sketch_MD = stretch * draw_sketch(3, 4, np.random.default_rng(0))  # a matrix that keeps nothing
    sum_M = sketched_sum(vectors_ND, sketch_MD, 0.7)
    for i in range(vectors_ND.shape[0]):
        without_M = sketched_sum(np.delete(vectors_ND, i, 0), sketch_MD, 0.7)
        assert np.linalg.norm(sum_M - without_M) <= sketched_clip_norm(0.7, 3) * (1 + 1e-9)


def test_an_exactly_sparse_mean_is_recovered_from_a_noiseless_sketch() -> None:
    vectors_ND = sparse_rows(40, 120, 3, seed=0, active=5)
    sketch_MD = draw_sketch(60, 120, np.random.default_rng(1))
    mean_D = sketched_mean(vectors_ND, sketch_MD, divisor=40, clip_norm=1.5, noise_multiplier=0.0)
    np.testing.assert_allclose(mean_D, vectors_ND.toarray().mean(0), atol=1e-6)


def test_what_is_recovered_explains_the_measurements_at_every_scale() -> None:
    source = np.random.default_rng(2)
    sketch_MD = draw_sketch(10, 30, source)
    for scale in (1e-9, 1.0, 1e9):
        measured_M = scale * source.normal(size=10)
        recovered_D = recover(sketch_MD, measured_M)
        np.testing.assert_allclose(
            sketch_MD @ recovered_D, measured_M, rtol=1e-5, atol=1e-6 * scale
        )
        least_D = np.linalg.pinv(sketch_MD) @ measured_M
        assert np.abs(recovered_D).sum() < np.abs(least_D).sum()
    assert not recover(sketch_MD, np.zeros(10)).any()


def test_noise_has_the_scale_that_the_event_assumes() -> None:
    sketch_MD, total = draw_sketch(40, 60, np.random.default_rng(3)), 0.0
    for seed in range(10):  # A z = b brings the noise back exactly: 400 squares
        mean_D = sketched_mean(
            np.zeros((1, 60)),
            sketch_MD,
            divisor=4.0,
            clip_norm=1.0,
            noise_multiplier=2.0,
            noise=np.random.default_rng(seed),
        )
        scale = 2.0 * sketched_clip_norm(1.0, 40) / 4.0
        total += float(np.sum((sketch_MD @ mean_D / scale) ** 2))
    assert chi2.ppf(1e-4, 400) < total < chi2.ppf(1 - 1e-4, 400)
    assert event_of_sketch(2.0) == gaussian(2.0)


def test_few_unclipped_examples_are_cut_by_the_clip_after_the_sketch() -> None:
    vectors_ND = sparse_rows(2000, 300, 4, seed=4)
    norms_N = np.linalg.norm(vectors_ND @ draw_sketch(100, 300, np.random.default_rng(5)).T, axis=1)
    assert np.mean(norms_N > sketched_clip_norm(1.0, 100)) < 0.02


def test_its_size_balances_noise_against_recovery() -> None:
    """An eighth of the measurements recovers worse, four times as many are noisier.

    By the worse of two kinds of means, with 2 columns and with 32. Other seeds have 1.00 to 1.08,
    0.52 to 0.65 and 2.0 to 2.2.
    """
    n, d, s, sigma = 64, 256, 2, 4.22
    best = size(d, s, n, sigma)
    errors = []
    for measurements, runs in ((best // 8, 8), (best, 8), (4 * best, 2)):  # the last is slow
        source, squares = np.random.default_rng(6), {2: 0.0, 32: 0.0}
        for active in (2, 32) * runs:
            vectors_ND = sparse_rows(n, d, s, seed=active, active=active)
            found_D = sketched_mean(
                vectors_ND,
                draw_sketch(measurements, d, source),
                divisor=n,
                clip_norm=1.0,
                noise_multiplier=sigma,
                noise=source,
            )
            squares[active] += float(np.sum((found_D - vectors_ND.toarray().mean(0)) ** 2))
        errors.append((max(squares.values()) / runs) ** 0.5)
    assert errors[1] < 0.75 * min(errors[0], errors[2]), errors


def size(num_columns: int, max_nonzeros: int, divisor: float, noise_multiplier: float) -> int:
    return sketch_size(
        num_columns=num_columns,
        max_nonzeros=max_nonzeros,
        divisor=divisor,
        noise_multiplier=noise_multiplier,
    )


def test_sizes() -> None:
    # The poster's, 1 x 100 x sqrt(4 ln(250) / ln(1e6)) = 126.4, at the noise of epsilon 1
    assert size(1000, 4, 100, math.log(1e6) ** 0.5) == 127
    assert size(1000, 4, 100, 2 * math.log(1e6) ** 0.5) == 64  # noise that is split over steps
    assert size(1000, 4, 25, math.log(1e6) ** 0.5) == 32  # a sample of a quarter
    assert size(1000, 4, 10**6, 3.7) == 1000
    assert size(1000, 4, 1, 0.0) == 1000
    assert size(1000, 4, 1, 1e6) == 1
    with pytest.raises(ValueError, match="Expected fewer measurements than columns"):
        draw_sketch(10, 10)
    with pytest.raises(ValueError, match="Use projected_mean"):
        draw_sketch(1000, 10**6)

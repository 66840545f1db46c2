"""Rows are bounded one by one, and never lose to one another."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from scipy import sparse

from lightning_dpsparse.estimators.rows import (
    Array,
    as_rows,
    clip_rows,
    limit_nonzeros,
    row_norms,
    sum_of,
)
from tests.support.estimator_examples import matrices


@pytest.mark.parametrize("order", [1, 2])
@given(vectors_ND=matrices())
def test_no_row_is_longer_than_the_clip(order: Literal[1, 2], vectors_ND: Array) -> None:
    clipped_ND = clip_rows(vectors_ND, 0.5, order).toarray()
    assert np.isfinite(clipped_ND).all()
    assert (np.linalg.norm(clipped_ND, order, axis=1) <= 0.5 * (1 + 1e-12)).all()


def test_a_huge_row_does_not_hide_another_from_the_clip() -> None:
    clipped_ND = clip_rows(np.array([[1e300, 0.0], [3.0, 4.0]]), 1.0).toarray()
    np.testing.assert_allclose(clipped_ND, [[1.0, 0.0], [0.6, 0.8]])


def test_short_rows_stay_and_broken_ones_go() -> None:
    vectors_ND = np.array([[0.3, 0.0], [np.nan, 0.1], [0.0, 0.0], [np.inf, -np.inf]])
    expected_ND = [[0.3, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    np.testing.assert_array_equal(clip_rows(vectors_ND, 1.0).toarray(), expected_ND)


def test_repeated_columns_add_before_they_are_squared() -> None:
    rows_ND = as_rows(sparse.coo_array(([1.0, 1.0, 1.0], ([0, 0, 0], [1, 1, 1])), (1, 2)))
    assert row_norms(rows_ND, 2).tolist() == [3.0]
    assert sum_of(rows_ND).tolist() == [0.0, 3.0]
    # CSR arrays may repeat columns too, and keep them apart until asked.
    thrice_ND = sparse.csr_array(([1.0, 1.0, 1.0], [1, 1, 1], [0, 3]), (1, 2))
    assert row_norms(as_rows(thrice_ND), 2).tolist() == [3.0]
    assert limit_nonzeros(thrice_ND, 1).toarray().tolist() == [[0.0, 3.0]]


def test_which_nonzeros_stay_depends_on_the_columns_alone() -> None:
    full_ND = np.arange(1.0, 31.0).reshape(3, 10)
    kept_ND = limit_nonzeros(full_ND, 4).toarray()
    columns = [set(np.flatnonzero(row)) for row in kept_ND]
    assert len(columns[0]) == 4
    assert columns[0] == columns[1] == columns[2]
    np.testing.assert_array_equal(kept_ND[kept_ND != 0], full_ND[kept_ND != 0])
    np.testing.assert_array_equal(limit_nonzeros(full_ND, 10).toarray(), full_ND)

"""Small sparse data for the estimators' tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import sparse

from lightning_dpsparse.estimators.rows import Array

# Adversarial ones too: huge, tiny, repeated, all zero, not finite.
VALUES = st.one_of(
    st.floats(-10, 10), st.sampled_from([0.0, 1e300, -1e300, 1e-300, np.inf, -np.inf, np.nan])
)


def matrices(rows: tuple[int, int] = (1, 6), columns: int = 4) -> st.SearchStrategy[Array]:
    shapes = st.tuples(st.integers(*rows), st.just(columns))
    return shapes.flatmap(lambda shape: arrays.arrays(np.float64, shape, elements=VALUES))


def sparse_rows(n: int, d: int, s: int, seed: int, active: int | None = None) -> Any:
    """Rows of norm one with s non-zeros, all in the first `active` columns, all positive."""
    source = np.random.default_rng(seed)
    columns = np.argsort(source.random((n, active or d)), axis=1)[:, :s]
    row = np.repeat(np.arange(n), s)
    return sparse.csr_array((np.full(n * s, s**-0.5), (row, columns.ravel())), (n, d))


def clicks(n: int, d: int, s: int, seed: int) -> tuple[Any, Array]:
    """Rows, and labels by a logistic model of them."""
    rows_ND, source = sparse_rows(n, d, s, seed), np.random.default_rng(seed + 1)
    scores_N = rows_ND @ source.normal(0.0, 4.0, d)
    return rows_ND, (source.random(n) < 1.0 / (1.0 + np.exp(-scores_N))).astype(np.float64)


def auc(labels_N: Array, scores_N: Array) -> float:
    """The chance that a positive scores above a negative."""
    ranks_N = np.argsort(np.argsort(scores_N))
    ones = labels_N.sum()
    above = ranks_N[labels_N == 1].sum() - ones * (ones - 1) / 2
    return float(above / ones / (labels_N.size - ones))

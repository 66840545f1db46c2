"""Examples as sparse rows, which are bounded in norm and in number of non-zeros.

No function that changes rows looks at two of them at once, so adding or removing an example never
moves another one: the sensitivity of a sum of rows is the bound on one row.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from lightning_dpsparse.hashing import mix
from lightning_dpsparse.refused import Refused

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Rows = Any
"""A two-dimensional array, or a scipy.sparse one."""

# N examples, D columns


def numbers(values: Any, name: str) -> Rows:
    """Values as a float64 array; scipy.sparse arrays stay sparse.

    Guarantees: an error tells the type of the values, and never a value or its length.
    """
    try:
        found = values if sparse.issparse(values) else np.asarray(values)
    except ValueError as error:  # rows of several lengths
        raise Refused(
            f"Expected numbers in {name}, in rows of one length, found several lengths. Turn it "
            "into an array of floats."
        ) from error
    if found.dtype.kind not in "biuf":
        raise Refused(
            f"Expected numbers in {name}, found {found.dtype.type.__name__}. Turn it into an array "
            "of floats."
        )
    return found.astype(np.float64)


def as_rows(vectors_ND: Rows) -> Rows:
    """A CSR copy in float64, without duplicates. A row that is not finite becomes empty."""
    rows_ND = sparse.csr_array(vectors_ND, dtype=np.float64, copy=True)
    rows_ND.sum_duplicates()
    return keep_rows(rows_ND, finite_rows(rows_ND))


def finite_rows(rows_ND: Rows) -> Mask:
    """Which CSR rows have finite entries only."""
    is_bad = ~np.isfinite(rows_ND.data)
    if not is_bad.any():  # this is nearly always so, and quick to see
        return np.ones(rows_ND.shape[0], np.bool_)
    finite_N: Mask = row_sums(rows_ND, is_bad) == 0
    return finite_N


def keep_rows(rows_ND: Rows, kept_N: Mask) -> Rows:
    """CSR rows, emptied in place where they are not kept."""
    if not kept_N.all():
        rows_ND.data[~kept_N[row_of(rows_ND)]] = 0.0
    rows_ND.eliminate_zeros()
    return rows_ND


def row_sums(rows_ND: Rows, values: NDArray[Any]) -> Array:
    """The sum over every row of one value for each of its entries."""
    sums_N = np.bincount(row_of(rows_ND), weights=values, minlength=rows_ND.shape[0])
    return sums_N.astype(np.float64)


def row_of(rows_ND: Rows) -> NDArray[np.int64]:
    """The number of the row that each entry is in."""
    return np.repeat(np.arange(rows_ND.shape[0]), np.diff(rows_ND.indptr))


def row_norms(rows_ND: Rows, order: Literal[1, 2]) -> Array:
    """The l1 or l2 norm of every row."""
    if order == 1:
        return row_sums(rows_ND, np.abs(rows_ND.data))
    # Squares can overflow, so each row is scaled by its own largest entry. The largest entry of all
    # rows would make small rows vanish.
    row, largest_N = row_of(rows_ND), np.full(rows_ND.shape[0], 1e-300)
    np.maximum.at(largest_N, row, np.abs(rows_ND.data))
    shares_N = np.sqrt(row_sums(rows_ND, (rows_ND.data / largest_N[row]) ** 2))
    with np.errstate(over="ignore"):
        norms_N: Array = largest_N * shares_N
    return norms_N


def scale_rows(rows_ND: Rows, factors_N: Array) -> Rows:
    """Every row times its factor. An infinite product makes the row empty."""
    with np.errstate(over="ignore"):
        scaled = rows_ND.data * factors_N[row_of(rows_ND)]
    return as_rows(sparse.csr_array((scaled, rows_ND.indices, rows_ND.indptr), rows_ND.shape))


def clip_rows(vectors_ND: Rows, clip_norm: float, order: Literal[1, 2] = 2) -> Rows:
    """Every row times min(1, clip_norm / its norm).

    Guarantees: every row's norm is at most `clip_norm`, up to rounding; a row that is not finite
    is zero.
    """
    rows_ND = as_rows(vectors_ND)
    norms_N = row_norms(rows_ND, order)
    return scale_rows(rows_ND, clip_norm / np.maximum(norms_N, clip_norm))


def limit_nonzeros(vectors_ND: Rows, max_nonzeros: int) -> Rows:
    """Keep at most `max_nonzeros` entries of a row: those whose columns are first in a fixed order.

    The order is a public hash of the column's number: the same for every row and every data set.
    """
    rows_ND = as_rows(vectors_ND)
    counts_N = np.diff(rows_ND.indptr)
    if counts_N.max(initial=0) <= max_nonzeros:
        return rows_ND
    row = row_of(rows_ND)
    order = np.lexsort((mix(rows_ND.indices.astype(np.uint64)), row))
    place = np.empty_like(order)
    place[order] = np.arange(row.size) - np.repeat(rows_ND.indptr[:-1], counts_N)
    rows_ND.data[place >= max_nonzeros] = 0.0
    rows_ND.eliminate_zeros()
    return rows_ND


def sum_of(rows_ND: Rows) -> Array:
    """The sum of all rows, dense."""
    sum_D = np.bincount(rows_ND.indices, weights=rows_ND.data, minlength=rows_ND.shape[1])
    return sum_D.astype(np.float64)


def sample(num_rows: int, rate: float, noise: np.random.Generator) -> Mask:
    """A Poisson sample: it has each row with probability `rate`, independently."""
    if rate == 1:
        return np.ones(num_rows, np.bool_)
    drawn_N: Mask = noise.random(num_rows) < rate
    return drawn_N

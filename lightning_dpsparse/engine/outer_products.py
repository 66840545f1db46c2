"""Norms and weighted sums of gradients that are sums of outer products, from their factors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_dpsparse.engine.norms import norms_of, not_below_rounding

# B examples, T positions of an example, R = B * T, I and O inputs and outputs of a layer

_MOST_NUMBERS = 1 << 20
"""That are held in float64 at a time."""


class Positions(NamedTuple):
    """The factors of every example's gradient on a weight, sum_t g_bt a_bt^T."""

    inputs: Tensor
    """a, (B, T, I)."""
    gradient: Tensor
    """g, (B, T, O)."""


SquareNorm = Callable[[Tensor, Tensor], Tensor]
"""From a and g, the squared norm (B,) of something linear in sum_t g_t a_t^T."""


def outer_square_norm(a: Tensor, g: Tensor) -> Tensor:
    """|| sum_t g_t a_t^T ||^2 for every example. Differences of large numbers: not in float32."""
    positions = a.shape[1]
    if positions == 1:
        return position_norms(a, g).squeeze(1).square_()
    if positions * positions <= a.shape[2] * g.shape[2]:  # the T x T Gram matrices are smaller
        return ((a @ a.mT) * (g @ g.mT)).sum((1, 2))
    return torch.einsum("bto,bti->boi", g, a).square().sum((1, 2))


def weight_square_norm(
    positions: Positions,
    first_of_unit_B: Tensor | None,
    square_norm: SquareNorm = outer_square_norm,
) -> Tensor:
    """`square_norm` of every example, or of every unit at its leader, (B,).

    Guarantees: what is found depends on the example or unit alone, up to rounding, and not on how
    many positions others have. It is not below what rounding may hide in all of G, also where
    `square_norm` leaves little of it: see `not_below_rounding`.
    """
    a, g = positions
    if first_of_unit_B is None:
        return _square_norm(a, g, square_norm)
    # The examples of a unit are positions of a longer example.
    squares_B = g.new_zeros(len(g))
    first_U, size_U = torch.unique_consecutive(first_of_unit_B, return_counts=True)
    for size in size_U.unique().tolist():
        leaders = first_U[size_U == size]
        members = leaders[:, None] + torch.arange(size, device=leaders.device)
        of_units = a[members].flatten(1, 2), g[members].flatten(1, 2)
        squares_B[leaders] = _square_norm(*of_units, square_norm)
    return squares_B


def position_norms(a: Tensor, g: Tensor) -> Tensor:
    """|| g_t a_t^T ||, (B, T)."""
    if a.shape[1] == 1:
        return norms_of(a) * norms_of(g)
    # In float64, which hides nothing; and positions of zeros, as padding has, are to stay zero.
    norm_a, norm_g = (torch.linalg.vector_norm(factor, dim=2) for factor in (a, g))
    return norm_a * norm_g


def by_position(positions: Positions, factors_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """a (R, I), g (R, O), and the factor of every position's example, (R,)."""
    a, g = positions
    return a.flatten(0, 1), g.flatten(0, 1), factors_B.repeat_interleave(a.shape[1])


def outer_sum(a_RI: Tensor, g_RO: Tensor, f_R: Tensor, out: Tensor) -> None:
    """sum_r f_r g_r a_r^T, into `out`, (O, I)."""
    f_R, a_RI, g_RO = (
        value if value.dtype == out.dtype else value.to(out.dtype) for value in (f_R, a_RI, g_RO)
    )
    # Either factor may carry f: the narrower is the smaller copy, gone before the next layer's.
    if out.shape[0] <= out.shape[1]:
        torch.mm((g_RO * f_R.unsqueeze(1)).t(), a_RI, out=out)
    else:  # the wide result is the quicker product (twice as quick for a layer of few inputs)
        out.copy_(torch.mm((a_RI * f_R.unsqueeze(1)).t(), g_RO).t())


def _square_norm(a: Tensor, g: Tensor, square_norm: SquareNorm) -> Tensor:
    if a.shape[1] == 1:
        return _not_below_rounding(a, g, square_norm)
    # Positions may cancel: in float64, a few examples at a time.
    at_once = max(1, _MOST_NUMBERS // (a.shape[1] * (a.shape[2] + g.shape[2])))
    squares = [
        _not_below_rounding(a_few.double(), g_few.double(), square_norm)
        for a_few, g_few in zip(a.split(at_once), g.split(at_once))
    ]
    return torch.cat(squares).to(g.dtype)


def _not_below_rounding(a: Tensor, g: Tensor, square_norm: SquareNorm) -> Tensor:
    return not_below_rounding(square_norm(a, g), position_norms(a, g).square_())

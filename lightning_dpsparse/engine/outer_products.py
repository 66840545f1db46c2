"""Norms and weighted sums of gradients that are sums of outer products, from their factors.

On the weight of a linear layer, example b has the gradient sum_t g_bt a_bt^T: at each position t,
the outer product of the output's gradient g and the input a. All examples' gradients would take
B * O * I numbers. The functions below need the factors only, and build the gradients of a few
examples at a time at most.

Read next: `parameter_calls.py`, where a and g come from; `ghost.py`, which clips with these norms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_dpsparse.engine.norms import norms_of, not_below_rounding

# B examples, T positions of an example, R = B * T, I and O inputs and outputs of a layer

_MOST_NUMBERS = 1 << 20
"""Most numbers of a and g that are held in float64 at a time."""


class Positions(NamedTuple):
    """The factors of every example's gradient on a weight, sum_t g_bt a_bt^T."""

    inputs: Tensor
    """The inputs a, (B, T, I)."""
    gradient: Tensor
    """The gradients g of the outputs, (B, T, O)."""


SquareNorm = Callable[[Tensor, Tensor], Tensor]
"""A function that takes a and g to the squared norm (B,) of a linear map of sum_t g_t a_t^T."""


def outer_square_norm(a: Tensor, g: Tensor) -> Tensor:
    """Compute || sum_t g_t a_t^T ||^2 for every example.

    Large numbers may cancel, so with several positions a and g must not be in float32.
    """
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
    """Compute `square_norm` of every example, or of every unit at its first example, (B,).

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
        firsts = first_U[size_U == size]
        members = firsts[:, None] + torch.arange(size, device=firsts.device)
        of_units = a[members].flatten(1, 2), g[members].flatten(1, 2)
        squares_B[firsts] = _square_norm(*of_units, square_norm)
    return squares_B


def position_norms(a: Tensor, g: Tensor) -> Tensor:
    """Compute || g_t a_t^T || for every position, (B, T)."""
    if a.shape[1] == 1:
        return norms_of(a) * norms_of(g)
    # These norms are not raised as in `norms_of`: float64 hides nothing, and positions of zeros, as
    # padding has, must stay zero.
    norm_a, norm_g = (torch.linalg.vector_norm(factor, dim=2) for factor in (a, g))
    return norm_a * norm_g


def by_position(positions: Positions, factors_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a (R, I), g (R, O), and the factor of every position's example, (R,)."""
    a, g = positions
    return a.flatten(0, 1), g.flatten(0, 1), factors_B.repeat_interleave(a.shape[1])


def outer_sum(a_RI: Tensor, g_RO: Tensor, f_R: Tensor, out: Tensor) -> None:
    """Write sum_r f_r g_r a_r^T into `out`, (O, I)."""
    f_R, a_RI, g_RO = (
        value if value.dtype == out.dtype else value.to(out.dtype) for value in (f_R, a_RI, g_RO)
    )
    # Either a or g may be multiplied by f. The narrower one makes the smaller copy.
    if out.shape[0] <= out.shape[1]:
        torch.mm((g_RO * f_R.unsqueeze(1)).t(), a_RI, out=out)
    else:  # a product with a wide result is faster (twice as fast for a layer of few inputs)
        out.copy_(torch.mm((a_RI * f_R.unsqueeze(1)).t(), g_RO).t())


def _square_norm(a: Tensor, g: Tensor, square_norm: SquareNorm) -> Tensor:
    if a.shape[1] == 1:
        return _not_below_rounding(a, g, square_norm)
    # Positions may cancel, so the work is done in float64, on a few examples at a time.
    at_once = max(1, _MOST_NUMBERS // (a.shape[1] * (a.shape[2] + g.shape[2])))
    squares = [
        _not_below_rounding(a_few.double(), g_few.double(), square_norm)
        for a_few, g_few in zip(a.split(at_once), g.split(at_once))
    ]
    return torch.cat(squares).to(g.dtype)


def _not_below_rounding(a: Tensor, g: Tensor, square_norm: SquareNorm) -> Tensor:
    return not_below_rounding(square_norm(a, g), position_norms(a, g).square_())

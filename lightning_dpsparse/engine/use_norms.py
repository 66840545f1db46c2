"""Norms and weighted sums of per-example gradients on one parameter, by the cheapest way.

A parameter may have several uses, whose gradients add up. One linear layer with one position needs
two vector norms for each example; several positions need the products of their factors; rows of an
embedding are added by row. For all else gradients are built, some examples at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_dpsparse.engine.built_gradients import built, built_square_norm, built_sum
from lightning_dpsparse.engine.outer_products import (
    Positions,
    by_position,
    outer_sum,
    weight_square_norm,
)
from lightning_dpsparse.engine.parameter_calls import Product, Rows, Use, rows_square_norm

# B examples

RoleUse = tuple[str, Use]
"""What a parameter is to a call ("weight", "bias", ...), and the call."""


def square_norm(
    uses: Sequence[RoleUse], parameter: Tensor, first_of_unit_B: Tensor | None
) -> Tensor:
    """Compute the squared norms of all examples' gradients, or of all units', (B,)."""
    roles = {role for role, _ in uses}
    flat = _flat(uses)
    if first_of_unit_B is None and flat is not None:
        return flat.flat_square_norm(of_bias=roles == {"bias"})
    if roles == {"weight"}:
        return weight_square_norm(joined_positions(uses), first_of_unit_B)
    if roles == {"rows"}:
        return rows_square_norm(*_pairs(uses), len(parameter), first_of_unit_B)
    assert uses[0][1].gradient is not None
    num_examples = len(uses[0][1].gradient)
    build = built(uses, parameter)
    return built_square_norm(build, parameter.numel(), num_examples, first_of_unit_B, parameter)


def weighted_sum(uses: Sequence[RoleUse], factors_B: Tensor, out: Tensor) -> Tensor:
    """Write sum_b f_b g_b over all these uses of one parameter into `out`.

    The terms of an example or user may cancel. They are added to each other before other terms are,
    or directly one after another, so that little is lost to rounding: see `not_below_rounding`.
    """
    roles, flat = {role for role, _ in uses}, _flat(uses)
    if not uses:
        out.zero_()
    elif flat is not None:
        of_bias = roles == {"bias"}
        flat.flat_weighted_sum(factors_B, out if of_bias else out.flatten(1), of_bias=of_bias)
    elif roles == {"weight"}:
        outer_sum(*by_position(joined_positions(uses), factors_B), out=out.flatten(1))
    elif roles == {"rows"}:
        ids, g = _pairs(uses)
        scaled = (g * factors_B[:, None, None]).flatten(0, 1)
        out.zero_().index_add_(0, ids.flatten(), scaled)
    else:
        built_sum(built(uses, out), factors_B, out)
    return out


def _flat(uses: Sequence[RoleUse]) -> Product | None:
    """Return the use, if it is the only one and has one position per example."""
    first = uses[0][1] if len(uses) == 1 else None
    return first if isinstance(first, Product) and first.is_flat else None


def joined_positions(uses: Sequence[RoleUse]) -> Positions:
    """Join the positions of all uses, whose gradients add up before they are squared."""
    each = [use.positions() for _, use in uses if isinstance(use, Product)]
    return each[0] if len(each) == 1 else Positions(*_joined(each))


def _pairs(uses: Sequence[RoleUse]) -> tuple[Tensor, Tensor]:
    """Join the ids and the gradients of all uses that read rows."""
    ids, g = _joined([use.pairs() for _, use in uses if isinstance(use, Rows)])
    return ids, g


def _joined(each: Sequence[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
    return (torch.cat(side, dim=1) for side in zip(*each))

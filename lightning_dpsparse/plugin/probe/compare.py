"""Which examples two passes disagree about, by more than rounding explains."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_dpsparse.sharded.observation import Seen

# n examples

OF_ROW = 1e-5
"""The part of an example's own largest value by which it may differ."""
OF_ALL = 1e-6
"""The part of the largest value of all examples by which each may differ beside that.

Rounding of float32 stays far below both. Coupling is far above, unless it is made to hide.
"""


def disagreement(one: Seen, two: Seen, looseness: float = 1.0) -> Tensor:
    """For every example, whether the two differ, (n,). Shapes may differ behind the examples."""
    if one.value.shape != two.value.shape:
        return _of_sizes(one.value, two.value, looseness)
    a, b = (_flat(seen.value) for seen in (one, two))
    if a.numel() == 0:
        return torch.zeros(len(a), dtype=torch.bool, device=a.device)
    size_n = torch.maximum(_finite(a).amax(1), _finite(b).amax(1))
    allowed_n = looseness * (OF_ROW * size_n + OF_ALL * size_n.amax())
    same = (a - b).abs() <= allowed_n[:, None]
    return ~(same | (a == b) | (a.isnan() & b.isnan())).all(1)


def _of_sizes(a: Tensor, b: Tensor, looseness: float) -> Tensor:
    """Compare sequences that were padded to other lengths: norms and sums must agree."""
    both = [
        torch.stack([_flat(v).norm(dim=1), _flat(v).sum(1)], 1) for v in (a.double(), b.double())
    ]
    sizes = [Seen("", value) for value in both]
    return disagreement(sizes[0], sizes[1], 100.0 * looseness)


def nonzero(seen: Seen) -> Tensor:
    """For every example, whether anything but zeros was seen, (n,)."""
    return (_flat(seen.value) != 0).any(1)


def first_in(seen: Sequence[Seen], others: Sequence[Seen], rows: Tensor, looseness: float) -> str:
    """Where one of these examples first differs, in the forward pass's order; "" if nowhere."""
    for one, two in zip(seen, others):
        if not len(one.value) == len(rows) == len(two.value):
            continue
        if one.may_be_padded and one.value.shape != two.value.shape:
            continue
        if bool((disagreement(one, two, looseness) & rows.to(one.value.device)).any()):
            return one.where
    return ""


def _flat(value: Tensor) -> Tensor:
    flat = value.reshape(len(value), -1) if value.numel() else value.new_zeros(len(value), 0)
    return flat if flat.is_floating_point() else flat.double()


def _finite(value: Tensor) -> Tensor:
    return value.abs().nan_to_num(nan=0.0, posinf=0.0)

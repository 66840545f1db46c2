"""Coins of one bias for very many rows, at the price of the few that come up heads.

A mechanism may let every row that nobody read take part in a step with the same small probability.
Tables have millions of rows, and a coin for each would cost more than the step. But the gaps
between heads have a known distribution, so it is enough to draw the gaps. `mechanisms/adafest.py`
uses this.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def survivors(num_rows: int, probability: float, uniform: Callable[[int, int], Tensor]) -> Tensor:
    """Choose rows, each independently with the same probability, in increasing order.

    From one survivor to the next lies a geometric gap, P(gap > g) = (1 - p)^g with gap >= 1, drawn
    as 1 + floor(log(u) / log(1 - p)). All of it is float64: in float32 a p of 1e-8 is lost.

    Guarantees: time and memory are those of the survivors, whatever the number of rows.
    Reference: Ghazi et al. 2023, Appendix B.2 (arXiv:2311.08357).

    Args:
        uniform: uniform(count, part) gives fresh float64 numbers in (0, 1].
    """
    if num_rows == 0 or probability <= 0.0:
        return uniform(0, 0).long()
    pieces, last, part = [], -1, 0
    while last < num_rows - 1:
        expected = (num_rows - 1 - last) * probability
        count = math.ceil(expected + 4.0 * math.sqrt(expected)) + 4
        u = uniform(count, part)
        skipped = u.log_().div_(math.log1p(-probability)) if probability < 1.0 else u.zero_()
        # These are whole numbers, which float64 holds exactly, up to far beyond the last row.
        rows = skipped.floor_().add_(1.0).cumsum_(0).add_(float(last))
        pieces.append(rows)
        last, part = int(min(float(rows[-1]), num_rows)), part + 1
    found = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    return found[: int(torch.searchsorted(found, float(num_rows)))].long()

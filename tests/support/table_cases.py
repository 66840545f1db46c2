"""Lookups in tables of every layout, and their gradients by autograd, one example at a time."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightning_dpsparse.engine.lookups import Bags, Layout, Lookup

B = 6

LAYOUTS = {
    "one table per feature": Layout((0, 1, 2), (4, 4, 4), (7, 3, 5)),
    "other widths": Layout((0, 1, 2), (4, 8, 12), (7, 3, 5)),
    "shared table": Layout((0, 0, 1), (4, 4), (5, 3)),
    "shared table and other widths": Layout((0, 1, 0, 0), (8, 4), (4, 6)),
    "stacked": Layout((0, 1, 2), (4, 4, 4), (7, 3, 5), is_stacked=True),
    "stacked, shared table": Layout((0, 0, 1), (4, 4), (5, 3), is_stacked=True),
    "two stacks": Layout((0, 2, 1, 3, 0), (4, 4, 8, 8), (7, 3, 5, 2), is_stacked=True),
    "sequences": Layout((0, 1, 2), (4, 4, 4), (7, 3, 5), is_pooled=False),
    "sequences, shared table": Layout((0, 1, 0), (4, 4), (5, 3), is_pooled=False),
    "sequences, stacked": Layout((0, 0, 1), (4, 4), (5, 3), is_stacked=True, is_pooled=False),
}


def make(layout: Layout, most: int, *, weighted: bool, mean: bool, seed: int = 0) -> Lookup:
    """Bags of up to `most` ids (most = 1: exactly one) from few rows, so that ids repeat."""
    generator = torch.Generator().manual_seed(seed)
    features = len(layout.table_of_feature)
    lengths = (
        torch.ones(features * B, dtype=torch.int64)
        if most == 1
        else torch.randint(0, most + 1, (features * B,), generator=generator)
    )
    rows = torch.tensor([layout.num_rows[t] for t in layout.table_of_feature])
    limit = rows.repeat_interleave(B).repeat_interleave(lengths)
    ids = (torch.rand(limit.numel(), generator=generator) * limit).long()
    width = sum(layout.widths[t] for t in layout.table_of_feature)
    weights = torch.rand(ids.numel(), generator=generator, dtype=torch.float64) + 0.5
    bags = Bags(
        replace(layout, is_mean=mean),
        ids,
        torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        weights if weighted else None,
    )
    shape = (B, width) if layout.is_pooled else (ids.numel(), layout.widths[0])
    return Lookup(bags, torch.randn(shape, generator=generator, dtype=torch.float64))


def example_gradients(lookup: Lookup, row_mask: Tensor | None) -> list[list[Tensor]]:
    """d <output_b, G_b> / d table for every example, by autograd through a plain loop."""
    layout, offsets = lookup.layout, lookup.bags.offsets.tolist()
    result = []
    for b in range(lookup.num_examples):
        tables = [
            torch.zeros(rows, width, dtype=torch.float64, requires_grad=True)
            for rows, width in zip(layout.num_rows, layout.widths)
        ]
        loss = torch.zeros((), dtype=torch.float64)
        for f, t in enumerate(layout.table_of_feature):
            bag = slice(offsets[f * B + b], offsets[f * B + b + 1])
            rows = tables[t][lookup.bags.ids_L[bag]]
            if lookup.bags.weights_L is not None:
                rows = rows * lookup.bags.weights_L[bag, None]
            if not layout.is_pooled:
                loss = loss + (rows * lookup.gradient[bag]).sum()
                continue
            pooled = rows.sum(0) / (max(1, len(rows)) if layout.is_mean else 1)
            loss = loss + (pooled * lookup.gradient[b, layout.columns[f]]).sum()
        gradients = list(torch.autograd.grad(loss, tables, allow_unused=True))
        gradients = [torch.zeros_like(t) if g is None else g for g, t in zip(gradients, tables)]
        if row_mask is not None:
            keep = row_mask.split(list(layout.num_rows))
            gradients = [g * k[:, None] for g, k in zip(gradients, keep)]
        result.append(gradients)
    return result


def mask_of(layout: Layout) -> Tensor:
    return torch.rand(sum(layout.num_rows), generator=torch.Generator().manual_seed(9)) < 0.6


CASES = [
    (name, most, weighted, mean, masked)
    for name in LAYOUTS
    for most in (1, 4)
    for weighted in (False, True)
    for mean in (False, True)
    for masked in (False, True)
    if LAYOUTS[name].is_pooled or not (weighted or mean)
]

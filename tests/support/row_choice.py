"""Mechanisms that choose rows: reads on paper, and Algorithm 1 done naively.

Ghazi et al. 2023 (arXiv:2311.08357), Algorithm 1, with the corrections of our privacy notes: the
reference of this file is a loop over units, sets of rows, float64 and plain PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_dpsparse import AdaFEST, FusedOptimizer, PrivacyPlan
from lightning_dpsparse.engine.lookups import Bags, Layout, Lookup
from lightning_dpsparse.engine.mechanism import BatchReads
from lightning_dpsparse.engine.rounding import fixed_price, price
from lightning_dpsparse.engine.state import StepNoise
from lightning_dpsparse.engine.step_inputs import Ranks
from lightning_dpsparse.mechanisms.selection.state import SelectedRows
from lightning_dpsparse.noise.keys import RunKey, Stream
from lightning_dpsparse.noise.sources import NoiseSource, RowNoise
from tests.support import tiny_model as small
from tests.support.naive_step import EXPECTED
from tests.support.paper_kernel import PaperKernel
from tests.support.plain_training import update
from tests.support.reference import Reference

CPU = torch.device("cpu")

Example = Sequence[Sequence[int]]
"""The ids of one example, feature by feature."""


# ---- a kernel on paper ---------------------------------------------------------------------------


def bags_of(layout: Layout, examples: Sequence[Example], weights: Any = None) -> Bags:
    """`weights` is a function of all ids, if the bags are weighted."""
    flat = [e[f] for f in range(len(layout.table_of_feature)) for e in examples]
    ids = torch.tensor([i for bag in flat for i in bag], dtype=torch.int64)
    lengths = torch.tensor([len(bag) for bag in flat], dtype=torch.int64)
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    return Bags(layout, ids, offsets, None if weights is None else weights(ids))


@dataclass(eq=False)
class PaperRead:
    """What one kernel read, and nothing behind it."""

    bags: Bags
    table_names: Sequence[str]
    shard_offsets: Sequence[tuple[int, int]]
    selected_R: Tensor | None = None
    order_B: Tensor | None = None
    has_whole_rows: bool = True

    @property
    def layout(self) -> Layout:
        return self.bags.layout

    def lookup(self) -> Lookup:
        width = self.bags.layout.columns[-1].stop
        return Lookup(self.bags, torch.zeros(self.bags.num_examples, width, dtype=torch.float64))

    def __post_init__(self) -> None:
        kernel = PaperKernel(self.layout, self.table_names, self.shard_offsets)
        self.state = SelectedRows(kernel, StepNoise(RowNoise(RunKey.fixed(0)), 0.0))
        self.state.selected_R = self.selected_R


def paper_read(layout: Layout, examples: Sequence[Example], **kwargs: Any) -> PaperRead:
    tables = len(layout.widths)
    names = [f"ebc.t{t}.weight" for t in range(tables)]
    settings = {"table_names": names, "shard_offsets": [(0, 0)] * tables} | kwargs
    return PaperRead(bags_of(layout, examples), **settings)


def ask(
    reads: Sequence[PaperRead],
    noise: NoiseSource,
    noise_multiplier: float,
    step: int = 0,
    first_of_unit_B: Tensor | None = None,
) -> BatchReads:
    ranks = Ranks(reads[0].bags.num_examples, 0, lambda tensor: None)
    lookups = [read.lookup() for read in reads]
    return BatchReads(
        reads, lookups, first_of_unit_B, ranks, noise, noise_multiplier, EXPECTED, step, CPU
    )


def rows_read(
    layout: Layout, examples: Sequence[Example], among: set[int] | None = None
) -> list[set[int]]:
    """The distinct rows that each example reads, with the tables numbered through."""
    found = []
    for example in examples:
        rows = {
            layout.first_row[layout.table_of_feature[f]] + i
            for f, bag in enumerate(example)
            for i in bag
        }
        found.append(rows if among is None else rows & among)
    return found


def rows_of_unit(examples: Sequence[Any]) -> set[tuple[str, int]]:
    """(table, row) of all that some examples of the small model read."""
    return {
        (name, row)
        for example in examples
        for name, _, _, features in small.TABLES
        for feature in features
        for row in example[1][feature].tolist()
    }


def naive_map(rows: Sequence[set[Any]], clip_norm: float) -> dict[Any, float]:
    """sum_b clip(v_b, C1), on rows that somebody read."""
    total: dict[Any, float] = {}
    for mine in rows:
        for row in mine:
            total[row] = total.get(row, 0.0) + min(1.0, clip_norm / math.sqrt(len(mine)))
    return total


# ---- the whole step ------------------------------------------------------------------------------


@dataclass
class Expected:
    """What a run of the small model must come to."""

    weights: dict[str, Tensor]
    ever_kept: dict[str, Tensor]
    """For every table, which rows were kept in any step."""
    read_and_kept: int = 0
    read_and_left: int = 0
    only_kept: int = 0
    """(step, row)s that were read and kept; read and left out; kept though nobody read them."""


def keep_rows(
    plan: PrivacyPlan,
    readers: Sequence[set[Any]],
    selected: Mapping[str, Tensor],
    step: int,
    paths: dict[str, str],
) -> dict[str, Tensor]:
    """The rows of every table that take part, a boolean each."""
    keep = {name: mask.clone() for name, mask in selected.items()}
    mechanism = plan.mechanism
    if not isinstance(mechanism, AdaFEST):
        return keep
    assert mechanism.threshold is not None
    assert plan.noise_multiplier is not None
    count = {name: torch.zeros(len(mask), dtype=torch.float64) for name, mask in keep.items()}
    ratio, bound = mechanism.noise_ratio, mechanism.map_clip_norm
    stddev = mechanism.map_clip_norm * plan.noise_multiplier * math.sqrt(ratio**2 + 1)  # sigma1 C1
    if stddev:
        bound *= 1 - fixed_price(stddev, EXPECTED)
    for (name, row), value in naive_map(readers, bound).items():
        count[name][row] = value
    for name, path in paths.items():
        if stddev:
            drawn = torch.empty(len(count[name]), 1)
            RowNoise(plan.make_key()).fill_(drawn, Stream("map", path, step), stddev)
            count[name] += drawn[:, 0].double()
        nearest = float((count[name] - mechanism.threshold).abs().min())
        assert nearest > 1e-5, "a tie: float32 could go either way"
        keep[name] &= count[name] >= mechanism.threshold
    return keep


def naive_selecting(
    start: dict[str, Tensor],
    units: Sequence[Sequence[int]],
    optimizer: FusedOptimizer,
    plan: PrivacyPlan,
    *,
    mean: bool = False,
    weighted: bool = False,
    selected: Mapping[str, Tensor] | None = None,
) -> Expected:
    """units[s] is how many examples each unit of step s has; `selected` a boolean for every row.

    Noise, if the plan has any, is that of row-keyed draws.
    """
    model = Reference(start, mean=mean).double()
    dense = torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)
    state = {name: torch.zeros_like(bag.weight) for name, bag in model.bags.items()}
    everything = {name: torch.ones(rows, dtype=torch.bool) for name, rows, _, _ in small.TABLES}
    selected = everything if selected is None else selected
    result = Expected({}, {name: ~mask for name, mask in everything.items()})
    examples, position = small.Bags(100), 0
    for step, sizes in enumerate(units):
        groups = []
        for size in sizes:
            groups.append([examples[position + i] for i in range(size)])
            position += size
        # 1. The map: every unit counts once for every selected row that it reads, in any table.
        readers = [
            {(name, row) for name, row in rows_of_unit(group) if selected[name][row]}
            for group in groups
        ]
        keep = keep_rows(plan, readers, selected, step, model.paths)
        _tell(result, keep, set().union(*readers))
        # 2. Gradients on the rows that are kept, clipped with the dense layers' as one.
        total = [torch.zeros_like(p) for p in model.parameters()]
        for group in groups:
            each = [g * m for g, m in zip(_summed(model, group, weighted), _masks(model, keep))]
            norm = math.sqrt(sum(float(g.square().sum()) for g in each))
            bound = plan.clip_norm * (1 - _price(model, group, plan))
            total = [t + min(1.0, bound / norm) * g for t, g in zip(total, each)]
        for parameter, gradient in zip(model.parameters(), total):
            parameter.grad = gradient / EXPECTED
        # 3. Noise on the same rows, read or not, and one update.
        if plan.noise_multiplier:
            _add_noise(model, keep, plan, step)
        dense.step()
        with torch.no_grad():
            for name, bag in model.bags.items():
                update(bag.weight, state[name], optimizer, 1.0)
    result.weights = model.weights()
    return result


def _tell(result: Expected, keep: dict[str, Tensor], read: set[tuple[str, int]]) -> None:
    for name, mask in keep.items():
        result.ever_kept[name] |= mask
        rows = {row for table, row in read if table == name}
        kept = set(mask.nonzero().squeeze(1).tolist())
        result.read_and_kept += len(rows & kept)
        result.read_and_left += len(rows - kept)
        result.only_kept += len(kept - rows)


def _summed(model: Reference, group: list[Any], weighted: bool) -> list[Tensor]:
    """The gradients of a unit's examples, added up."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    for example in group:
        batch = (small.collate_weighted if weighted else small.collate)([example])
        batch.dense_features = batch.dense_features.double()
        loss = F.binary_cross_entropy_with_logits(model(batch), batch.labels.double())
        each = torch.autograd.grad(loss, list(model.parameters()))
        total = [t + g for t, g in zip(total, each)]
    return total


def _masks(model: Reference, keep: dict[str, Tensor]) -> list[Any]:
    """For every parameter, what its gradient is multiplied by."""
    masks: list[Any] = []
    for name, _ in model.named_parameters():
        is_table = name.startswith("bags.")
        masks.append(keep[name.split(".")[1]].double()[:, None] if is_table else 1.0)
    return masks


def _price(model: Reference, group: list[Any], plan: PrivacyPlan) -> float:
    """What is taken off the clip norm for rounding."""
    if not plan.noise_multiplier:
        return 0.0
    lookups = [
        model.bags[name].weight.shape[1] * len(example[1][feature])
        for example in group
        for name, _, _, features in small.TABLES
        for feature in features
    ]
    numbers = sum(p.numel() for p in model.head.parameters()) + sum(lookups)
    sensitivity = plan.clip_norm / EXPECTED
    sigma = plan.mechanism.gradient_noise(plan.noise_multiplier)
    return price(sigma * sensitivity, sensitivity, EXPECTED, numbers)


def _add_noise(model: Reference, keep: dict[str, Tensor], plan: PrivacyPlan, step: int) -> None:
    source, sigma = RowNoise(plan.make_key()), plan.noise_multiplier
    assert sigma is not None
    if isinstance(plan.mechanism, AdaFEST):
        sigma *= math.sqrt(1 + plan.mechanism.noise_ratio**-2)  # sigma2
    stddev = sigma * plan.clip_norm / EXPECTED
    for name, path in model.paths.items():
        gradient = model.bags[name].weight.grad
        drawn = source.fill_(torch.empty(gradient.shape), Stream("gradient", path, step), stddev)
        gradient += drawn * keep[name][:, None]
    dense = list(model.head.parameters())
    flat = torch.empty(1, sum(p.numel() for p in dense))
    source.fill_(flat, Stream("gradient", "dense layers", step), stddev)
    for parameter, piece in zip(dense, flat[0].split([p.numel() for p in dense])):
        assert parameter.grad is not None
        parameter.grad += piece.view_as(parameter)

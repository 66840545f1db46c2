"""Adding or removing one example moves the sum before noise by at most C, whatever the example."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_dpsparse.engine.ghost import DenseCapture
from lightning_dpsparse.engine.step import Ranks, StepConfig, clipped_sums, release
from lightning_dpsparse.mechanisms.eana import EANA
from lightning_dpsparse.noise.keys import RunKey
from lightning_dpsparse.noise.sources import FastNoise
from tests.support.fake_read import CLIPPINGS, FakeRead, example
from tests.support.paper_kernel import open_on_paper


def sequence_of(examples: list[Any], vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A row for every lookup, (L, 4), the bag that it belongs to and its weight, (L,) each."""
    size = len(examples)
    places = [
        (b * 3 + f, place)
        for f in range(3)
        for b in range(size)
        for place in range(len(examples[b][0][f]))
    ]
    bag = torch.tensor([at for at, _ in places], dtype=torch.int64)
    place = torch.tensor([place for _, place in places], dtype=torch.float64)
    return vectors.view(size * 3, 4)[bag] * (1.5 - place)[:, None], bag, 2.0 - place


def clipped_sum(
    examples: list[Any],
    clipping: Any,
    clip_norm: float,
    weighted: bool,
    pooled: bool = True,
    dense_scale: float = 1.0,
) -> Tensor:
    """Everything that would be released, without noise, as one long vector.

    Dense layers are in the unit in which they get their noise: divided by `dense_scale`.
    """
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(12, 3), nn.LayerNorm(3), nn.Linear(3, 1)).double()
    size = len(examples)
    vectors = torch.tensor([e[1] for e in examples], dtype=torch.float64).view(size, 12)
    leaf, bag, weight = (vectors, None, vectors) if pooled else sequence_of(examples, vectors)
    leaf = leaf.detach().requires_grad_()
    scale = torch.tensor([e[2] for e in examples], dtype=torch.float64)
    read = FakeRead([e[0] for e in examples], leaf, weighted and pooled, pooled)
    capture = DenseCapture(dict(dense.named_parameters()))
    with capture:
        x = leaf
        if bag is not None:  # gradients differ by place, and may cancel
            x = torch.zeros(size * 3, 4, dtype=torch.float64)
            x = x.index_add(0, bag, leaf * weight[:, None]).view(size, 12)
        loss = dense(x).squeeze(1).square() * scale + (x * scale[:, None]).sum(1)
    config = StepConfig(
        EANA(),
        clipping,
        clip_norm,
        0.0,
        expected_batch=7.0,
        noise=FastNoise(RunKey.fixed(0)),
        dense_scale=dense_scale,
    )
    ranks = Ranks(size, 0, lambda tensor: None)
    state = open_on_paper(config, read)
    sums = clipped_sums(loss, [read], capture, config, state, ranks, 0)
    release(sums, [read], capture, state, ranks, 0)
    gradients = [p.grad for p in dense.parameters() if p.grad is not None]
    released = [*read.applied, *(gradient / dense_scale for gradient in gradients)]
    if not read.applied:
        released = [torch.zeros(5, 4), torch.zeros(3, 4), *released]
    return torch.cat([tensor.double().flatten() for tensor in released]) * 7.0


@settings(max_examples=180, deadline=None, derandomize=True)
@given(
    examples=st.lists(example, min_size=1, max_size=4),
    removed=st.integers(0, 3),
    clipping=st.sampled_from(CLIPPINGS),
    clip_norm=st.sampled_from([0.1, 1.0, 30.0]),
    weighted=st.booleans(),
    pooled=st.booleans(),
    dense_scale=st.sampled_from([1.0, 0.2, 5.0]),
)
def test_removing_one_example_moves_the_sum_by_at_most_clip_norm(
    examples: list[Any],
    removed: int,
    clipping: Any,
    clip_norm: float,
    weighted: bool,
    pooled: bool,
    dense_scale: float,
) -> None:
    removed %= len(examples)
    rest = [e for i, e in enumerate(examples) if i != removed]
    everyone = clipped_sum(examples, clipping, clip_norm, weighted, pooled, dense_scale)
    others = clipped_sum(rest, clipping, clip_norm, weighted, pooled, dense_scale)
    assert everyone.isfinite().all()
    assert torch.linalg.vector_norm(everyone - others) <= clip_norm * (1 + 1e-9)


@pytest.mark.parametrize("pooled", [True, False], ids=["bags", "sequences"])
@pytest.mark.parametrize("clipping", CLIPPINGS, ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("dense_scale", [1.0, 5.0])
def test_the_bound_is_reached(dense_scale: float, clipping: Any, pooled: bool) -> None:
    """A bound that nothing comes near would prove little."""
    big = (([1, 1], [1], [0]), [float(i) for i in range(12)], 50.0)
    moved = torch.linalg.vector_norm(clipped_sum([big], clipping, 1.0, False, pooled, dense_scale))
    assert moved == pytest.approx(1.0, rel=1e-3)

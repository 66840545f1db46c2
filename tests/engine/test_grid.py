"""In float32, and on the noise's grid, one example still moves what is released by at most C."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dpsparse.engine.clipping import AutomaticClipping, FlatClipping, GroupClipping
from lightning_dpsparse.engine.ghost import DenseCapture
from lightning_dpsparse.engine.lookups import Bags, Layout, Lookup
from lightning_dpsparse.engine.rounding import check_price, price
from lightning_dpsparse.engine.rows import RowGradient
from lightning_dpsparse.engine.step import Ranks, StepConfig, clipped_sums, release
from lightning_dpsparse.mechanisms.eana import EANA
from lightning_dpsparse.noise.grid import grid_of, round_to_
from lightning_dpsparse.noise.keys import Stream
from tests.support.paper_kernel import open_on_paper

ROWS, WIDTH, INPUTS, HIDDEN = 50, 16, 96, 128
LAYOUT = Layout((0, 1), (WIDTH, WIDTH), (ROWS, ROWS))
CLIPPINGS = [FlatClipping(), AutomaticClipping(), GroupClipping({"a*": 1.0, "*": 2.0})]
CASES = ["random", "aligned", "cancelling", "growing"]


class Silent:
    """A source whose draws are all zero: what is left is what the noise would hide."""

    is_by_row = False

    def fill_(self, out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return out.zero_()

    def add_(self, out: Tensor, stream: Stream, stddev: float) -> Tensor:
        return round_to_(out, grid_of(stddev))


@dataclass
class PaperRead:
    """One kernel of two tables, each example with one id in each."""

    ids: Tensor
    leaf: Tensor
    applied: list[Tensor] = field(default_factory=list)
    table_names = ("a", "b")
    shard_offsets = ((0, 0), (0, 0))
    order_B = None
    layout = LAYOUT
    state: Any = None

    def lookup(self) -> Lookup:
        assert self.leaf.grad is not None
        bags = Bags(LAYOUT, self.ids.t().flatten(), torch.arange(2 * len(self.ids) + 1))
        return Lookup(bags, self.leaf.grad)

    def apply(self, gradients: list[RowGradient]) -> None:
        for gradient in gradients:
            whole = torch.zeros(ROWS, WIDTH)
            whole[gradient.rows_U] = gradient.values_UD
            self.applied.append(whole)


@dataclass
class OneTable:
    """A kernel of one table, after the backward pass."""

    done: Lookup
    table_names = ("a",)
    shard_offsets = ((0, 0),)
    order_B = None
    state: Any = None

    @property
    def layout(self) -> Layout:
        return self.done.layout

    def lookup(self) -> Lookup:
        return self.done

    def apply(self, gradients: list[RowGradient]) -> None: ...


def examples(case: str, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids, what the tables gave, other inputs, and the scale of each loss."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, ROWS, (size, 2), generator=generator)
    given = torch.randn(size, 2 * WIDTH, generator=generator)
    inputs = torch.randn(size, INPUTS, generator=generator)
    scale = torch.full((size,), 30.0)
    if case in ("aligned", "cancelling"):
        given, inputs, ids = given[:1].repeat(size, 1), inputs[:1].repeat(size, 1), ids * 0
        inputs *= 1 + 1e-3 * torch.rand(size, 1, generator=generator)
    if case == "cancelling":
        scale[::2] *= -1
    if case == "growing":
        scale = 10.0 ** torch.linspace(-6, 6, size)
    return ids, given, inputs, scale


def hidden_sum(data: tuple[Tensor, ...], clipping: Any, expected: float) -> Tensor:
    """What noise of multiplier one would be added to, times the expected batch; C is one."""
    ids, given, inputs, scale = data
    torch.manual_seed(0)
    first, last = nn.Linear(INPUTS + 2 * WIDTH, HIDDEN), nn.Linear(HIDDEN, 1)
    dense = nn.ModuleDict({"first": first, "last": last})
    read = PaperRead(ids, given.clone().requires_grad_())
    capture = DenseCapture(dict(dense.named_parameters()))
    with capture:
        x = torch.cat([inputs, read.leaf], 1)
        loss = last(torch.tanh(first(x))).squeeze(1) * scale
    config = StepConfig(EANA(), clipping, 1.0, 1.0, expected, Silent())  # type: ignore[arg-type]
    state = open_on_paper(config, read)
    ranks = Ranks(len(ids), 0, lambda tensor: None)
    sums = clipped_sums(loss, [read], capture, config, state, ranks, 0)
    release(sums, [read], capture, state, ranks, 0)
    released = [*read.applied, *(p.grad for p in dense.parameters() if p.grad is not None)]
    flat = torch.cat([tensor.flatten() for tensor in released]).double()
    whole = flat / grid_of(1.0 / expected)
    assert torch.equal(whole, whole.round())
    return flat * expected


@pytest.mark.parametrize("clipping", CLIPPINGS, ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("size", [2, 65, 4096])
@pytest.mark.parametrize("case", CASES)
def test_removing_one_example_moves_the_rounded_sum_by_at_most_clip_norm(
    case: str, size: int, clipping: Any
) -> None:
    """No tolerance: what rounding adds was taken off before. The first, one in the middle and the
    last example go in turn, so that what comes after is added up in another order."""
    data = examples(case, size)
    everyone = hidden_sum(data, clipping, float(size))
    for removed in {0, size // 2, size - 1}:
        keep = torch.arange(size) != removed
        others = hidden_sum(tuple(part[keep] for part in data), clipping, float(size))
        moved = float(torch.linalg.vector_norm(everyone - others))
        assert moved <= 1.0
        if case in ("random", "aligned"):
            assert moved > 0.98  # a bound that nothing comes near would prove little


def test_the_price_is_small_and_known() -> None:
    """Half a million dense numbers, a batch of 2,048, a noise multiplier of one."""
    found = price(1.0 / 2048, 1.0 / 2048, 2048, 461_000)
    assert 0.002 < found < 0.003
    more = price(1.0 / 2048, 1.0 / 2048, 2048, 4 * 461_000)
    assert more - found == pytest.approx(2.0**-19 * 461_000**0.5)


def test_an_example_pays_for_the_rows_that_it_reads() -> None:
    """Four thousand rows of one table, or one: the norm of what is left of either is known."""
    rows = 4000
    layout = Layout((0,), (WIDTH,), (rows,))
    for read in (1, rows):
        gradient = torch.full((1, WIDTH), 100.0)
        bags = Bags(layout, torch.arange(read), torch.tensor([0, read]))
        capture = DenseCapture({})
        config = StepConfig(EANA(), FlatClipping(), 1.0, 1.0, 1.0, Silent())  # type: ignore[arg-type]
        leaf = torch.zeros(1, WIDTH, requires_grad=True)
        kernel = OneTable(Lookup(bags, gradient))
        loss = (leaf * gradient).sum(1)
        state, ranks = open_on_paper(config, kernel), Ranks(1, 0, lambda tensor: None)
        found = clipped_sums(loss, [kernel], capture, config, state, ranks, 0).tables[0][0]
        norm = float(torch.linalg.vector_norm(found.values_UD.double()))
        assert norm == pytest.approx(1.0 - price(1.0, 1.0, 1.0, read * WIDTH), abs=2e-7)
    assert price(1.0, 1.0, 1.0, rows * WIDTH) - price(1.0, 1.0, 1.0, WIDTH) > 4e-4


def test_a_price_that_leaves_no_gradient_is_refused() -> None:
    check_price(0.2)
    with pytest.raises(ValueError, match="Expected rounding to float32 to take at most 25%"):
        check_price(price(1.0, 1.0, 2**20, 461_000))


def test_products_are_added_up_in_float32_whatever_the_model_runs_in() -> None:
    data = examples("random", 65)
    exact = hidden_sum(data, FlatClipping(), 65.0)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        everyone = hidden_sum(data, FlatClipping(), 65.0)
        others = hidden_sum(tuple(part[1:] for part in data), FlatClipping(), 65.0)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert float(torch.linalg.vector_norm(everyone - others)) <= 1.0
    assert torch.allclose(everyone, exact, atol=0.1)  # the model itself may be less exact

"""Users clipped as one: a user's examples lie side by side, and their gradients are added first."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_dpsparse.engine.clipping import AutomaticClipping, FlatClipping
from lightning_dpsparse.engine.ghost import DenseCapture
from lightning_dpsparse.engine.lookups import Bags, Layout, Lookup
from lightning_dpsparse.engine.norms import square_norms
from lightning_dpsparse.engine.step import Ranks, StepConfig, clipped_sums, release
from lightning_dpsparse.mechanisms.eana import EANA
from lightning_dpsparse.noise.keys import RunKey
from lightning_dpsparse.noise.sources import FastNoise
from tests.support import dense_cases as ghost
from tests.support import table_cases as tables
from tests.support.fake_read import CLIPPINGS, FakeRead, adversarial, bag, number
from tests.support.paper_kernel import open_on_paper
from tests.support.users import leaders_of

SHARED = 20  # numbers of the table that two features share, the first of a released vector


def square_of_sums(each: list[list[Tensor]], sizes: list[int]) -> Tensor:
    """|| sum of a user's gradients ||^2 at the user's first example, zero elsewhere."""
    squares, b = torch.zeros(len(each), dtype=torch.float64), 0
    for size in sizes:
        summed = [sum(parts) for parts in zip(*each[b : b + size])]
        squares[b] = sum(g.square().sum() for g in summed)
        b += size
    return squares


@pytest.mark.parametrize(("name", "most", "weighted", "mean", "masked"), tables.CASES)
def test_norms_of_users_on_tables_match_autograd(
    name: str, most: int, weighted: bool, mean: bool, masked: bool
) -> None:
    lookup = tables.make(tables.LAYOUTS[name], most, weighted=weighted, mean=mean)
    mask = tables.mask_of(lookup.layout) if masked else None
    gradients = tables.example_gradients(lookup, mask)
    runs = lookup.bags.runs
    kept = None if mask is None else runs.only(mask[runs.row_U])
    for sizes in ([6], [2, 4], [1, 3, 1, 1], [1] * 6):
        first_of_unit_B = leaders_of(sizes)
        found = square_norms(lookup, kept, first_of_unit_B=first_of_unit_B)
        expected = square_of_sums(gradients, sizes)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert found[first_of_unit_B != torch.arange(6)].eq(0).all()
        for table in range(len(lookup.layout.widths)):
            found = square_norms(lookup, kept, tables=[table], first_of_unit_B=first_of_unit_B)
            expected = square_of_sums([[g[table]] for g in gradients], sizes)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_examples_of_a_user_meet_on_a_row_before_they_are_squared() -> None:
    gradient = torch.tensor([[0.6, 0.8], [0.6, 0.8], [0.6, 0.8]])
    bags = Bags(Layout((0,), (2,), (5,)), torch.tensor([2, 2, 2]), torch.arange(4))
    lookup = Lookup(bags, gradient)
    assert square_norms(lookup).tolist() == pytest.approx([1.0, 1.0, 1.0])
    found = square_norms(lookup, first_of_unit_B=torch.tensor([0, 1, 1]))
    assert found.tolist() == pytest.approx([1.0, 4.0, 0.0])


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch may copy; no matter
@pytest.mark.parametrize("sizes", [[5], [2, 3], [1, 3, 1], [1] * 5], ids=str)
@pytest.mark.parametrize("name", ghost.CASES)
def test_norms_of_users_on_dense_layers_match_autograd(name: str, sizes: list[int]) -> None:
    torch.manual_seed(0)
    build, data = ghost.CASES[name]
    model, x = build().double(), data()
    expected = ghost.autograd(model, x)
    capture = ghost.capture_step(model, x)
    first_of_unit_B = leaders_of(sizes)
    norms = {name: torch.zeros(5, dtype=torch.float64) for name in expected}
    for parameter, squares in capture.square_norms(5, first_of_unit_B):
        assert squares[first_of_unit_B != torch.arange(5)].eq(0).all()
        norms[parameter] += squares
    for parameter, each in expected.items():
        wanted = square_of_sums([[g] for g in each], sizes)
        torch.testing.assert_close(norms[parameter], wanted, rtol=1e-9, atol=1e-12)


def test_the_empty_batch_has_empty_norms() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 1)).double()
    capture = ghost.capture_step(model, ghost.vectors()[:0])
    none = torch.zeros(0, dtype=torch.int64)
    assert all(squares.shape == (0,) for _, squares in capture.square_norms(0, none))


def clipped_sum(
    users: list[Any],
    clipping: Any,
    clip_norm: float,
    weighted: bool = False,
    *,
    as_users: bool = True,
    order: list[int] | None = None,
) -> Tensor:
    """Everything that would be released, without noise, as one long vector.

    With `order`, the kernel holds the examples in that order.
    """
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(12, 3), nn.LayerNorm(3), nn.Linear(3, 1)).double()
    examples = [example for user in users for example in user]
    columns = [examples[i] for i in order or range(len(examples))]
    values = torch.tensor([e[1] for e in columns], dtype=torch.float64)
    leaf = values.view(len(columns), 12).requires_grad_()
    scale = torch.tensor([e[2] for e in examples], dtype=torch.float64)
    read = FakeRead([e[0] for e in columns], leaf, weighted)
    read.order_B = torch.tensor(order) if order else None  # type: ignore[assignment]
    capture = DenseCapture(dict(dense.named_parameters()))
    with capture:
        x = leaf[torch.argsort(torch.tensor(order))] if order else leaf
        loss = dense(x).squeeze(1).square() * scale + (x * scale[:, None]).sum(1)
    config = StepConfig(
        EANA(), clipping, clip_norm, 0.0, expected_batch=7.0, noise=FastNoise(RunKey.fixed(0))
    )
    ranks = Ranks(len(examples), 0, lambda tensor: None)
    first_of_unit_B = leaders_of([len(user) for user in users]) if as_users else None
    state = open_on_paper(config, read)
    sums = clipped_sums(loss, [read], capture, config, state, ranks, 0, first_of_unit_B)
    release(sums, [read], capture, state, ranks, 0)
    applied = read.applied or [torch.zeros(5, 4), torch.zeros(3, 4)]  # no row was read
    released = [*applied, *(p.grad for p in dense.parameters() if p.grad is not None)]
    return torch.cat([tensor.double().flatten() for tensor in released]) * 7.0


def one_by_one(users: list[Any], clipping: Any, clip_norm: float) -> Tensor:
    """Each user's gradient summed without clipping, then clipped by hand."""
    total = torch.zeros(())
    for user in users:
        summed = clipped_sum([user], FlatClipping(), math.inf, as_users=False)
        if isinstance(clipping, FlatClipping):
            factors: Any = min(1.0, clip_norm / float(summed.norm()))
        elif isinstance(clipping, AutomaticClipping):
            factors = clip_norm / (summed.norm() + clipping.stability)
        else:  # shares one and two
            factors = torch.ones_like(summed)
            for part, share in ((slice(SHARED), 1.0), (slice(SHARED, None), 2.0)):
                bound = clip_norm * share / math.sqrt(5)
                factors[part] = min(1.0, bound / float(summed[part].norm()))
        total = total + factors * summed
    return total


def some_users() -> list[Any]:
    """A repeated id, an empty bag, rows on which examples of one user and of several meet."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda: torch.randn(12, generator=generator).tolist()  # noqa: E731
    return [
        [(([1, 1], [1], [0]), draw(), 0.2), (([1, 3], [], [0]), draw(), -1.0)],
        [(([0], [2], [1, 1]), draw(), 0.01)],
        [(([4], [1], []), draw(), 3.0), (([], [], [2]), draw(), 1.0), (([4], [4], []), draw(), 2)],
    ]


@pytest.mark.parametrize("clip_norm", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("clipping", CLIPPINGS, ids=lambda c: type(c).__name__)
def test_a_users_summed_gradient_is_clipped(clipping: Any, clip_norm: float) -> None:
    found = clipped_sum(some_users(), clipping, clip_norm)
    expected = one_by_one(some_users(), clipping, clip_norm)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_clipping_users_is_not_clipping_examples() -> None:
    """The tests here would prove little if both gave the same."""
    users = clipped_sum(some_users(), FlatClipping(), 1.0)
    examples = clipped_sum(some_users(), FlatClipping(), 1.0, as_users=False)
    assert torch.linalg.vector_norm(users - examples) > 0.1


def test_users_of_one_example_are_examples() -> None:
    alone = [[example] for user in some_users() for example in user]
    found = clipped_sum(alone, FlatClipping(), 1.0)
    torch.testing.assert_close(found, clipped_sum(alone, FlatClipping(), 1.0, as_users=False))


def test_the_order_of_the_kernels_columns_does_not_matter() -> None:
    """Two-level sharding interleaves the hosts' ranks. This order is not its own inverse."""
    straight = clipped_sum(some_users(), FlatClipping(), 1.0)
    mixed = clipped_sum(some_users(), FlatClipping(), 1.0, order=[4, 5, 2, 0, 3, 1])
    torch.testing.assert_close(mixed, straight)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e200], ids=str)
@pytest.mark.parametrize("clipping", CLIPPINGS, ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("place", range(3))
def test_an_example_that_overflows_takes_its_user_along_and_nobody_else(
    place: int, clipping: Any, value: float
) -> None:
    users = some_users()
    bags, values, _ = users[2][place]
    users[2][place] = (bags, values, value)
    found = clipped_sum(users, clipping, 1.0)
    torch.testing.assert_close(found, clipped_sum(users[:2], clipping, 1.0))


example = st.tuples(
    st.tuples(bag(5), bag(5), bag(3)),
    st.lists(number, min_size=12, max_size=12),
    st.one_of(st.floats(-10, 10), adversarial, adversarial.map(lambda value: -value)),
)
user = st.lists(example, min_size=1, max_size=2)
# The same again with the other sign: all gradients cancel, whatever their size.
cancelling = user.map(lambda examples: examples + [(bags, x, -s) for bags, x, s in examples])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    users=st.lists(st.one_of(user, cancelling), min_size=1, max_size=3),
    removed=st.integers(0, 2),
    clipping=st.sampled_from(CLIPPINGS),
    clip_norm=st.sampled_from([0.1, 1.0, 30.0]),
    weighted=st.booleans(),
)
def test_removing_one_user_moves_the_sum_by_at_most_clip_norm(
    users: list[Any], removed: int, clipping: Any, clip_norm: float, weighted: bool
) -> None:
    removed %= len(users)
    rest = [u for i, u in enumerate(users) if i != removed]
    everyone = clipped_sum(users, clipping, clip_norm, weighted)
    others = clipped_sum(rest, clipping, clip_norm, weighted)
    assert everyone.isfinite().all()
    # Where terms cancel, rounding is up to sqrt(eps) C = 1.5e-8 C for each of some dozen.
    assert torch.linalg.vector_norm(everyone - others) <= clip_norm * (1 + 1e-6)


@pytest.mark.parametrize("clipping", CLIPPINGS, ids=lambda c: type(c).__name__)
def test_the_bound_is_reached(clipping: Any) -> None:
    big = (([1, 1], [1], [0]), [float(i) for i in range(12)], 50.0)
    moved = torch.linalg.vector_norm(clipped_sum([[big, big]], clipping, 1.0))
    assert moved == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("clipping", CLIPPINGS, ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("scale", [1e8, 1e20, 1e60])
def test_a_user_whose_examples_cancel_does_not_swallow_the_others(
    clipping: Any, scale: float
) -> None:
    """1e20 + x - 1e20 is zero: a user of no gradient at all could erase everyone's."""
    bags: Any = ([0, 1, 2, 3, 4], [], [0, 1, 2])
    values = [float(i) for i in range(12)]
    up, down = (bags, values, scale), (bags, values, -scale)
    first, second, third = some_users()
    found = clipped_sum([[up, *second, down], first, third, [down, up]], clipping, 1.0)
    rest = clipped_sum([first, third], clipping, 1.0)
    assert torch.linalg.vector_norm(found - rest) <= 1.0 + 1e-6


def test_squares_stay_above_zero_where_examples_cancel() -> None:
    """0.1 + 0.2 - 0.3 is not zero, and as a difference of products may come out negative."""
    layer = nn.Linear(40, 40)
    for seed in range(20):
        x = torch.randn(1, 40, generator=torch.Generator().manual_seed(seed)).expand(3, -1)
        capture = DenseCapture(dict(layer.named_parameters()))
        with capture:
            loss = layer(x).sum(1) * torch.tensor([0.1, 0.2, -0.3])
        loss.sum().backward()
        for _, squares in capture.square_norms(3, torch.zeros(3, dtype=torch.int64)):
            assert squares[0] > 0

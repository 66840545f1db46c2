"""The private step equals a naive one: a loop over examples, float64, plain PyTorch."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lightning_dpsparse import DPSGD, EANA, AdaFEST, Placement, TablePlacement
from lightning_dpsparse.engine.clipping import AutomaticClipping, GroupClipping
from lightning_dpsparse.sharded.fused import kernel_steps
from tests.plugin.test_training import PLACEMENTS, ROWWISE, SGD, assert_close
from tests.private import ADAGRAD, SIZES, Batches, automatic, grouped, naive, plan, run
from tests.ranks import Ranks
from tests.small import Recording, make_trainer


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD, ROWWISE], ids=lambda o: o.kind)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("mean", [False, True])
def test_one_rank_is_the_naive_step(
    one_rank: Ranks, optimizer: Any, sizes: str, mean: bool
) -> None:
    start, end = run(one_rank, SIZES[sizes], Placement(), optimizer, plan(), mean=mean)
    expected = naive(start, SIZES[sizes], optimizer, 0.5, mean=mean)
    assert_close(end, expected, 1e-6 if optimizer is SGD else 1e-5)


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD], ids=lambda o: o.kind)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", PLACEMENTS)
def test_two_ranks_are_the_naive_step(
    two_ranks: Ranks, optimizer: Any, sizes: str, name: str
) -> None:
    start, end = run(two_ranks, SIZES[sizes], PLACEMENTS[name], optimizer, plan())
    expected = naive(start, SIZES[sizes], optimizer, 0.5)
    assert_close(end, expected, 1e-6 if optimizer is SGD else 1e-5)


@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("name", ["mixed", "row_wise"])
@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD], ids=lambda o: o.kind)
def test_a_batch_cut_into_parts_is_the_naive_step(
    two_ranks: Ranks, most: int, name: str, optimizer: Any
) -> None:
    """Ranks of unequal size agree on the number of parts; one update, one noise for all of them."""
    sizes = SIZES["uneven"]
    start, end = run(two_ranks, sizes, PLACEMENTS[name], optimizer, plan(), most=most)
    expected = naive(start, sizes, optimizer, 0.5)
    assert_close(end, expected, 1e-6 if optimizer is SGD else 1e-5)


@pytest.mark.parametrize("mechanism", [EANA(), AdaFEST(threshold=0.1)], ids=["eana", "adafest"])
def test_a_rank_without_tables_takes_part(two_ranks: Ranks, mechanism: Any) -> None:
    """With a threshold that every row passes, AdaFEST is the same step."""
    first = TablePlacement(kind="table_wise", ranks=[0])
    placement = Placement(tables=dict.fromkeys(("t0", "t1", "t2", "t3"), first))
    private = plan(mechanism=mechanism)
    start, end = run(two_ranks, SIZES["uneven"], placement, SGD, private)
    assert_close(end, naive(start, SIZES["uneven"], SGD, 0.5), 1e-6)


@pytest.mark.parametrize("kind", ["grid", "table_row_wise"])
def test_two_hosts_are_the_naive_step(two_hosts: Ranks, kind: Any) -> None:
    placement = Placement(default=kind)
    start, end = run(two_hosts, SIZES["uneven"], placement, SGD, plan(), hosts=2)
    assert_close(end, naive(start, SIZES["uneven"], SGD, 0.5), 1e-6)


@pytest.mark.parametrize("name", ["table_wise", "row_wise"])
def test_an_example_that_overflows_counts_nothing(two_ranks: Ranks, name: str) -> None:
    start, end = run(two_ranks, SIZES["even"], PLACEMENTS[name], SGD, plan(), poisoned=True)
    assert_close(end, naive(start, SIZES["even"], SGD, 0.5, poisoned=True), 1e-6)


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD], ids=lambda o: o.kind)
@pytest.mark.parametrize("name", ["table_wise", "row_wise", "column_wise"])
def test_weighted_bags_are_the_naive_step(two_ranks: Ranks, optimizer: Any, name: str) -> None:
    start, end = run(two_ranks, SIZES["uneven"], PLACEMENTS[name], optimizer, plan(), weighted=True)
    expected = naive(start, SIZES["uneven"], optimizer, 0.5, weighted=True)
    assert_close(end, expected, 1e-6 if optimizer is SGD else 1e-5)


GROUPS = GroupClipping({"*.t[01].weight": 3.0, "*": 4.0})


@pytest.mark.parametrize(
    ("clipping", "factors"), [(AutomaticClipping(), automatic), (GROUPS, grouped)]
)
@pytest.mark.parametrize("name", ["mixed", "row_wise"])
def test_other_clipping_is_the_naive_step(
    two_ranks: Ranks, clipping: Any, factors: Any, name: str
) -> None:
    start, end = run(two_ranks, SIZES["uneven"], PLACEMENTS[name], SGD, plan(clipping=clipping))
    assert_close(end, naive(start, SIZES["uneven"], SGD, 0.5, factors=factors), 2e-6)


@pytest.mark.parametrize(
    "kind", ["row_wise", "table_wise", "column_wise", "table_row_wise", "grid"]
)
def test_four_ranks_on_two_hosts_are_the_naive_step(four_ranks: Ranks, kind: Any) -> None:
    """Two-level kinds interleave the hosts' examples on a shard: ranks 0, 2, 1, 3."""
    sizes = [[3, 0, 2, 1], [0, 0, 0, 5], [2, 2, 2, 2]]
    start, end = run(four_ranks, sizes, Placement(default=kind), SGD, plan(), hosts=2)
    assert_close(end, naive(start, sizes, SGD, 0.5), 1e-6)


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD, ROWWISE], ids=lambda o: o.kind)
@pytest.mark.parametrize("name", ["mixed", "row_wise"])
def test_infinite_clip_and_zero_noise_is_plain_training(
    two_ranks: Ranks, optimizer: Any, name: str
) -> None:
    sizes = [[5, 5]] * 3  # EXPECTED examples a step, so that both divide by the same number
    start, private = run(two_ranks, sizes, PLACEMENTS[name], optimizer, plan(math.inf))
    _, plain = run(two_ranks, sizes, PLACEMENTS[name], optimizer, None)
    tolerance = 1e-6 if optimizer is SGD else 1e-5
    assert_close(private, {key: plain[key] for key in start}, tolerance)


def count_steps(mechanism: Any, most: int | None) -> int:
    module = Recording()
    trainer = make_trainer(
        1, Placement(), ROWWISE, privacy=plan(mechanism=mechanism), max_physical_batch=most
    )
    trainer.fit(module, Batches(SIZES["even"], None))
    return kernel_steps(module)


@pytest.mark.parametrize("most", [None, 3])
@pytest.mark.parametrize(
    "mechanism", [EANA(), DPSGD(chunk_rows=16)], ids=lambda m: type(m).__name__
)
def test_the_kernels_count_one_step_a_step(
    one_rank: Ranks, mechanism: Any, most: int | None
) -> None:
    """Adam, on CUDA, corrects its bias by this count; any optimizer but SGD keeps it."""
    assert one_rank.run(count_steps, mechanism, most) == [len(SIZES["even"])]


def test_clipping_matters_here(one_rank: Ranks) -> None:
    """The tests above would pass without clipping if nothing were clipped."""
    start, end = run(one_rank, SIZES["even"], Placement(), SGD, plan())
    unclipped = naive(start, SIZES["even"], SGD, math.inf)
    with pytest.raises(AssertionError):
        assert_close(end, unclipped, 1e-4)


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD, ROWWISE], ids=lambda o: o.kind)
def test_dpsgd_without_noise_is_the_naive_step(one_rank: Ranks, optimizer: Any) -> None:
    """All rows are updated, in chunks smaller than the tables: untouched ones must not move."""
    everything = plan(mechanism=DPSGD(chunk_rows=16))
    start, end = run(one_rank, SIZES["uneven"], Placement(), optimizer, everything)
    expected = naive(start, SIZES["uneven"], optimizer, 0.5)
    assert_close(end, expected, 1e-6 if optimizer is SGD else 1e-5)

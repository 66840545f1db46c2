"""The private step equals a naive one: a loop over examples, float64, plain PyTorch."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_dpsparse import DPSGD, EANA, AdaFEST, Placement, PrivacyPlan, TablePlacement
from lightning_dpsparse.engine.clipping import AutomaticClipping, GroupClipping
from lightning_dpsparse.sharded.fused import kernel_steps
from tests.support.naive_step import (
    ADAGRAD,
    SIZES,
    Batches,
    automatic,
    grouped,
    naive,
    plan,
    run,
    tolerance_of,
)
from tests.support.plain_training import PLACEMENTS, ROWWISE, SGD, assert_close
from tests.support.ranks import Ranks
from tests.support.tiny_model import BAGS_OR_SEQUENCES, SEQUENCES, Recording, make_trainer, name_of


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD, ROWWISE], ids=lambda o: o.kind)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    ("mean", "sequences"),
    [(False, ()), (True, ()), (False, SEQUENCES)],
    ids=["sum", "mean", "sequences"],
)
def test_one_rank_is_the_naive_step(
    one_rank: Ranks, optimizer: Any, sizes: str, mean: bool, sequences: tuple[str, ...]
) -> None:
    settings: dict[str, Any] = {"mean": mean, "sequences": sequences}
    start, end = run(one_rank, SIZES[sizes], Placement(), optimizer, plan(), **settings)
    expected = naive(start, SIZES[sizes], optimizer, 0.5, mean=mean)
    assert_close(end, expected, tolerance_of(optimizer))


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD], ids=lambda o: o.kind)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", PLACEMENTS)
def test_two_ranks_are_the_naive_step(
    two_ranks: Ranks, optimizer: Any, sizes: str, name: str
) -> None:
    start, end = run(two_ranks, SIZES[sizes], PLACEMENTS[name], optimizer, plan())
    expected = naive(start, SIZES[sizes], optimizer, 0.5)
    assert_close(end, expected, tolerance_of(optimizer))


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
    assert_close(end, expected, tolerance_of(optimizer))


@pytest.mark.parametrize("mechanism", [EANA(), AdaFEST(threshold=0.1)], ids=["eana", "adafest"])
@BAGS_OR_SEQUENCES
def test_a_rank_without_tables_takes_part(
    two_ranks: Ranks, mechanism: Any, sequences: tuple[str, ...]
) -> None:
    """With a threshold that every row passes, AdaFEST is the same step."""
    first = TablePlacement(kind="table_wise", ranks=[0])
    placement = Placement(tables=dict.fromkeys(("t0", "t1", "t2", "t3"), first))
    private = plan(mechanism=mechanism)
    start, end = run(two_ranks, SIZES["uneven"], placement, SGD, private, sequences=sequences)
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
    assert_close(end, expected, tolerance_of(optimizer))


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
    ("kind", "optimizer", "sequences"),
    [
        ("table_row_wise", SGD, ()),
        ("grid", SGD, ()),
        *product(("row_wise", "table_wise", "column_wise"), [SGD], [()]),
        *product(("row_wise", "table_wise", "column_wise"), [SGD, ADAGRAD, ROWWISE], [SEQUENCES]),
    ],
    ids=name_of,
)
def test_four_ranks_on_two_hosts_are_the_naive_step(
    four_ranks: Ranks, kind: Any, optimizer: Any, sequences: tuple[str, ...]
) -> None:
    """Two-level kinds, of bags only, interleave the hosts' examples on a shard: ranks 0, 2, 1, 3.

    Sequences are eight columns wide, which makes two pieces.
    """
    sizes = [[3, 0, 2, 1], [0, 0, 0, 5], [2, 2, 2, 2]]
    placement, settings = Placement(default=kind), {"hosts": 2, "sequences": sequences}
    start, end = run(four_ranks, sizes, placement, optimizer, plan(), **settings)
    expected = naive(start, sizes, optimizer, 0.5, pieces=2 if kind == "column_wise" else 1)
    assert_close(end, expected, tolerance_of(optimizer))


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD, ROWWISE], ids=lambda o: o.kind)
@pytest.mark.parametrize("name", ["mixed", "row_wise"])
def test_infinite_clip_and_zero_noise_is_plain_training(
    two_ranks: Ranks, optimizer: Any, name: str
) -> None:
    sizes = [[5, 5]] * 3  # EXPECTED examples a step, so that both divide by the same number
    start, private = run(two_ranks, sizes, PLACEMENTS[name], optimizer, plan(math.inf))
    _, plain = run(two_ranks, sizes, PLACEMENTS[name], optimizer, None)
    assert_close(private, {key: plain[key] for key in start}, tolerance_of(optimizer))


def without_ids(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values()[:0],
        lengths=torch.zeros_like(features.lengths()),
        stride=features.stride(),
    )


def count_steps(privacy: Any, most: int | None, sequences: tuple[str, ...]) -> int:
    """Validation reads the tables after every step; in the second one no example has an id."""
    module, batches = Recording(sequences=sequences), Batches(SIZES["even"], None)
    batches.batches[1].sparse_features = without_ids(batches.batches[1].sparse_features)
    trainer = make_trainer(
        1, Placement(), ROWWISE, privacy=privacy, max_physical_batch=most, val_check_interval=1
    )
    trainer.fit(module, batches, Batches([[2]], None))
    return kernel_steps(module)


@pytest.mark.parametrize(
    ("privacy", "most"),
    [(None, None), *product([plan(), plan(mechanism=DPSGD(chunk_rows=16))], [None, 3])],
    ids=lambda p: type(p.mechanism).__name__ if isinstance(p, PrivacyPlan) else str(p),
)
@BAGS_OR_SEQUENCES
def test_the_kernels_count_one_step_a_step(
    one_rank: Ranks, privacy: Any, most: int | None, sequences: tuple[str, ...]
) -> None:
    """Adam, on CUDA, corrects its bias by this count, which row-wise Adagrad keeps too."""
    assert one_rank.run(count_steps, privacy, most, sequences) == [len(SIZES["even"])]


def test_clipping_matters_here(one_rank: Ranks) -> None:
    """The tests above would pass without clipping if nothing were clipped."""
    start, end = run(one_rank, SIZES["even"], Placement(), SGD, plan())
    unclipped = naive(start, SIZES["even"], SGD, math.inf)
    with pytest.raises(AssertionError):
        assert_close(end, unclipped, 1e-4)


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD, ROWWISE], ids=lambda o: o.kind)
@BAGS_OR_SEQUENCES
def test_dpsgd_without_noise_is_the_naive_step(
    one_rank: Ranks, optimizer: Any, sequences: tuple[str, ...]
) -> None:
    """All rows are updated, in chunks smaller than the tables: untouched ones must not move."""
    everything, sizes = plan(mechanism=DPSGD(chunk_rows=16)), SIZES["uneven"]
    start, end = run(one_rank, sizes, Placement(), optimizer, everything, sequences=sequences)
    expected = naive(start, SIZES["uneven"], optimizer, 0.5)
    assert_close(end, expected, tolerance_of(optimizer))

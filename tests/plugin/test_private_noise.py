"""Noise has its variance everywhere, is never shared, and enters with the gradient as one."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch

from lightning_dpsparse import DPSGD, EANA, Placement, PrivacyPlan
from tests.support.naive_step import (
    ADAGRAD,
    EXPECTED,
    SIZES,
    naive,
    plan,
    run,
    tolerance_of,
)
from tests.support.plain_training import PLACEMENTS, ROWWISE, SGD, assert_close
from tests.support.ranks import Ranks
from tests.support.recorded_noise import assert_variance, record_noise
from tests.support.tiny_model import (
    BAGS_OR_SEQUENCES,
    SEQUENCES,
    TABLES,
    Bags,
    assemble,
    collate,
    name_of,
    paths,
)


def test_a_batch_cut_into_parts_gets_its_noise_once(two_ranks: Ranks) -> None:
    noisy = plan(noise=1.0, mechanism=DPSGD(chunk_rows=16))
    start, whole = run(two_ranks, SIZES["even"], PLACEMENTS["mixed"], SGD, noisy)
    _, parts = run(two_ranks, SIZES["even"], PLACEMENTS["mixed"], SGD, noisy, most=3)
    assert_close(parts, {key: whole[key] for key in start}, 1e-6)


@pytest.mark.parametrize("name", ["table_wise", "row_wise", "column_wise"])
@pytest.mark.parametrize("source", ["fast", "secure"])
@BAGS_OR_SEQUENCES
def test_noise_has_its_variance_on_every_table_shard_and_layer(
    two_ranks: Ranks, name: str, source: Any, sequences: tuple[str, ...]
) -> None:
    """Steps without an example: what moves is noise alone, on rows that nobody ever read."""
    steps = 40
    noisy = plan(2.0, noise=1.5, mechanism=DPSGD(chunk_rows=16), noise_source=source)
    results = two_ranks.run(record_noise, 2, PLACEMENTS[name], noisy, steps, sequences)
    stddev = 1.5 * 2.0 / EXPECTED
    whole = [assemble([rank[s] for rank in results]) for s in range(steps + 1)]
    for rank in results:
        for i, (key, *_) in enumerate(rank[0]["pieces"]):
            weights = torch.stack([snap["pieces"][i][3] for snap in rank]).double()
            assert_variance(weights.diff(dim=0), stddev, key)
    for key in whole[0]:
        draws = torch.stack([snap[key].double() for snap in whole]).diff(dim=0)
        assert_variance(draws, stddev, key)
        flat = draws.flatten(1)
        lag = (flat[1:] * flat[:-1]).mean() / stddev**2
        assert abs(lag) < 5 / math.sqrt(flat[1:].numel()), f"{key}: steps share noise"
    same_width = [whole[1][k] - whole[0][k] for k in whole[0] if whole[0][k].shape[-1:] == (8,)]
    rows = torch.cat([t for t in same_width if t.dim() == 2])
    assert len(rows.unique(dim=0)) == len(rows)  # no two rows of any table or shard drew alike


@BAGS_OR_SEQUENCES
def test_noise_has_its_variance_on_rows_that_were_read_and_on_others(
    two_ranks: Ranks, sequences: tuple[str, ...]
) -> None:
    """In the same steps: repeated ids, and rows of two features, have one draw like all others."""
    readers, steps = [2, 1], 40
    noisy = plan(2.0, noise=1.5, mechanism=DPSGD(chunk_rows=16))
    settings = (PLACEMENTS["row_wise"], noisy, steps, sequences, readers)
    results = two_ranks.run(record_noise, 2, *settings)
    whole = [assemble([rank[s] for rank in results]) for s in range(steps + 1)]
    bags = collate([Bags(100)[i] for i in range(sum(readers))]).sparse_features.to_dict()
    for name, rows, _, features in TABLES:
        key, read_R = paths(sequences)[name], torch.zeros(rows, dtype=torch.bool)
        for feature in features:
            read_R[bags[feature].values()] = True
        draws_SRD = torch.stack([snap[key].double() for snap in whole]).diff(dim=0)
        for of_rows, rows_R in (("read", read_R), ("never read", ~read_R)):
            assert_variance(draws_SRD[:, rows_R], 1.5 * 2.0 / EXPECTED, f"{key}, {of_rows}")


def test_two_runs_never_share_noise(one_rank: Ranks) -> None:
    """Without a fixed key, the same seed and the same data still give fresh noise."""
    fresh = PrivacyPlan(
        mechanism=DPSGD(),
        noise_multiplier=1.0,
        expected_batch_size=EXPECTED,
        sampling="unamplified",
        delta=1e-6,
    )
    one, two = (
        assemble([run[1]])
        for run in (one_rank.run(record_noise, 1, Placement(), fresh, 1)[0] for _ in range(2))
    )
    for key in one:
        assert (one[key] != two[key]).float().mean() > 0.99


def test_eana_moves_only_rows_that_were_read(one_rank: Ranks) -> None:
    noisy = plan(noise=1.0)
    start, end = run(one_rank, [[3, 0]], Placement(), SGD, noisy)
    read = collate([Bags(100)[i] for i in range(3)]).sparse_features["f2"].values().unique()
    key = "ebc.embedding_bags.t1.weight"
    moved = (start[key] != end[key]).any(1).nonzero().squeeze(1)
    assert torch.equal(moved, read)


@pytest.mark.parametrize(
    ("optimizer", "sequences"),
    [(SGD, ()), *product([ADAGRAD, ROWWISE], [(), SEQUENCES])],
    ids=name_of,
)
@pytest.mark.parametrize(
    "mechanism", [EANA(), DPSGD(chunk_rows=16)], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize("name", ["table_wise", "row_wise"])
def test_the_optimizer_sees_sum_and_noise_as_one_gradient(
    two_ranks: Ranks, optimizer: Any, mechanism: Any, name: str, sequences: tuple[str, ...]
) -> None:
    """Adagrad's state would tell two calls from one, and noise that came too late."""
    noisy = plan(noise=1.0, mechanism=mechanism, noise_source="row_keyed")
    placement, sizes = PLACEMENTS[name], SIZES["uneven"]
    start, end = run(two_ranks, sizes, placement, optimizer, noisy, sequences=sequences)
    expected = naive(start, sizes, optimizer, 0.5, noisy=noisy)
    assert_close(end, expected, tolerance_of(optimizer))


@pytest.mark.parametrize(
    ("name", "sequences"),
    [
        *((name, ()) for name in ("table_wise", "row_wise", "column_wise", "mixed")),
        ("column_wise", SEQUENCES),
    ],
    ids=name_of,
)
@pytest.mark.parametrize(
    "mechanism", [EANA(), DPSGD(chunk_rows=16)], ids=lambda m: type(m).__name__
)
def test_row_keyed_noise_is_the_same_on_one_rank_and_two(
    one_rank: Ranks, two_ranks: Ranks, name: str, mechanism: Any, sequences: tuple[str, ...]
) -> None:
    """Noise is drawn once for each row by its owner, and once for the job in dense layers."""
    noisy = plan(noise=1.0, mechanism=mechanism, noise_source="row_keyed")
    settings: dict[str, Any] = {"sequences": sequences}
    start, one = run(one_rank, SIZES["uneven"], Placement(), SGD, noisy, **settings)
    _, two = run(two_ranks, SIZES["uneven"], PLACEMENTS[name], SGD, noisy, **settings)
    assert_close(two, {key: one[key] for key in start}, 1e-6)
    quiet = naive(start, SIZES["uneven"], SGD, 0.5)
    assert all((one[key] - quiet[key]).abs().max() > 1e-3 for key in quiet)

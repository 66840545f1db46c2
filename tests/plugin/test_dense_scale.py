"""Dense layers in a unit of their own: they count less in the norm, and get noise to match."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_dpsparse import DPSGD, EANA, AdaFEST, LazyDP, Placement
from lightning_dpsparse.engine.clipping import AutomaticClipping, GroupClipping
from tests.support.dense_forms import DENSE, naive_forms
from tests.support.naive_step import (
    ADAGRAD,
    EXPECTED,
    SIZES,
    Batches,
    grouped,
    naive,
    plan,
    run,
    scaled,
    tolerance_of,
)
from tests.support.plain_training import PLACEMENTS, SGD, assert_close
from tests.support.ranks import Ranks
from tests.support.recorded_noise import assert_variance, record_noise
from tests.support.tiny_model import Recording, assemble, make_trainer


@pytest.mark.parametrize("most", [None, 3], ids=["whole", "parts"])
@pytest.mark.parametrize("name", ["mixed", "row_wise"])
@pytest.mark.parametrize("scale", [3.0, 0.25])
def test_the_step_is_the_naive_step(two_ranks: Ranks, scale: float, name: str, most: Any) -> None:
    sizes, private = SIZES["uneven"], plan(dense_scale=scale)
    start, end = run(two_ranks, sizes, PLACEMENTS[name], SGD, private, most=most)
    assert_close(end, naive(start, sizes, SGD, 0.5, factors=scaled(scale)), 1e-6)


def test_a_scale_matters_here(one_rank: Ranks) -> None:
    """The test above would pass without a scale if the norms of dense layers were small."""
    start, end = run(one_rank, SIZES["even"], Placement(), SGD, plan(dense_scale=3.0))
    with pytest.raises(AssertionError):
        assert_close(end, naive(start, SIZES["even"], SGD, 0.5), 1e-4)


def test_a_scale_that_nothing_is_clipped_by_changes_nothing(one_rank: Ranks) -> None:
    private = plan(1e3, dense_scale=4.0)
    start, end = run(one_rank, SIZES["even"], Placement(), SGD, private)
    assert_close(end, naive(start, SIZES["even"], SGD, 1e3), 1e-6)


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD], ids=lambda o: o.kind)
@pytest.mark.parametrize("mechanism", [EANA(), DPSGD(chunk_rows=16)], ids=["eana", "dpsgd"])
def test_the_optimizer_sees_sum_and_noise_in_their_own_unit(
    two_ranks: Ranks, mechanism: Any, optimizer: Any
) -> None:
    noisy = plan(noise=1.0, mechanism=mechanism, noise_source="row_keyed", dense_scale=3.0)
    sizes = SIZES["uneven"]
    start, end = run(two_ranks, sizes, PLACEMENTS["mixed"], optimizer, noisy)
    expected = naive(start, sizes, optimizer, 0.5, noisy=noisy, factors=scaled(3.0))
    assert_close(end, expected, tolerance_of(optimizer))


def test_noise_on_dense_layers_is_larger_by_the_scale_and_on_tables_it_is_not(
    two_ranks: Ranks,
) -> None:
    """Steps without an example: what moves is noise alone."""
    noisy = plan(2.0, noise=1.5, mechanism=DPSGD(chunk_rows=16), dense_scale=3.0)
    results = two_ranks.run(record_noise, 2, PLACEMENTS["mixed"], noisy, 40)
    whole = [assemble([rank[s] for rank in results]) for s in range(41)]
    for key in whole[0]:
        draws = torch.stack([snap[key].double() for snap in whole]).diff(dim=0)
        is_table = "embedding_bags" in key
        assert_variance(draws, 1.5 * 2.0 / EXPECTED * (1.0 if is_table else 3.0), key)


def test_with_automatic_clipping_every_example_has_the_whole_norm(one_rank: Ranks) -> None:
    def automatic(names: list[str], each: Any, clip_norm: float) -> list[float]:
        shares = [1.0 if name.startswith("bags.") else 3.0 for name in names]
        norm = sum(float((g / s).square().sum()) for g, s in zip(each, shares)) ** 0.5
        return [clip_norm / (norm + 0.01)] * len(names)

    private = plan(clipping=AutomaticClipping(), dense_scale=3.0)
    start, end = run(one_rank, SIZES["uneven"], Placement(), SGD, private)
    assert_close(end, naive(start, SIZES["uneven"], SGD, 0.5, factors=automatic), 2e-6)


def facts_of_a_run() -> dict[str, Any]:
    private = plan(noise=1.0, dense_scale=3.0)
    trainer = make_trainer(1, Placement(), SGD, privacy=private)
    trainer.fit(Recording(), Batches([[4]], None))
    facts: dict[str, Any] = trainer.strategy.private_run.facts()["ran"]  # type: ignore[attr-defined]
    return facts


def test_the_report_shows_it(one_rank: Ranks) -> None:
    (ran,) = one_rank.run(facts_of_a_run)
    assert (ran["clip_norm"], ran["noise_stddev"], ran["dense_scale"]) == (0.5, 0.5, 3.0)


@pytest.mark.parametrize("most", [None, 2])
@pytest.mark.parametrize("name", DENSE)
def test_released_forms_are_scaled_and_not_the_gradients_behind_them(
    two_ranks: Ranks, name: str, most: int | None
) -> None:
    sizes, private = SIZES["uneven"], plan(dense=DENSE[name], dense_scale=3.0)
    start, end = run(two_ranks, sizes, PLACEMENTS["mixed"], SGD, private, most=most)
    forms = naive_forms(DENSE[name])
    expected = naive(start, sizes, SGD, 0.5, dense_forms=forms, factors=scaled(3.0))
    assert_close(end, expected, 1e-5)


def test_groups_keep_their_bounds_in_the_scaled_unit(one_rank: Ranks) -> None:
    """t0 and t1 against all else, of which the dense layers are divided."""

    def in_groups(names: list[str], each: Any, clip_norm: float) -> list[float]:
        scales = [1.0 if name.startswith("bags.") else 3.0 for name in names]
        return grouped(names, [g / s for g, s in zip(each, scales)], clip_norm)

    clipping = GroupClipping({"*.t[01].weight": 3.0, "*": 4.0})
    private = plan(clipping=clipping, dense_scale=3.0)
    start, end = run(one_rank, SIZES["uneven"], Placement(), SGD, private)
    assert_close(end, naive(start, SIZES["uneven"], SGD, 0.5, factors=in_groups), 2e-6)


@pytest.mark.parametrize("mechanism", [LazyDP(), AdaFEST(threshold=-1e6)], ids=["lazy", "adafest"])
def test_other_mechanisms_measure_in_it_too(one_rank: Ranks, mechanism: Any) -> None:
    """Without noise; rows all pass the threshold."""
    private = plan(mechanism=mechanism, dense_scale=3.0)
    start, end = run(one_rank, SIZES["uneven"], Placement(), SGD, private)
    assert_close(end, naive(start, SIZES["uneven"], SGD, 0.5, factors=scaled(3.0)), 1e-6)

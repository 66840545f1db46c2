"""Sequences (`EmbeddingCollection`) pass the suite of the bags: every step is the naive one.

Here in placements of their own, beside bags, in checkpoints, and what they have refused. Tests of
the mechanisms take both kinds of tables where they stand.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed import embedding
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_modules import EmbeddingCollection

from lightning_dpsparse import (
    DPSGD,
    FEST,
    Placement,
    TablePlacement,
)
from lightning_dpsparse.engine.clipping import GroupClipping
from lightning_dpsparse.sharded.checkpoint import consolidate
from lightning_dpsparse.sharded.shards import tables_on_meta
from tests.support import adafest_runs as adafest
from tests.support import checkpoint_runs as checkpoints
from tests.support import lazydp_runs as lazydp
from tests.support import payment_runs as payment
from tests.support.naive_step import ADAGRAD, SIZES, grouped, naive, plan, run, tolerance_of
from tests.support.plain_training import ROWWISE, SGD, assert_close, reference
from tests.support.plain_training import train as train_in_the_open
from tests.support.ranks import Ranks
from tests.support.refused_runs import refused
from tests.support.row_choice import naive_selecting
from tests.support.tiny_model import (
    SEQUENCES,
    Bags,
    Recording,
    SmallModule,
    assemble,
    collate,
    make_trainer,
    name_of,
    sequence_tables,
)
from tests.support.users import UNITS, naive_users, run_users

PLACEMENTS = {
    "table_wise": Placement(default="table_wise"),
    "row_wise": Placement(default="row_wise"),
    "column_wise": Placement(default="column_wise"),
    "mixed": Placement(
        tables={
            "t0": TablePlacement(kind="table_wise", ranks=[1]),
            "t1": "row_wise",
            "t2": TablePlacement(kind="column_wise", ranks=[1, 0]),
            "t3": TablePlacement(kind="column_wise", ranks=[1, 1]),
        }
    ),
    "on one rank": Placement(
        tables=dict.fromkeys(SEQUENCES, TablePlacement(kind="table_wise", ranks=[0]))
    ),
}
BOTH = ("t1", "t3")
"""The other two tables stay bags, and f0 is read by one of each."""


# ---- one step, and what it is without privacy ----------------------------------------------------


@pytest.mark.parametrize(
    ("name", "optimizer", "sizes"),
    [
        *((name, SGD, "uneven") for name in PLACEMENTS),
        ("column_wise", SGD, "even"),
        ("table_wise", ADAGRAD, "empty"),
        ("row_wise", ADAGRAD, "uneven"),
        ("column_wise", ADAGRAD, "empty"),
        ("mixed", ADAGRAD, "even"),
        ("row_wise", ROWWISE, "empty"),
        ("table_wise", ROWWISE, "uneven"),
    ],
    ids=name_of,
)
def test_two_ranks_are_the_naive_step(
    two_ranks: Ranks, name: str, optimizer: Any, sizes: str
) -> None:
    start, end = run(
        two_ranks, SIZES[sizes], PLACEMENTS[name], optimizer, plan(), sequences=SEQUENCES
    )
    expected = naive(start, SIZES[sizes], optimizer, 0.5)
    assert_close(end, expected, tolerance_of(optimizer))
    if sizes == "uneven":
        unclipped = naive(start, SIZES[sizes], optimizer, math.inf)
        with pytest.raises(AssertionError):  # else the test would show nothing of clipping
            assert_close(end, unclipped, 1e-4)


@pytest.mark.parametrize(("name", "weighted"), [("table_wise", False), ("row_wise", True)])
def test_bags_and_sequences_of_one_model_are_clipped_as_one(
    two_ranks: Ranks, name: str, weighted: bool
) -> None:
    """Weights are for the bags: sequences come as they are."""
    settings: dict[str, Any] = {"sequences": BOTH, "weighted": weighted}
    sizes = SIZES["uneven"]
    start, end = run(two_ranks, sizes, PLACEMENTS[name], ADAGRAD, plan(), **settings)
    assert {key.split(".")[0] for key in start} == {"ebc", "ec", "head"}
    assert_close(end, naive(start, sizes, ADAGRAD, 0.5, weighted=weighted), 1e-5)


def test_a_batch_cut_into_parts_is_the_naive_step(two_ranks: Ranks) -> None:
    sizes = SIZES["uneven"]
    start, end = run(
        two_ranks, sizes, PLACEMENTS["mixed"], SGD, plan(), most=2, sequences=SEQUENCES
    )
    assert_close(end, naive(start, sizes, SGD, 0.5), 1e-6)


@pytest.mark.parametrize("name", ["table_wise", "row_wise"])
def test_an_example_that_overflows_counts_nothing(two_ranks: Ranks, name: str) -> None:
    sizes = SIZES["even"]
    start, end = run(
        two_ranks, sizes, PLACEMENTS[name], SGD, plan(), poisoned=True, sequences=SEQUENCES
    )
    assert_close(end, naive(start, sizes, SGD, 0.5, poisoned=True), 1e-6)


def test_tables_clipped_in_groups_are_the_naive_step(two_ranks: Ranks) -> None:
    groups = plan(clipping=GroupClipping({"*.t[01].weight": 3.0, "*": 4.0}))
    start, end = run(
        two_ranks, SIZES["uneven"], PLACEMENTS["mixed"], SGD, groups, sequences=SEQUENCES
    )
    assert_close(end, naive(start, SIZES["uneven"], SGD, 0.5, factors=grouped), 2e-6)


@pytest.mark.parametrize("name", ["row_wise", "mixed"])
def test_users_are_clipped_as_one(two_ranks: Ranks, name: str) -> None:
    start, end = run_users(
        two_ranks, UNITS["uneven"], PLACEMENTS[name], plan(), sequences=SEQUENCES
    )
    assert_close(end, naive_users(start, UNITS["uneven"]), 1e-6)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("row_wise", ADAGRAD), ("mixed", SGD), ("table_wise", ROWWISE)],
    ids=name_of,
)
def test_infinite_clip_and_zero_noise_is_plain_training(
    two_ranks: Ranks, name: str, optimizer: Any
) -> None:
    sizes = [[5, 5]] * 3  # EXPECTED examples a step, so that both divide by the same number
    placement = PLACEMENTS[name]
    start, private = run(
        two_ranks, sizes, placement, optimizer, plan(math.inf), sequences=SEQUENCES
    )
    _, plain = run(two_ranks, sizes, placement, optimizer, None, sequences=SEQUENCES)
    assert_close(private, {key: plain[key] for key in start}, tolerance_of(optimizer))


@pytest.mark.parametrize("name", ["table_wise", "row_wise", "column_wise"])
def test_without_privacy_it_is_plain_pytorch(two_ranks: Ranks, name: str) -> None:
    start, end, losses = train_in_the_open(two_ranks, PLACEMENTS[name], SGD, sequences=SEQUENCES)
    expected, expected_losses = reference(start, SGD)
    assert_close(end, expected, 1e-6)
    assert losses == pytest.approx(expected_losses, abs=1e-5)


# ---- mechanisms ----------------------------------------------------------------------------------


def test_dpsgd_with_noise_is_the_naive_step(two_ranks: Ranks) -> None:
    noisy = plan(noise=1.0, mechanism=DPSGD(chunk_rows=16), noise_source="row_keyed")
    sizes = SIZES["uneven"]
    start, end = run(two_ranks, sizes, PLACEMENTS["mixed"], ADAGRAD, noisy, sequences=SEQUENCES)
    assert_close(end, naive(start, sizes, ADAGRAD, 0.5, noisy=noisy), 1e-5)


def test_lazydp_is_eager_dp_sgd(one_rank: Ranks, two_ranks: Ranks) -> None:
    """What validation read had paid, and so had an export in the middle."""
    settings: dict[str, Any] = {"steps": 20, "sequences": SEQUENCES, "export_at": (17,)}
    [expected] = one_rank.run(lazydp.train, 1, Placement(), SGD, lazydp.EAGER, **settings)
    [found] = one_rank.run(lazydp.train, 1, Placement(), SGD, lazydp.LAZY, **settings)
    assert_close(assemble(found["states"]), assemble(expected["states"]), 1e-6)
    everywhere = [[found]]
    for name in ("row_wise", "column_wise"):
        placement = PLACEMENTS[name]
        everywhere.append(two_ranks.run(lazydp.train, 2, placement, SGD, lazydp.LAZY, **settings))
    for results in everywhere:
        assert_close(lazydp.whole(results), lazydp.whole([expected]), 1e-6)
        # Every rank validates its share of eight examples.
        seen = torch.cat([result["seen"].view(-1, 8 // len(results)) for result in results], dim=1)
        assert (seen.flatten() - expected["seen"]).abs().max() <= 1e-6


def test_lazydp_with_decay_is_eager_dp_sgd(one_rank: Ranks) -> None:
    """Rows that decay pay before they are read; here in a model that has bags too."""
    eager, lazy = (
        one_rank.run(
            lazydp.train, 1, Placement(), lazydp.DECAYING, mechanism, steps=20, sequences=BOTH
        )
        for mechanism in (lazydp.EAGER, lazydp.LAZY)
    )
    assert_close(lazydp.whole(lazy), lazydp.whole(eager), 1e-6)


def test_adafest_with_noise_is_the_naive_step(two_ranks: Ranks) -> None:
    """Tables cut in every way, one of them in two pieces on the same rank."""
    sizes, noisy = SIZES["uneven"], adafest.NOISY
    start, end = run(two_ranks, sizes, PLACEMENTS["mixed"], SGD, noisy, sequences=SEQUENCES)
    expected = naive_selecting(start, adafest.singles(sizes), SGD, noisy)
    assert expected.only_kept > 20
    adafest.check(start, end, expected, 1e-6)


def test_fest_is_the_naive_step_on_selected_rows(two_ranks: Ranks, tmp_path: Path) -> None:
    selection, selected = adafest.public(tmp_path)
    quiet = plan(0.3, mechanism=FEST(selection=selection))
    sizes = SIZES["uneven"]
    start, end = run(two_ranks, sizes, PLACEMENTS["mixed"], SGD, quiet, sequences=SEQUENCES)
    expected = naive_selecting(start, adafest.singles(sizes), SGD, quiet, selected=selected)
    expected.read_and_left += 1  # rows that were not selected are not counted there
    adafest.check(start, end, expected, 1e-6)


# ---- checkpoints ---------------------------------------------------------------------------------


def test_checkpoints_survive_another_world_size_and_load_into_a_plain_model(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    path, fit, whole = tmp_path / "ckpt", checkpoints.fit, checkpoints.whole
    settings = {"sequences": SEQUENCES}
    saved = two_ranks.run(fit, 2, checkpoints.ROWS, ADAGRAD, 3, save=path, **settings)
    resumed = one_rank.run(fit, 1, checkpoints.TABLES, ADAGRAD, 4, resume=path, **settings)
    checkpoints.assert_equal(whole(resumed, "loaded"), whole(saved))
    assert any(":" in key for key in whole(saved))  # optimizer state is among what was compared
    checkpoint = consolidate(path)
    torch.save(checkpoint, tmp_path / "whole.ckpt")
    plain = SmallModule(sequences=SEQUENCES)
    plain.configure_model()
    plain.load_state_dict(checkpoint["state_dict"])
    [found] = one_rank.run(checkpoints.predict, 1, tmp_path / "whole.ckpt", SEQUENCES)
    with torch.no_grad():
        expected = plain(collate(Bags(checkpoints.SIZE).examples))
    assert torch.allclose(torch.cat(found), expected, atol=1e-6)


def test_a_lazydp_checkpoint_on_disk_is_fully_paid(two_ranks: Ranks, tmp_path: Path) -> None:
    for kind, mechanism in (("eager", lazydp.EAGER), ("lazy", lazydp.LAZY)):
        two_ranks.run(
            payment.fit_and_save,
            2,
            PLACEMENTS["row_wise"],
            mechanism,
            tmp_path / kind,
            module=payment.Breaking(sequences=SEQUENCES),
        )
    eager, lazy = (
        consolidate(tmp_path / kind / "step=5.ckpt")["state_dict"] for kind in ("eager", "lazy")
    )
    assert sum(key.startswith("ec.embeddings.") for key in eager) == 4
    assert_close(lazy, eager, 1e-6)


def keep_values(world_size: int) -> tuple[Any, Any]:
    """A module whose tables were built and filled before training."""
    torch.manual_seed(0)
    module = Recording(sequences=SEQUENCES)
    module.configure_model()
    values = {key: value.clone() for key, value in module.state_dict().items()}
    trainer = make_trainer(world_size, PLACEMENTS["row_wise"], SGD, privacy=plan(), max_steps=1)
    trainer.fit(module, checkpoints.loader(8, 8, world_size))
    return values, module.start


def test_tables_that_hold_values_keep_them(two_ranks: Ranks) -> None:
    results = two_ranks.run(keep_values, 2)
    checkpoints.assert_equal(assemble([start for _, start in results]), results[0][0])


def test_sequences_take_no_memory_before_they_are_sharded() -> None:
    with tables_on_meta():
        collection = EmbeddingCollection(tables=sequence_tables(SEQUENCES), need_indices=True)
    assert all(weight.is_meta for weight in collection.parameters())
    assert collection.need_indices()
    plain = EmbeddingCollection(tables=sequence_tables(SEQUENCES))
    assert not any(weight.is_meta for weight in plain.parameters())


# ---- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["table_row_wise", "table_column_wise", "grid"])
def test_placements_that_only_bags_have_are_refused(two_ranks: Ranks, kind: Any) -> None:
    message = f"'t2' of an EmbeddingCollection .* found '{kind}', which TorchRec has for bags only"
    refused(two_ranks, message, SmallModule(sequences=SEQUENCES), Placement(tables={"t2": kind}))


def test_column_pieces_of_sequences_must_have_one_width(two_ranks: Ranks) -> None:
    tables: Any = {
        "t0": TablePlacement(kind="column_wise", shards=2),
        "t1": TablePlacement(kind="column_wise", shards=1),
    }
    message = r"pieces of one width, found \{'t0': 4, 't1': 8\}. Give them the same number"
    refused(two_ranks, message, SmallModule(sequences=SEQUENCES), Placement(tables=tables))


class Sharded(SmallModule):
    """TorchRec's own twin of its tables."""

    def configure_model(self) -> None:
        super().configure_model()
        sharder = EmbeddingCollectionSharder(fused_params={"learning_rate": 0.1})
        self.ec = DistributedModelParallel(nn.Sequential(self.ec), sharders=[sharder]).module[0]


def test_tables_must_not_be_sharded_before(one_rank: Ranks) -> None:
    refused(one_rank, "found 'ec' sharded before", Sharded(sequences=SEQUENCES))


def fit_without_repeats() -> None:
    embedding.EC_INDEX_DEDUP = True
    try:
        make_trainer(1, max_steps=1).fit(SmallModule(sequences=BOTH), checkpoints.loader(8, 8, 1))
    finally:
        embedding.EC_INDEX_DEDUP = False


def test_index_deduplication_is_refused(one_rank: Ranks) -> None:
    with pytest.raises(ValueError, match=r"at 'ec' .* set_ec_index_dedup\(False\)"):
        one_rank.run(fit_without_repeats)

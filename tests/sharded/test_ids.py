"""Ids that do not fit their table give one clear error, and never an example's value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_dpsparse import Placement
from lightning_dpsparse.sharded.ids import IdCheck
from tests.support.ranks import Ranks
from tests.support.tiny_model import SEQUENCES, Bags, SmallModule, collate, make_trainer

TABLES = [
    EmbeddingBagConfig(name="a", num_embeddings=10, embedding_dim=4, feature_names=["x", "y"]),
    EmbeddingBagConfig(name="b", num_embeddings=5, embedding_dim=4, feature_names=["y"]),
]


def check(values: list[int], lengths: list[int], keys: list[str] | None = None) -> None:
    features = KeyedJaggedTensor(
        keys=keys or ["x", "y"],
        values=torch.tensor(values, dtype=torch.int64),
        lengths=torch.tensor(lengths),
    )
    IdCheck(TABLES)(torch.nn.Identity(), (features,))


def test_ids_within_every_table_pass() -> None:
    check([0, 9, 4, 0], [1, 1, 2, 0])
    check([], [0, 0])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([10, 0, 0, 0], r"'x' \(0 to 9\)\. "),
        ([0, -1, 0, 0], r"'x' \(0 to 9\)\. "),
        ([0, 9, 5, 0], r"'y' \(0 to 4\)\. "),  # fits table a, not table b
        ([99, 9, 0, 99], r"'x' \(0 to 9\), 'y' \(0 to 4\)\. "),
    ],
)
def test_the_feature_and_its_range_are_named(values: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        check(values, [1, 1, 1, 1])
    assert "99" not in str(error.value)  # never the id itself


def test_a_missing_feature_is_named() -> None:
    with pytest.raises(ValueError, match=r"found none for \['y'\]"):
        check([0], [1], keys=["x"])


def test_a_feature_that_no_table_reads_may_hold_anything() -> None:
    check([0, 0, 10**12], [1, 1, 1], keys=["x", "y", "z"])


def test_variable_batches_are_refused() -> None:
    features = KeyedJaggedTensor(
        keys=["x", "y"],
        values=torch.tensor([0, 0, 0]),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[2], [1]],
    )
    with pytest.raises(ValueError, match="found a KeyedJaggedTensor with a stride per key"):
        IdCheck(TABLES)(torch.nn.Identity(), (features,))


class Spoiled(Bags):
    def __getitem__(self, index: int) -> Any:
        counts, bags, label = super().__getitem__(index)
        return counts, bags | {"f2": torch.tensor([30])}, label


def fit_on_spoiled_ids(world_size: int, stage: str, sequences: tuple[str, ...] = ()) -> None:
    examples: DataLoader[Batch] = DataLoader(Spoiled(8), batch_size=4, collate_fn=collate)
    trainer = make_trainer(world_size, Placement(default="row_wise"))
    getattr(trainer, stage)(SmallModule(sequences=sequences), examples)


@pytest.mark.parametrize("stage", ["fit", "validate", "predict"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_out_of_range_ids_stop_every_stage(
    one_rank: Ranks, two_ranks: Ranks, stage: str, world_size: int
) -> None:
    ranks = {1: one_rank, 2: two_ranks}[world_size]
    with pytest.raises(ValueError, match=r"out of range for 'f2' \(0 to 29\)"):
        ranks.run(fit_on_spoiled_ids, world_size, stage)


def test_out_of_range_ids_of_sequences_stop_too(two_ranks: Ranks) -> None:
    with pytest.raises(ValueError, match=r"out of range for 'f2' \(0 to 29\)"):
        two_ranks.run(fit_on_spoiled_ids, 2, "fit", SEQUENCES)

"""No loader makes ranks wait for each other, and evaluation sees every example once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_dpsparse import Placement, PredictionWriter
from lightning_dpsparse.plugin.loaders import EvaluationBatches
from tests.support.ranks import Ranks
from tests.support.tiny_model import Bags, SmallModule, collate, loader, make_trainer, snapshot

ROWS = Placement(default="row_wise")


class Counting(SmallModule):
    """Counts the validation examples it is shown."""

    seen = 0
    batches = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch)
        self.seen += len(batch.labels)
        self.batches += 1


def validate(world_size: int, loader: DataLoader[Any], uneven: str) -> tuple[int, int]:
    module = Counting()
    make_trainer(world_size, ROWS, uneven_loaders=uneven).validate(module, loader, verbose=False)
    return module.seen, module.batches


@pytest.mark.parametrize("size", [16, 17, 19, 23, 2])
def test_two_ranks_validate_every_example_once(two_ranks: Ranks, size: int) -> None:
    results = two_ranks.run(validate, 2, loader(size, 8, 2), "raise")
    assert sum(seen for seen, _ in results) == size
    assert len({batches for _, batches in results}) == 1


def test_drop_last_is_honoured(two_ranks: Ranks) -> None:
    results = two_ranks.run(validate, 2, loader(19, 8, 2, drop_last=True), "raise")
    assert sum(seen for seen, _ in results) == 16


def test_fewer_examples_than_ranks_are_refused(two_ranks: Ranks) -> None:
    with pytest.raises(ValueError, match=r"for each of the 2 ranks, found 1\. Use fewer devices"):
        two_ranks.run(validate, 2, loader(1, 8, 2), "raise")


def validate_own_sampler(world_size: int, uneven: str) -> tuple[int, int]:
    """Loaders that differ: rank 0 has five batches, rank 1 has four."""
    rank = torch.distributed.get_rank()
    examples = Bags(20 - 4 * rank)
    sampler: DistributedSampler[Any] = DistributedSampler(
        examples, num_replicas=1, rank=0, shuffle=True
    )
    own = DataLoader(examples, batch_size=4, sampler=sampler, collate_fn=collate)
    return validate(world_size, own, uneven)


def test_loaders_of_unequal_length_are_refused_at_start(two_ranks: Ranks) -> None:
    with pytest.raises(ValueError, match=r"validate loader .* found \[5, 4\] batches"):
        two_ranks.run(validate_own_sampler, 2, "raise")


def test_loaders_of_unequal_length_are_truncated_on_request(two_ranks: Ranks) -> None:
    results = two_ranks.run(validate_own_sampler, 2, "truncate")
    assert [batches for _, batches in results] == [4, 4]


class Stream(IterableDataset[Any]):
    """No length; as many examples as the rank's number says."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[Any]:
        return iter(Bags(self.sizes[torch.distributed.get_rank()]).examples)


def validate_stream(uneven: str, sizes: list[int]) -> tuple[int, int]:
    return validate(2, DataLoader(Stream(sizes), batch_size=4, collate_fn=collate), uneven)


def test_streams_that_end_apart_raise_on_every_rank(two_ranks: Ranks) -> None:
    with pytest.raises(ValueError, match="some ranks at their end and others not"):
        two_ranks.run(validate_stream, "raise", [8, 12])


def test_streams_that_end_apart_are_truncated_on_request(two_ranks: Ranks) -> None:
    results = two_ranks.run(validate_stream, "truncate", [8, 12])
    assert [batches for _, batches in results] == [2, 2]


def test_streams_that_end_together_are_read_whole(two_ranks: Ranks) -> None:
    assert two_ranks.run(validate_stream, "raise", [8, 8]) == [(8, 2), (8, 2)]


def predict(world_size: int, output: Path) -> None:
    torch.manual_seed(0)
    trainer = make_trainer(world_size, callbacks=[PredictionWriter(str(output))])
    trainer.predict(SmallModule(), loader(19, 8, world_size), return_predictions=False)


def test_predictions_are_written_in_the_order_of_the_data(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    one_rank.run(predict, 1, tmp_path / "one.npy")
    two_ranks.run(predict, 2, tmp_path / "two.npy")
    one, two = np.load(tmp_path / "one.npy"), np.load(tmp_path / "two.npy")
    assert one.shape == (19,)
    np.testing.assert_allclose(two, one, atol=1e-6)
    assert len(np.unique(one)) == 19  # a shuffled order would not match
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.npy", "two.npy"]


def fit_validate_test_fit(world_size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    module = SmallModule()
    trainer = make_trainer(world_size, ROWS, max_steps=4, max_epochs=-1)
    trainer.fit(module, loader(16, 8, world_size), loader(10, 8, world_size))
    trainer.validate(module, loader(10, 8, world_size), verbose=False)
    before = snapshot(module)
    trainer.test(module, loader(10, 8, world_size), verbose=False)
    after = snapshot(module)
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(module, loader(16, 8, world_size))
    steps = len(module.losses)
    other = make_trainer(world_size, ROWS, max_steps=2)  # another trainer takes the module over
    other.fit(module, loader(16, 8, world_size))
    return {"before": before, "after": after, "steps": steps, "all": len(module.losses)}


@pytest.mark.parametrize("world_size", [1, 2])
def test_fit_validate_test_and_fit_again(
    one_rank: Ranks, two_ranks: Ranks, world_size: int
) -> None:
    ranks = {1: one_rank, 2: two_ranks}[world_size]
    for result in ranks.run(fit_validate_test_fit, world_size):
        assert (result["steps"], result["all"]) == (6, 8)
        for (*_, before, _), (*_, after, _) in zip(
            result["before"]["pieces"], result["after"]["pieces"]
        ):
            assert torch.equal(before, after)  # evaluation moves nothing


def test_the_ranks_shares_cover_every_example_once() -> None:
    for size in range(1, 40):
        for world in (1, 2, 3, 4):
            parts = [list(EvaluationBatches(size, 3, rank, world, False)) for rank in range(world)]
            assert len({len(part) for part in parts}) == 1
            assert sorted(i for part in parts for batch in part for i in batch) == list(range(size))
            if size >= world:
                assert all(1 <= len(batch) <= 3 for part in parts for batch in part)

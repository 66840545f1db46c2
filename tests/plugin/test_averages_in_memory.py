"""What the module holds after `fit`, and what another `fit` goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dpsparse import AverageWeights
from lightning_dpsparse.sharded.checkpoint import consolidate
from tests.support.averaging_runs import Loaded, Weights, after, assert_near, by_hand, whole
from tests.support.checkpoint_runs import ROWS, assert_equal
from tests.support.lazydp_runs import EAGER, LAZY
from tests.support.naive_step import Batches, plan
from tests.support.ranks import Ranks
from tests.support.tiny_model import make_trainer, snapshot

STEPS, SAVED = 12, 7


def fit_again(world: int, mechanism: Any, spoils: bool) -> dict[str, Any]:
    """Interrupted, and then on with the same trainer and module."""
    torch.manual_seed(0)
    module, weights = Loaded(), Weights()
    module.fails_at = SAVED
    rank = torch.distributed.get_rank() if world > 1 else None
    batches = Batches([[2, 2]] * STEPS, rank)
    trainer = make_trainer(
        world,
        ROWS,
        callbacks=[AverageWeights(half_life=4.0), weights],
        privacy=None if mechanism is None else plan(noise=1.0, mechanism=mechanism),
    )
    with pytest.raises(SystemExit):
        trainer.fit(module, batches)
    interrupted, raw = snapshot(module), weights.after[-1]
    if spoils:
        module.head.out.weight.data.add_(1.0)
    module.fails_at = None
    trainer.fit(module, batches)
    return {"interrupted": interrupted, "raw": raw, "loaded": module.loaded, "after": weights.after,
            "end": snapshot(module)}  # fmt: skip


@pytest.mark.parametrize(
    ("world", "mechanism"), [(1, None), (1, EAGER), (2, None)], ids=["plain", "DPSGD", "two ranks"]
)
def test_fit_again_goes_on_from_the_weights(
    one_rank: Ranks, two_ranks: Ranks, world: int, mechanism: Any
) -> None:
    """However the first ended, the module held the average."""
    results = {1: one_rank, 2: two_ranks}[world].run(fit_again, world, mechanism, False)
    weights = after(results)
    assert_near(whole(results, "interrupted"), by_hand(weights[:SAVED], half_life=4.0), 1e-6)
    assert_equal(whole(results, "loaded"), whole(results, "raw"))
    assert_near(whole(results), by_hand(weights, half_life=4.0), 1e-6)


def test_unless_somebody_has_written_to_the_module(one_rank: Ranks) -> None:
    [found] = one_rank.run(fit_again, 1, None, True)
    name = "head.out.weight"
    spoiled = found["interrupted"]["dense"][name] + 1.0
    assert torch.equal(found["loaded"]["dense"][name], spoiled)


def fit_once_more(folder: Path, mechanism: Any, way: str) -> dict[str, Any]:
    """All is done, and `fit` is called again; then it goes on for another epoch."""
    torch.manual_seed(0)
    module, weights = Loaded(), Weights()

    def trainer_of() -> Any:
        return make_trainer(
            1,
            callbacks=[weights, AverageWeights(half_life=3.0)],
            default_root_dir=str(folder),
            privacy=None if mechanism is None else plan(noise=1.0, mechanism=mechanism),
        )

    trainer, batches = trainer_of(), Batches([[2, 1]] * STEPS, None)
    trainer.fit(module, batches)
    first = snapshot(module)
    trainer.save_checkpoint(folder / "end")
    if way == "another trainer":
        trainer, module = trainer_of(), Loaded()
    path = None if way == "in memory" else folder / "end"
    trainer.fit(module, batches, ckpt_path=path)
    assert len(weights.after) == STEPS
    second, raw = snapshot(module), weights.after[-1]
    trainer.save_checkpoint(folder / "again")
    if way != "another trainer":  # which has not charged for these weights
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, batches)
    return {"first": first, "second": second, "raw": raw, "loaded": module.loaded,
            "after": weights.after, "end": snapshot(module)}  # fmt: skip


@pytest.mark.parametrize("way", ["in memory", "from a file", "another trainer"])
@pytest.mark.parametrize("mechanism", [None, EAGER, LAZY], ids=["plain", "DPSGD", "LazyDP"])
def test_a_fit_with_nothing_left_to_do_keeps_the_average(
    one_rank: Ranks, tmp_path: Path, mechanism: Any, way: str
) -> None:
    results = one_rank.run(fit_once_more, tmp_path, mechanism, way)
    assert_equal(whole(results, "second"), whole(results, "first"))
    assert_near(consolidate(tmp_path / "again")["state_dict"], whole(results, "first"), 0.0)
    if way == "another trainer" or mechanism is LAZY:  # callbacks see rows that have not paid
        return
    assert_equal(whole(results, "loaded"), whole(results, "raw"))
    assert_near(whole(results), by_hand(after(results), half_life=3.0), 1e-6)

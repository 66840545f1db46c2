"""Checkpoints: any number of ranks saves, any number resumes, nothing changes on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from lightning_dpsparse import FusedOptimizer, Placement
from lightning_dpsparse.cli import main
from lightning_dpsparse.sharded.checkpoint import consolidate
from tests.support.checkpoint_runs import (
    ADAGRAD,
    BATCH,
    ROWS,
    ROWWISE,
    SIZE,
    TABLES,
    assert_equal,
    fit,
    predict,
    whole,
)
from tests.support.ranks import Ranks
from tests.support.tiny_model import (
    Bags,
    SmallModule,
    collate,
    loader,
    make_trainer,
)

COLUMNS = Placement(tables={"t1": "column_wise"})


@pytest.mark.parametrize("optimizer", [ADAGRAD, ROWWISE], ids=lambda o: o.kind)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 2)])
def test_weights_and_optimizer_state_survive_another_world_size(
    one_rank: Ranks,
    two_ranks: Ranks,
    tmp_path: Path,
    before: int,
    after: int,
    optimizer: FusedOptimizer,
) -> None:
    ranks = {1: one_rank, 2: two_ranks}
    saved = ranks[before].run(fit, before, ROWS, optimizer, 3, save=tmp_path / "ckpt")
    resumed = ranks[after].run(fit, after, TABLES, optimizer, 4, resume=tmp_path / "ckpt")
    assert_equal(whole(resumed, "loaded"), whole(saved))
    assert any(":" in key for key in whole(saved))  # optimizer state is among what was compared
    for found, expected in zip(resumed[0]["loaded_momentum"], saved[0]["momentum"]):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("stop", "at_epoch_end"),
    [(3, False), (5, False), (5, True), (7, False)],
    ids=["in epoch 0", "at its last batch", "at its end", "in epoch 1"],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resumed_run_equals_an_uninterrupted_one(
    one_rank: Ranks,
    two_ranks: Ranks,
    tmp_path: Path,
    stop: int,
    at_epoch_end: bool,
    world_size: int,
) -> None:
    """Weights, optimizer state, learning-rate schedule and the order of the examples."""
    ranks = {1: one_rank, 2: two_ranks}[world_size]
    ranks.run(
        fit, world_size, ROWS, ROWWISE, stop, save=tmp_path / "ckpt", at_epoch_end=at_epoch_end
    )
    resumed = ranks.run(fit, world_size, ROWS, ROWWISE, 9, resume=tmp_path / "ckpt")
    straight = ranks.run(fit, world_size, ROWS, ROWWISE, 9)
    assert_equal(whole(resumed), whole(straight))


def test_resuming_on_another_world_size_continues_the_same_run(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    two_ranks.run(fit, 2, TABLES, ROWWISE, 3, save=tmp_path / "ckpt")
    resumed = whole(one_rank.run(fit, 1, TABLES, ROWWISE, 9, resume=tmp_path / "ckpt"))
    straight = whole(one_rank.run(fit, 1, TABLES, ROWWISE, 9))
    for key, value in straight.items():
        assert (resumed[key] - value).abs().max() <= 1e-5, key


def fit_with_callback(world_size: int, folder: Path, weights_only: bool) -> list[str]:
    torch.manual_seed(0)
    callback = ModelCheckpoint(
        folder, every_n_train_steps=2, save_top_k=1, save_weights_only=weights_only
    )
    trainer = make_trainer(
        world_size, ROWS, ROWWISE, max_steps=6, enable_checkpointing=True, callbacks=[callback]
    )
    trainer.fit(SmallModule(), loader(48, BATCH, world_size))
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("weights_only", [False, True])
def test_model_checkpoint_keeps_its_best_directory_and_removes_the_others(
    two_ranks: Ranks, tmp_path: Path, weights_only: bool
) -> None:
    assert two_ranks.run(fit_with_callback, 2, tmp_path, weights_only)[0] == ["epoch=0-step=6.ckpt"]
    names = consolidate(tmp_path / "epoch=0-step=6.ckpt")
    assert ("optimizer_states" not in names) == weights_only
    assert (names["fused_optimizer"] == {}) == weights_only


def test_a_consolidated_checkpoint_is_an_ordinary_collection(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    two_ranks.run(fit, 2, COLUMNS, ADAGRAD, 3, save=tmp_path / "ckpt")
    sharded = torch.cat(one_rank.run(predict, 1, tmp_path / "ckpt")[0])
    main(["consolidate", str(tmp_path / "ckpt"), str(tmp_path / "whole.ckpt")])
    state = torch.load(tmp_path / "whole.ckpt", weights_only=False)["state_dict"]
    plain = SmallModule()
    plain.configure_model()
    assert isinstance(plain.ebc, EmbeddingBagCollection)
    plain.load_state_dict(state)
    with torch.no_grad():
        batch = collate(Bags(SIZE).examples)
        assert torch.allclose(plain(batch), sharded, atol=1e-6)
    from_file = torch.cat(one_rank.run(predict, 1, tmp_path / "whole.ckpt")[0])
    assert torch.equal(from_file, sharded)


def test_lightnings_own_tool_consolidates_too(two_ranks: Ranks, tmp_path: Path) -> None:
    from lightning.fabric.utilities.load import _load_distributed_checkpoint

    two_ranks.run(fit, 2, ROWS, ADAGRAD, 3, save=tmp_path / "ckpt")
    ours = consolidate(tmp_path / "ckpt")["state_dict"]
    theirs = _load_distributed_checkpoint(tmp_path / "ckpt")["model"]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_rowwise_state_does_not_move_in_or_out_of_column_pieces(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    two_ranks.run(fit, 2, COLUMNS, ROWWISE, 3, save=tmp_path / "ckpt")
    with pytest.raises(ValueError, match="one state per column piece"):
        one_rank.run(fit, 1, TABLES, ROWWISE, 5, resume=tmp_path / "ckpt")


def test_another_fused_optimizer_cannot_resume(one_rank: Ranks, tmp_path: Path) -> None:
    one_rank.run(fit, 1, TABLES, FusedOptimizer(kind="sgd"), 3, save=tmp_path / "ckpt")
    with pytest.raises(ValueError, match="saved with another fused optimizer"):
        one_rank.run(fit, 1, TABLES, ROWWISE, 5, resume=tmp_path / "ckpt")


def test_a_directory_that_is_no_checkpoint_is_refused(one_rank: Ranks, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds meta\.pt, found no such directory"):
        one_rank.run(fit, 1, TABLES, ROWWISE, 5, resume=tmp_path / "nothing")


class Wider(SmallModule):
    def configure_model(self) -> None:
        if self.ebc is None:
            super().configure_model()
            self.extra = torch.nn.Linear(2, 2)


def predict_with_another_model(checkpoint: Path) -> None:
    make_trainer(1, TABLES, ROWWISE).predict(Wider(), loader(SIZE, BATCH, 1), ckpt_path=checkpoint)


def test_a_checkpoint_of_another_model_is_refused(one_rank: Ranks, tmp_path: Path) -> None:
    one_rank.run(fit, 1, TABLES, ROWWISE, 3, save=tmp_path / "ckpt")
    with pytest.raises(ValueError, match=r"\['extra.weight', 'extra.bias'\]"):
        one_rank.run(predict_with_another_model, tmp_path / "ckpt")

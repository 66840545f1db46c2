"""Disks that fail: the run ends in words, nothing that was whole is lost, and it goes on later."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.checkpoint_files import check_alone
from tests.faults.disks import DAMAGES, FAULTS, FILES, train_through
from tests.support.lossy_disk import LossyDisk, why_no_fuse
from tests.support.private_runs import NOISY, Watching, fit, ledger_of
from tests.support.ranks import Ranks
from tests.support.tiny_model import SmallModule, make_trainer

FORGETFUL = pytest.mark.skipif(bool(why_no_fuse()), reason=f"no lossy disk: {why_no_fuse()}")


@FORGETFUL
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "world_size", "seed"),
    [(fault, world, 1 + i % 2) for i, fault in enumerate(FAULTS) for world in (1, 2)],
)
def test_a_disk_that_fails_ends_the_run_in_words_and_it_goes_on_later(
    tmp_path: Path, fault: str, world_size: int, seed: int
) -> None:
    with LossyDisk() as disk:
        words = train_through(disk, tmp_path, fault, seed, world_size)
    assert "Refused: Expected to write" in words or "of free space for the checkpoint" in words


class Full(ModelCheckpoint):
    """Saves to a disk that has no room left after the first checkpoint."""

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        shutil.disk_usage = lambda path: SimpleNamespace(free=1_000)  # type: ignore[assignment]


def save_without_room(folder: Path) -> list[str]:
    keep, usage = Full(folder, filename="last", every_n_train_steps=2), shutil.disk_usage
    try:
        with pytest.raises(Refused, match=r"MB of free space .* found 0.0 MB"):
            fit(1, NOISY, folder, callbacks=[keep], enable_checkpointing=True)
    finally:
        shutil.disk_usage = usage
    check_alone(folder / "last.ckpt")
    return sorted(path.name for path in folder.iterdir())


def test_without_room_nothing_is_touched(one_rank: Ranks, tmp_path: Path) -> None:
    assert one_rank.run(save_without_room, tmp_path) == [["last.ckpt", "privacy"]]


# ---- files that rot ------------------------------------------------------------------------------


class Snapped(Watching):
    """Knows where it began."""

    began_at: int | None = None

    def on_train_start(self) -> None:
        self.began_at = self.trainer.global_step


@pytest.fixture(scope="module")
def saved(one_rank: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with checkpoints of steps 3, 6 and 9."""
    folder = tmp_path_factory.mktemp("saved")
    one_rank.run(fit, 1, NOISY, folder, save_every=3, max_epochs=2)
    return folder


def load(path: Path) -> None:
    make_trainer(1).predict(SmallModule(), torch.utils.data.DataLoader([]), ckpt_path=path)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_by_name(
    one_rank: Ranks, saved: Path, tmp_path: Path, damage: str, name: str
) -> None:
    for seed in range(3):
        copy = tmp_path / f"{seed}.ckpt"
        shutil.copytree(saved / "step=9.ckpt", copy)
        DAMAGES[damage](copy / name, random.Random(seed))
        with pytest.raises(Refused, match=r"Expected a (whole )?checkpoint") as refused:
            one_rank.run(load, copy)
        assert name in str(refused.value)


def test_a_shard_of_an_older_checkpoint_is_refused(
    one_rank: Ranks, saved: Path, tmp_path: Path
) -> None:
    for name in FILES:
        copy = tmp_path / name
        shutil.copytree(saved / "step=9.ckpt", copy)
        shutil.copy(saved / "step=6.ckpt" / name, copy / name)
        with pytest.raises(Refused, match="found a damaged one"):
            one_rank.run(load, copy)


def resume(folder: Path) -> dict[str, Any]:
    module = Snapped()
    found = fit(1, NOISY, folder, module=module, max_epochs=2, with_facts=True, resume_auto=True)
    return {**found, "began_at": module.began_at}


@pytest.mark.parametrize(("damaged", "began_at"), [(0, 9), (1, 6), (2, 3), (3, 0)])
def test_a_run_goes_back_to_the_newest_checkpoint_that_is_whole(
    one_rank: Ranks, saved: Path, tmp_path: Path, damaged: int, began_at: int
) -> None:
    folder = tmp_path / "moved"  # with its journal: paths are relative
    shutil.copytree(saved, folder)
    for step in (9, 6, 3)[:damaged]:
        DAMAGES["flipped bit"](folder / f"step={step}.ckpt" / "__0_0.distcp", random.Random(step))
    found = one_rank.run(resume, folder)[0]
    assert found["began_at"] == began_at
    ledger = ledger_of(found)
    assert (ledger.position, ledger.steps) == (10, 10 + (10 - began_at))
    assert found["facts"]["ran"]["steps_lost"] == 10 - began_at

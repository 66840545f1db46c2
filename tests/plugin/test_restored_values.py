"""Checkpoints that are whole, and hold values that no trainer would have written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.plain_values import load_plain
from tests.support.forged import signed
from tests.support.private_runs import NOISY, Watching, fit
from tests.support.ranks import Ranks

Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def checkpoint(one_rank: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    one_rank.run(fit, 1, NOISY, folder, save_every=3)
    return folder / "step=3.ckpt"


def group(meta: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = meta["optimizer_states"][0]["param_groups"][0]
    return found


def set_state(meta: dict[str, Any], value: Any) -> None:
    entries = meta["optimizer_states"][0]["state"][0]
    entries[next(iter(entries))] = value


CHANGES: dict[str, tuple[Change, str]] = {
    "steps": (lambda m: m.update(global_step="3"), "global_step = '3' in place of a finite number"),
    "version": (lambda m: m.update({"pytorch-lightning_version": 3}), "= 3 in place of a text"),
    "no version": (lambda m: m.update({"pytorch-lightning_version": "x"}), "InvalidVersion"),
    "loops": (lambda m: m.update(loops=[]), r"loops = \[\] in place of names with values"),
    "a loop": (
        lambda m: m["loops"]["fit_loop"]["epoch_progress"]["total"].update(ready=None),
        "ready = None in place of a finite number",
    ),
    "callbacks": (lambda m: m.update(callbacks="x"), "callbacks = 'x'"),
    "learning rate": (lambda m: group(m).update(lr=float("nan")), "lr = nan in place of a finite"),
    "nesterov": (lambda m: group(m).update(nesterov=1), "nesterov = 1 in place of True or False"),
    "parameters": (lambda m: group(m).update(params=[0]), "cannot restore .ValueError"),
    "momentum of text": (lambda m: set_state(m, "x"), "= 'x' in place of a tensor"),
    "momentum": (lambda m: set_state(m, torch.tensor([torch.inf])), "infinite or no number"),
    "no optimizer": (lambda m: m.pop("optimizer_states"), "cannot restore .KeyError"),
    "journal": (
        lambda m: m["lightning_dpsparse"]["journal"].update(writers=[1]),
        "the position of",
    ),
    "steps of a kernel": (lambda m: m.update(dpsparse_kernel_steps=[[]]), "cannot restore"),
    "a place in a list": (
        lambda m: m["dpsparse_shard_index"]["paths"].update({"model.bottom.0.weight": [10**400]}),
        "found a damaged one",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_no_trainer_has_written_is_refused(
    name: str, one_rank: Ranks, checkpoint: Path, tmp_path: Path
) -> None:
    change, message = CHANGES[name]
    folder = tmp_path / "run"
    shutil.copytree(checkpoint.parent, folder)
    meta = load_plain(folder / checkpoint.name / "meta.pt")
    change(meta)
    torch.save(meta, folder / checkpoint.name / "meta.pt")
    signed(folder / checkpoint.name)
    with pytest.raises(Refused, match=message):
        one_rank.run(fit, 1, NOISY, folder, resume=folder / checkpoint.name)


class Scheduled(Watching):
    """Has a scheduler whose state begins with an infinite number."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        scheduler = ReduceLROnPlateau(optimizer)
        return [optimizer], [{"scheduler": scheduler, "monitor": "epsilon", "strict": False}]


def resume_with_scheduler(folder: Path, checkpoint: Path) -> None:
    fit(1, NOISY, folder / "1", module=Scheduled(), save_every=3)
    fit(1, NOISY, folder / "1", module=Scheduled(), resume=folder / "1" / "step=3.ckpt")
    fit(1, NOISY, checkpoint.parent, module=Scheduled(), resume=checkpoint)


def test_a_run_may_go_on_with_another_scheduler(
    one_rank: Ranks, checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint.parent, tmp_path / "run")
    one_rank.run(resume_with_scheduler, tmp_path, tmp_path / "run" / checkpoint.name)


class BadHook(Callback):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise KeyError("a bug of mine")

    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}


def resume_with_bad_hook(folder: Path) -> None:
    fit(1, NOISY, folder, save_every=3, callbacks=[BadHook()])
    fit(1, NOISY, folder, resume=folder / "step=3.ckpt", callbacks=[BadHook()])


def test_errors_of_the_users_own_hooks_stay_as_they_are(one_rank: Ranks, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="a bug of mine") as caught:
        one_rank.run(resume_with_bad_hook, tmp_path)
    assert not isinstance(caught.value, Refused)

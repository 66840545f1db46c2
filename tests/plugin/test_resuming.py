"""A run that was started again goes on by itself, and never on an empty ledger."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dpsparse import PrivacyPlan
from lightning_dpsparse.accounting.journal import read_journal
from lightning_dpsparse.refused import Refused
from tests.support.private_runs import NOISY, Watching, fit, ledger_of, marked_loader
from tests.support.ranks import Ranks
from tests.support.tiny_model import SmallModule, loader, make_trainer

ROOT = Path(__file__).parents[2]


class Begun(Watching):
    """Knows at which step it began."""

    began_at: int | None = None

    def on_train_start(self) -> None:
        self.began_at = self.trainer.global_step


@contextmanager
def launched(**settings: str) -> Iterator[None]:
    """As if a launcher had set these variables."""
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def run(folder: Path, environment: dict[str, str], **settings: Any) -> dict[str, Any]:
    module = Begun(fail_at=settings.pop("fail_at", None))
    with launched(**environment):
        try:
            found = fit(1, NOISY, folder, module=module, **settings)
        except RuntimeError as error:
            if "this step fails" not in str(error):
                raise
            return {"began_at": module.began_at}
    return {**found, "began_at": module.began_at}


FIRST = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "0"}
AGAIN = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "1"}
SLURM = {"SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("first", "again"), [(FIRST, AGAIN), (SLURM, {**SLURM, "SLURM_RESTART_COUNT": "1"})]
)
def test_a_restart_goes_on_without_being_asked(
    one_rank: Ranks, tmp_path: Path, first: dict[str, str], again: dict[str, str]
) -> None:
    one_rank.run(run, tmp_path, first, save_every=2, fail_at=5, max_epochs=2)
    found = one_rank.run(run, tmp_path, again, save_every=2, max_epochs=2)[0]
    assert found["began_at"] == 4
    ledger = ledger_of(found)
    assert (ledger.position, ledger.steps) == (10, 10 + 2)  # steps 4 and 5 were charged twice
    assert len(list((tmp_path / "privacy").glob("*.journal"))) == 1


def test_a_restart_before_the_first_checkpoint_goes_on_with_the_ledger(
    one_rank: Ranks, tmp_path: Path
) -> None:
    one_rank.run(run, tmp_path, FIRST, fail_at=3)
    found = one_rank.run(run, tmp_path, AGAIN, with_facts=True)[0]
    assert found["began_at"] == 0
    assert (ledger_of(found).position, ledger_of(found).steps) == (5, 5 + 4)
    assert found["facts"]["ran"]["steps_lost"] == 4


def test_weights_alone_are_nothing_to_go_on_from(one_rank: Ranks, tmp_path: Path) -> None:
    one_rank.run(run, tmp_path, FIRST, save_every=2, weights_only=True, fail_at=5, max_epochs=2)
    assert len(list(tmp_path.glob("weights-*.ckpt"))) == 2
    found = one_rank.run(run, tmp_path, AGAIN, max_epochs=2)[0]
    assert found["began_at"] == 0
    assert ledger_of(found).steps == 10 + 6


def test_another_job_in_the_same_folder_is_another_run(one_rank: Ranks, tmp_path: Path) -> None:
    one_rank.run(run, tmp_path, FIRST, save_every=2, fail_at=5)
    for environment in (FIRST, {**AGAIN, "TORCHELASTIC_RUN_ID": "another"}):
        found = one_rank.run(run, tmp_path, environment)[0]
        assert found["began_at"] == 0
        assert ledger_of(found).steps == 5


def test_auto_goes_on_with_whatever_is_in_the_folder(one_rank: Ranks, tmp_path: Path) -> None:
    one_rank.run(run, tmp_path, FIRST, save_every=2, fail_at=5, max_epochs=2)
    found = one_rank.run(run, tmp_path, {}, resume_auto=True, max_epochs=2)[0]
    assert found["began_at"] == 4
    assert ledger_of(found).steps == 12
    again = one_rank.run(run, tmp_path, {}, resume_auto=True, max_epochs=2)[0]
    assert again["drawn"][:1] != []  # its last checkpoint was of step 4
    assert ledger_of(again).steps == 18


def test_auto_in_an_empty_folder_begins(one_rank: Ranks, tmp_path: Path) -> None:
    found = one_rank.run(run, tmp_path, {}, resume_auto=True)[0]
    assert found["began_at"] == 0
    assert ledger_of(found).steps == 5


def test_a_moved_folder_takes_its_run_along(one_rank: Ranks, tmp_path: Path) -> None:
    one_rank.run(run, tmp_path / "old", FIRST, save_every=2, fail_at=5, max_epochs=2)
    (tmp_path / "old").rename(tmp_path / "new")
    found = one_rank.run(
        run, tmp_path / "new", {}, resume_auto=True, max_epochs=2, with_facts=True
    )[0]
    assert found["began_at"] == 4
    assert ledger_of(found).steps == 12
    assert not found["facts"]["taints"]
    assert not (tmp_path / "old").exists()


def test_a_checkpoint_of_a_moved_folder_finds_its_journal(one_rank: Ranks, tmp_path: Path) -> None:
    one_rank.run(run, tmp_path / "old", FIRST, save_every=2, max_epochs=2)
    (tmp_path / "old").rename(tmp_path / "new")
    checkpoint = tmp_path / "new" / "step=4.ckpt"
    found = one_rank.run(
        run, tmp_path / "elsewhere", {}, resume=checkpoint, max_epochs=2, with_facts=True
    )[0]
    assert (ledger_of(found).steps, ledger_of(found).lost) == (16, 6)
    assert not found["facts"]["taints"]


@pytest.mark.parametrize("plan", [None, NOISY])
def test_a_run_that_is_resumed_at_the_end_of_an_epoch_and_again_is_no_longer(
    one_rank: Ranks, tmp_path: Path, plan: PrivacyPlan | None
) -> None:
    data = {"loader": loader(60, 12, 1)} if plan is None else {}
    settings: dict[str, Any] = {"save_every": 1, "max_epochs": 2, **data}
    one_rank.run(fit, 1, plan, tmp_path / "a", **settings)
    one_rank.run(fit, 1, plan, tmp_path / "b", resume=tmp_path / "a" / "step=5.ckpt", **settings)
    for step in (6, 8, 10):
        where = tmp_path / "b" / f"step={step}.ckpt"
        found = one_rank.run(fit, 1, plan, tmp_path / f"c{step}", resume=where, **settings)[0]
        assert found["steps"] == 10


def test_auto_goes_on_from_a_checkpoint_if_the_journal_is_gone(
    one_rank: Ranks, tmp_path: Path
) -> None:
    one_rank.run(run, tmp_path, {}, save_every=2, max_epochs=2)
    shutil.rmtree(tmp_path / "privacy")
    found = one_rank.run(run, tmp_path, {}, resume_auto=True, max_epochs=3, with_facts=True)[0]
    assert found["began_at"] == 10
    assert ledger_of(found).steps == 16 + 5  # 16 were announced when step 10 was saved
    assert any("was not found" in taint for taint in found["facts"]["taints"])


def test_auto_does_not_begin_anew_beside_checkpoints_of_an_unknown_price(
    one_rank: Ranks, tmp_path: Path
) -> None:
    one_rank.run(run, tmp_path, {}, save_every=2, max_epochs=2)
    shutil.rmtree(tmp_path / "privacy")
    for shard in tmp_path.glob("*.ckpt/*.distcp"):
        shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(Refused, match="nobody knows what it has spent"):
        one_rank.run(run, tmp_path, {}, resume_auto=True, max_epochs=3)


def test_auto_goes_on_in_a_folder_whose_run_began_elsewhere(
    one_rank: Ranks, tmp_path: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    one_rank.run(run, old, {}, save_every=5)
    one_rank.run(run, new, {}, resume=old / "step=5.ckpt", save_every=2, fail_at=4, max_epochs=2)
    found = one_rank.run(run, new, {}, resume_auto=True, max_epochs=2, with_facts=True)[0]
    assert found["began_at"] == 8
    assert (ledger_of(found).position, ledger_of(found).steps) == (10, 10 + 2)
    assert not found["facts"]["taints"]


def test_a_restart_goes_on_in_a_folder_whose_run_began_elsewhere(
    one_rank: Ranks, tmp_path: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    one_rank.run(run, old, {}, save_every=5)
    given = {"resume": old / "step=5.ckpt", "save_every": 2, "max_epochs": 2}
    one_rank.run(run, new, FIRST, fail_at=4, **given)
    found = one_rank.run(run, new, AGAIN, **given)[0]
    assert found["began_at"] == 8
    assert (ledger_of(found).position, ledger_of(found).steps) == (10, 10 + 2)


def test_an_older_journal_is_said_in_the_report_and_lowers_nothing(
    one_rank: Ranks, tmp_path: Path
) -> None:
    one_rank.run(run, tmp_path, FIRST, save_every=5, max_epochs=2)
    (journal,) = (tmp_path / "privacy").glob("*.journal")
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:1]))
    found = one_rank.run(
        run, tmp_path, {}, resume=tmp_path / "step=10.ckpt", max_epochs=3, with_facts=True
    )[0]
    assert ledger_of(found).steps == 16 + 5  # 16 were announced when step 10 was saved
    assert any("is older than the checkpoint" in taint for taint in found["facts"]["taints"])


def test_zeros_at_the_end_of_a_journal_are_charged_as_a_window(
    one_rank: Ranks, tmp_path: Path
) -> None:
    one_rank.run(run, tmp_path, FIRST, save_every=5)
    (journal,) = (tmp_path / "privacy").glob("*.journal")
    with journal.open("ab") as file:
        file.write(bytes(100))
    found = one_rank.run(run, tmp_path, {}, resume=tmp_path / "step=5.ckpt", max_epochs=2)[0]
    assert (ledger_of(found).position, ledger_of(found).steps) == (10, 10 + 16)


def test_a_run_whose_journal_another_process_holds_is_refused(
    one_rank: Ranks, tmp_path: Path
) -> None:
    from lightning_dpsparse.accounting.journal import Journal

    one_rank.run(run, tmp_path, FIRST, save_every=5)
    (path,) = (tmp_path / "privacy").glob("*.journal")
    holder = Journal(path.parent, path.stem)
    with pytest.raises(Refused, match="Expected one training at a time"):
        one_rank.run(run, tmp_path, {}, resume=tmp_path / "step=5.ckpt", max_epochs=2)
    holder.close()


def test_taints_survive_a_crash_without_a_checkpoint(one_rank: Ranks, tmp_path: Path) -> None:
    one_rank.run(leave_a_taint, tmp_path)
    found = one_rank.run(run, tmp_path, AGAIN, with_facts=True)[0]
    assert "something happened" in found["facts"]["taints"]


class Tainted(Begun):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trainer.strategy.private_run.evidence.taint("something happened")


def leave_a_taint(folder: Path) -> None:
    with launched(**FIRST), pytest.raises(RuntimeError, match="this step fails"):
        fit(1, NOISY, folder, module=Tainted(fail_at=3))


# ---- training without a plan ---------------------------------------------------------------------


class PlainBegun(SmallModule):
    began_at: int | None = None

    def on_train_start(self) -> None:
        self.began_at = self.trainer.global_step


def fit_plain(folder: Path, steps: int) -> int | None:
    module = PlainBegun()
    callback = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=2, save_top_k=-1)
    make_trainer(
        1,
        resume="auto",
        default_root_dir=str(folder),
        callbacks=[callback],
        enable_checkpointing=True,
        max_steps=steps,
        max_epochs=-1,
    ).fit(module, loader(40, 8, 1))
    return module.began_at


def test_plain_training_goes_on_too(one_rank: Ranks, tmp_path: Path) -> None:
    assert one_rank.run(fit_plain, tmp_path, 5)[0] == 0
    assert one_rank.run(fit_plain, tmp_path, 9)[0] == 4
    (newest,) = (tmp_path / "checkpoints").glob("*step=8.ckpt")
    (newest / "meta.pt").write_bytes(b"damaged")
    assert one_rank.run(fit_plain, tmp_path, 12)[0] == 6


# ---- SLURM ---------------------------------------------------------------------------------------


def requeue(folder: Path) -> list[str]:
    """SLURM's signal arrives in the middle of training; `scontrol` is a script of the test's."""
    import signal

    from lightning.fabric.plugins.environments import SLURMEnvironment

    class Signalled(Begun):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step == 3:
                os.kill(os.getpid(), signal.SIGUSR1)

    tools = folder / "tools"
    tools.mkdir()
    (tools / "scontrol").write_text(f'#!/bin/sh\necho "$@" > {folder}/requeued\n')
    (tools / "scontrol").chmod(0o755)
    settings = {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    path = os.pathsep.join([str(tools), os.environ["PATH"]])
    with launched(**settings, SLURM_NODEID="0", PATH=path):
        module = Signalled()
        fit(1, NOISY, folder, module=module, max_epochs=2, plugins=[SLURMEnvironment()])
    return sorted(path.name for path in folder.glob("hpc_ckpt_*"))


def test_lightnings_requeue_saves_a_whole_checkpoint_between_steps(
    one_rank: Ranks, tmp_path: Path
) -> None:
    assert one_rank.run(requeue, tmp_path)[0] == ["hpc_ckpt_1.ckpt"]
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    found = one_rank.run(run, tmp_path, {}, resume=tmp_path / "hpc_ckpt_1.ckpt", max_epochs=2)[0]
    assert found["began_at"] in (3, 4)


# ---- the real launcher ---------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys
sys.path.insert(0, {repository!r})
from pathlib import Path
from tests.support.private_runs import NOISY, Watching, fit

class Dies(Watching):
    def on_train_batch_start(self, batch, batch_idx):
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first and self.trainer.global_step == 7 and self.trainer.global_rank == {rank}:
            os.kill(os.getpid(), signal.SIGKILL)

found = fit(2, NOISY, Path({folder!r}), module=Dies(), save_every={every}, max_epochs=3)
print("charged", found["ledger"]["steps"], flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "every"), [(0, 3), (1, 3), (1, 1_000)])
def test_torchrun_starts_it_again(tmp_path: Path, rank: int, every: int) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "run"
    script.write_text(
        SCRIPT.format(repository=str(ROOT), folder=str(folder), rank=rank, every=every)
    )
    torchrun = Path(sys.executable).with_name("torchrun")
    done = subprocess.run(
        [torchrun, "--nproc-per-node=2", "--max-restarts=3", str(script)],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    (path,) = (folder / "privacy").glob("*.journal")
    state = read_journal(path)
    assert state is not None
    began_at = 6 if every == 3 else 0
    assert state.ledger.position == 15
    # Seven steps before the kill, and at most a window that was announced.
    assert 7 + (15 - began_at) <= state.ledger.steps <= 16 + (15 - began_at)
    shutil.rmtree(folder)


def test_a_loader_of_the_restart_draws_fresh_coins(one_rank: Ranks, tmp_path: Path) -> None:
    """What was drawn for a lost step is drawn anew: its charge stands by itself."""
    first = one_rank.run(run, tmp_path, FIRST, save_every=2, max_epochs=2)[0]
    again = one_rank.run(run, tmp_path, AGAIN, resume=tmp_path / "step=4.ckpt", max_epochs=2)[0]
    assert again["drawn"] != first["drawn"][4:]
    assert marked_loader(1).batch_size == 12

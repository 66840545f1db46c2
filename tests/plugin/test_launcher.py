"""Ranks that are started from within Python: the module that comes back is the trained one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_dpsparse import DPSparseStrategy, FusedOptimizer, LazyDP, PrivacyPlan
from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.plugin.history import history_of, spent_by
from lightning_dpsparse.refused import Refused
from tests.support.command import run_captured
from tests.support.private_runs import Watching, fit, ledger_of, marked_loader
from tests.support.ranks import Ranks
from tests.support.tiny_model import assemble

PLAN = PrivacyPlan(noise_multiplier=1.0, delta=1e-3, fixed_key=4, mechanism=LazyDP())


def started(method: Any, folder: Path, privacy: PrivacyPlan | None = PLAN) -> Trainer:
    strategy = DPSparseStrategy(
        privacy=privacy,
        fused_optimizer=FusedOptimizer(kind="sgd", learning_rate=0.1),
        start_method=method,
    )
    return Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=str(folder),
    )


def train(method: Any, folder: Path, *, again: bool) -> None:
    """Fit, look at the module that came back, evaluate it, and fit it again with a new trainer."""
    torch.manual_seed(0)
    module = Watching()
    started(method, folder).fit(module, marked_loader(2))
    found = {"state": plain_state(module), "history": history_of(module)}
    if again:
        started(method, folder).validate(module, marked_loader(2, shuffle=False), verbose=False)
        started(method, folder).fit(module, marked_loader(2))
    spent = spent_by(module)
    assert spent is not None
    torch.save(found | {"ledger": spent["ledger"], "later": plain_state(module)}, folder / "found")


def plain_state(module: LightningModule) -> dict[str, Any]:
    return {key: value.clone() for key, value in module.state_dict().items()}


@pytest.mark.parametrize(
    ("method", "times"), [("fork", 2), pytest.param("spawn", 1, marks=pytest.mark.slow)]
)
def test_two_processes_bring_back_what_two_ranks_train(
    method: str, times: int, two_ranks: Ranks, tmp_path: Path
) -> None:
    """With the weights come their history and their ledger, so that nothing is spent unseen."""
    done = run_captured(partial(train, again=times == 2), method, tmp_path)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "found", weights_only=False)
    results = two_ranks.run(fit, 2, PLAN, tmp_path / "ranks")
    wanted = assemble([result["state"] for result in results])
    assert found["state"].keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(found["state"][key], value), key
    once = ledger_of(results[0])
    assert [span.steps for span in found["history"]] == [once.steps]
    assert Ledger.from_data(found["ledger"]).steps == times * once.steps
    moved = [not torch.equal(found["later"][key], value) for key, value in wanted.items()]
    assert any(moved) == (times == 2)


class Unfit(Watching):
    """Returns one loss for all examples, which no private run takes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx).mean()


def refuse(folder: Path) -> None:
    with pytest.raises(Refused, match="Expected one loss per example") as caught:
        started("fork", folder).fit(Unfit(), marked_loader(2))
    assert "Traceback" not in str(caught.value)


def fail(folder: Path) -> None:
    with pytest.raises(Exception, match="this step fails") as caught:
        started("fork", folder).fit(Watching(fail_at=1), marked_loader(2))
    assert "Traceback" in str(caught.value)


@pytest.mark.parametrize("end", [refuse, fail])
def test_a_refusal_in_another_process_is_a_refusal_here(end: Any, tmp_path: Path) -> None:
    done = run_captured(end, tmp_path)
    assert done.returncode == 0, done.stderr

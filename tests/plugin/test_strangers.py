"""Models as strangers write them train privately, as they are."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dpsparse import PrivacyPlan
from tests.support.ranks import Ranks
from tests.support.strangers import STRANGERS, Checkpointed, OfSome, Stranger, across_examples
from tests.support.tiny_model import loader, make_trainer


def ten_steps(name: str, folder: Path) -> dict[str, Any]:
    """Ten Poisson steps under a secret key: the probe has looked at the model twice."""
    torch.manual_seed(0)
    module = STRANGERS[name]()
    plan = PrivacyPlan(noise_multiplier=1.0, clip_norm=0.5, delta=1e-4)
    trainer = make_trainer(1, privacy=plan, max_steps=10, default_root_dir=str(folder))
    trainer.fit(module, loader(200, 16, 1))
    run = trainer.strategy.private_run  # type: ignore[attr-defined]
    return {
        "steps": trainer.global_step,
        "facts": run.facts(),
        "finite": all(bool(p.isfinite().all()) for p in module.parameters()),
    }


@pytest.mark.parametrize("name", STRANGERS)
def test_ten_private_steps(one_rank: Ranks, tmp_path: Path, name: str) -> None:
    (found,) = one_rank.run(ten_steps, name, tmp_path)
    assert found["steps"] == 10
    assert found["finite"]
    assert math.isfinite(found["facts"]["guarantee"]["epsilon"])
    assert found["facts"]["taints"] == []


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (across_examples, "batch_first=True in attention and recurrent layers"),
        (Checkpointed, "found activation checkpointing"),
        (OfSome, "multiply the losses of the others by zero"),
    ],
)
def test_what_cannot_be_trained_is_told_what_to_do(
    one_rank: Ranks, tmp_path: Path, build: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        one_rank.run(refused, build, tmp_path)


def refused(build: Any, folder: Path) -> None:
    plan = PrivacyPlan(noise_multiplier=1.0, clip_norm=0.5, delta=1e-4)
    trainer = make_trainer(1, privacy=plan, max_steps=10, default_root_dir=str(folder))
    trainer.fit(Stranger(build), loader(200, 16, 1))

"""The same on a GPU. Skipped where there is none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_dpsparse import DPSGD, DPSparseStrategy, FusedOptimizer, LazyDP, PrivacyPlan
from lightning_dpsparse.sharded.fused import kernel_steps
from tests.plugin.test_training import assert_close, reference
from tests.private import plan
from tests.small import Recording, assemble, loader, snapshot

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def fit(
    optimizer: FusedOptimizer, steps: int = 4, privacy: PrivacyPlan | None = None, **kwargs: Any
) -> tuple[Recording, Trainer]:
    os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
    torch.manual_seed(0)
    module = Recording()
    trainer = Trainer(
        strategy=DPSparseStrategy(privacy=privacy, fused_optimizer=optimizer),
        accelerator="cuda",
        devices=1,
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, loader(32, 8, 1), **kwargs)
    return module, trainer


def on_cpu(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.cpu() for key, value in whole.items()}


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad"])
def test_training_on_a_gpu_is_plain_pytorch(kind: Any) -> None:
    optimizer = FusedOptimizer(kind=kind, learning_rate=0.3)
    module, _ = fit(optimizer)
    expected, _ = reference(on_cpu(assemble([module.start])), optimizer)
    assert_close(on_cpu(assemble([snapshot(module)])), expected, 1e-5)


def test_adams_step_count_survives_a_checkpoint(tmp_path: Path) -> None:
    optimizer = FusedOptimizer(kind="adam", learning_rate=0.01)
    module, trainer = fit(optimizer, steps=4)
    steps = kernel_steps(module)
    trainer.save_checkpoint(tmp_path / "ckpt")
    straight, _ = fit(optimizer, steps=8)
    resumed, _ = fit(optimizer, steps=8, ckpt_path=tmp_path / "ckpt")
    assert steps > 0
    assert kernel_steps(resumed) == kernel_steps(straight)
    assert_close(assemble([snapshot(resumed)]), assemble([snapshot(straight)]), 1e-6)


@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_lazydp_on_a_gpu_is_eager_dp_sgd(weight_decay: float) -> None:
    optimizer = FusedOptimizer(kind="sgd", learning_rate=0.3, weight_decay=weight_decay)
    eager, lazy = (
        fit(optimizer, privacy=plan(noise=2.0, mechanism=mechanism, noise_source="row_keyed"))[0]
        for mechanism in (DPSGD(chunk_rows=16), LazyDP(aggregate=False, chunk_rows=16))
    )
    assert_close(assemble([snapshot(lazy)]), assemble([snapshot(eager)]), 1e-5)

"""The same on a GPU. Skipped where there is none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_dpsparse import (
    DPSGD,
    LSG,
    DPSparseStrategy,
    FusedOptimizer,
    LazyDP,
    PrivacyPlan,
    SparseDPSGD,
)
from lightning_dpsparse.engine.outer_products import Positions
from lightning_dpsparse.noise.keys import RunKey
from lightning_dpsparse.noise.sources import RowNoise
from lightning_dpsparse.sharded.fused import kernel_steps
from tests.support.naive_step import plan
from tests.support.plain_training import assert_close, reference
from tests.support.tiny_model import SEQUENCES, Recording, assemble, loader, snapshot

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def fit(
    optimizer: FusedOptimizer,
    steps: int = 4,
    privacy: PrivacyPlan | None = None,
    sequences: tuple[str, ...] = (),
    **kwargs: Any,
) -> tuple[Recording, Trainer]:
    os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
    torch.manual_seed(0)
    module = Recording(sequences=sequences)
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


@pytest.mark.parametrize("sequences", [(), SEQUENCES], ids=["bags", "sequences"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_lazydp_on_a_gpu_is_eager_dp_sgd(weight_decay: float, sequences: Any) -> None:
    optimizer = FusedOptimizer(kind="sgd", learning_rate=0.3, weight_decay=weight_decay)
    eager, lazy = (
        fit(
            optimizer,
            privacy=plan(noise=2.0, mechanism=mechanism, noise_source="row_keyed"),
            sequences=sequences,
        )[0]
        for mechanism in (DPSGD(chunk_rows=16), LazyDP(aggregate=False, chunk_rows=16))
    )
    assert_close(assemble([snapshot(lazy)]), assemble([snapshot(eager)]), 1e-5)


@pytest.mark.parametrize("dense", [LSG(3, 0.25), SparseDPSGD(0.3)], ids=["lsg", "sparse"])
@pytest.mark.parametrize("places", [1, 4])
def test_dense_forms_on_a_gpu_are_those_of_the_cpu(dense: Any, places: int) -> None:
    torch.manual_seed(0)
    weight, factors = torch.randn(9, 8), torch.rand(5)
    inputs, gradient = torch.randn(5, places, 8), torch.randn(5, places, 9)
    found = []
    for device in ("cpu", "cuda"):
        form = dense.form("w", weight.to(device), 1, RowNoise(RunKey.fixed(0)), 0)
        positions = Positions(inputs.to(device), gradient.to(device))
        out = torch.empty(form.size, device=device)
        form.weighted_sum(positions, factors.to(device), out)
        norms = form.square_norms(positions, None)
        found.append([value.cpu() for value in (norms, form.rebuild(out))])
    for one, two in zip(*found):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)

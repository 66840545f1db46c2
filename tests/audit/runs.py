"""Small runs to be audited."""

from __future__ import annotations

import secrets
from typing import Any
from unittest import mock

from lightning_dpsparse import FusedOptimizer, Placement, PrivacyPlan
from lightning_dpsparse.audit.one_run import OneRunResult, one_run_audit
from lightning_dpsparse.data import SyntheticData
from lightning_dpsparse.engine.mechanism import Mechanism
from lightning_dpsparse.models import DLRMModule
from tests.small import make_trainer

ROWS = [100, 60]
CLAIM = 1.3
NOISE = 6.6274  # which four steps on all of the data need for it
CANARIES = 100_000


def model() -> DLRMModule:
    return DLRMModule(num_rows=ROWS, embedding_dim=8, dense_arch=[16, 8], over_arch=[16, 1])


def data(size: int = 2000) -> SyntheticData:
    """All of it in every step."""
    return SyntheticData(
        num_rows=ROWS, batch_size=size, examples_per_day=size, train_days=1, val_days=1
    )


def audited(
    mechanism: Mechanism,
    world_size: int = 1,
    seed: int = 0,
    canaries: int = CANARIES,
    placement: Placement | None = None,
    kind: Any = "sgd",
    is_white_box: bool = True,
    **plan: Any,
) -> OneRunResult:
    """Noise goes by `seed`, so that a test sees the same run every time; a plan with a fixed key
    would claim nothing."""
    settings: dict[str, Any] = {
        "noise_multiplier": NOISE,
        "delta": 1e-6,
        **plan,
    }
    trainer = make_trainer(
        world_size,
        placement,
        FusedOptimizer(kind=kind, learning_rate=1.0),
        privacy=PrivacyPlan(mechanism=mechanism, **settings),
        max_epochs=-1,
        max_steps=4,
    )
    with mock.patch.object(secrets, "token_bytes", lambda size: seed.to_bytes(size, "big")):
        return one_run_audit(
            trainer,
            model(),
            data(),
            num_canaries=canaries,
            seed=seed,
            is_white_box=is_white_box,
        )

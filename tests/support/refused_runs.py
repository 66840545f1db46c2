"""Runs that must be refused at their start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_dpsparse import FusedOptimizer, Placement
from tests.support.ranks import Ranks
from tests.support.tiny_model import SmallModule, loader, make_trainer


def fit(
    module: LightningModule, placement: Placement | None, fused: Any, trainer: dict[str, Any]
) -> None:
    world_size = torch.distributed.get_world_size()
    make_trainer(world_size, placement, fused, max_steps=1, **trainer).fit(
        module, loader(8, 8, world_size)
    )


def refused(
    ranks: Ranks,
    message: str,
    module: LightningModule | None = None,
    placement: Placement | None = None,
    fused: FusedOptimizer | None = None,
    **trainer: Any,
) -> None:
    with pytest.raises(ValueError, match=message):
        ranks.run(fit, module or SmallModule(), placement, fused, trainer)

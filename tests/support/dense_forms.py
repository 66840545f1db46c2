"""Dense mechanisms for the tiny model, and their forms done naively."""

from __future__ import annotations

from typing import Any

import torch

from lightning_dpsparse import LSG, RGP, SparseDPSGD
from lightning_dpsparse.noise.sources import FastNoise
from tests.support.dense_layers import NaiveForm
from tests.support.naive_step import plan

DENSE = {
    "rgp": RGP(2),
    "lsg": LSG(3, 0.25, warmup=1, exclude=[]),
    "sparse": SparseDPSGD(0.3, warmup=1),
}


def naive_forms(dense: Any) -> Any:
    """What `naive` takes as `dense_forms`."""
    noise = FastNoise(plan().make_key())

    def at(model: torch.nn.Module, step: int) -> dict[str, NaiveForm]:
        """Of the hidden layer. The last one is left out, or as small as its factors."""
        weight = model.get_parameter("head.hidden.weight").detach()
        form = NaiveForm(dense, "head.hidden.weight", weight, step, noise, torch.float32)
        return {"head.hidden.weight": form}

    return at

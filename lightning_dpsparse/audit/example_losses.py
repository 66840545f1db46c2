"""The loss of a trained model on chosen examples.

Attacks without a look at the weights compare losses: a model tends to have a lower loss on what it
was trained on. `one_run.py` and `secret_sharer.py` ask for the losses of their canaries here.
"""

from __future__ import annotations

import numpy as np
import torch
from lightning.pytorch import LightningModule
from numpy.typing import NDArray

from lightning_dpsparse.data.batch import ClickData, Clicks, select
from lightning_dpsparse.models.base import RecommenderModule
from lightning_dpsparse.refused import Refused

_AT_A_TIME = 4096  # examples in a batch


@torch.no_grad()
def losses_on_examples(
    module: LightningModule, data: ClickData, device: torch.device, examples: Clicks
) -> NDArray[np.float64]:
    """The loss of each example. If tables are sharded, every rank asks for the same examples."""
    if not isinstance(module, RecommenderModule):
        raise Refused(
            "Expected a model derived from lightning_dpsparse.models.RecommenderModule, found "
            f"{type(module).__name__}: it does not say what an example's loss is. Derive from it."
        )
    was_training = module.training
    module.eval()
    found = []
    for start in range(0, len(examples.labels_B), _AT_A_TIME):
        stop = min(start + _AT_A_TIME, len(examples.labels_B))
        batch = data.collate(select(examples, np.arange(start, stop))).to(device)
        found.append(module.example_losses(batch).double().cpu().numpy())
    module.train(was_training)
    return np.concatenate(found)

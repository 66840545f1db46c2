"""LightningCLI, fitted to recipes."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from typing_extensions import override

from lightning_dpsparse import register_strategy


class RecipeCLI(LightningCLI):
    """Any LightningModule, any LightningDataModule, by class path."""

    def __init__(self, description: str = "", **kwargs: Any) -> None:
        register_strategy()
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"prog": "lightning-dpsparse", "description": description},
            **kwargs,
        )

    @override
    def before_instantiate_classes(self) -> None:
        """Under torchrun, `devices: auto` means the processes that torchrun started."""
        trainer = self._get(self.config, "trainer")
        if TorchElasticEnvironment.detect() and trainer.devices == "auto":
            local = int(os.environ["LOCAL_WORLD_SIZE"])
            trainer.devices = local
            trainer.num_nodes = int(os.environ["WORLD_SIZE"]) // local


def quiet() -> None:
    """Leave out what a user of a recipe can do nothing about."""
    for message in (
        ".*isinstance.treespec, LeafSpec.*is deprecated.*",  # Lightning and torch's pytree
        ".*does not have many workers which may be a bottleneck.*",
        ".*DistributedSampler. with the dataloaders.*",  # this strategy replaces that sampler
    ):
        warnings.filterwarnings("ignore", message)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_no_advertisement)


def _no_advertisement(record: logging.LogRecord) -> bool:
    return "Tip:" not in record.getMessage()

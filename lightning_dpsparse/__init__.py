"""Differentially private training of TorchRec recommenders with PyTorch Lightning.

Importing the package registers `Trainer(strategy="dpsparse")`. The heavy parts are imported when
first asked for, so that `lightning-dpsparse doctor` can speak even where they are broken.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_dpsparse.version import __version__

if TYPE_CHECKING:
    from lightning_dpsparse.plugin.callbacks import PredictionWriter
    from lightning_dpsparse.plugin.strategy import DPSparseStrategy
    from lightning_dpsparse.sharded.fused import FusedOptimizer
    from lightning_dpsparse.sharded.placement import Placement, TablePlacement

_HOME = {
    "DPSparseStrategy": "lightning_dpsparse.plugin.strategy",
    "FusedOptimizer": "lightning_dpsparse.sharded.fused",
    "Placement": "lightning_dpsparse.sharded.placement",
    "PredictionWriter": "lightning_dpsparse.plugin.callbacks",
    "TablePlacement": "lightning_dpsparse.sharded.placement",
}

__all__ = [
    "DPSparseStrategy",
    "FusedOptimizer",
    "Placement",
    "PredictionWriter",
    "TablePlacement",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def _register_strategy() -> None:
    try:
        from lightning.pytorch.strategies import StrategyRegistry
    except ImportError:
        return  # the first use of anything above says so; doctor says more

    def make(**kwargs: Any) -> Any:
        return __getattr__("DPSparseStrategy")(**kwargs)

    StrategyRegistry.register("dpsparse", make, "TorchRec sharded tables", override=True)


_register_strategy()

"""Differentially private training of TorchRec recommenders with PyTorch Lightning.

Importing the package makes `Trainer(strategy="dpsparse")` known (see `registration`). The parts of
the package that need torch or Lightning are imported when one of their names is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_dpsparse.mechanisms import TABLE_MECHANISMS
from lightning_dpsparse.registration import register_with_lightning
from lightning_dpsparse.version import __version__

if TYPE_CHECKING:
    from lightning_dpsparse.audit.secret_sharer import SecretSharer
    from lightning_dpsparse.engine.clipping import AutomaticClipping, FlatClipping, GroupClipping
    from lightning_dpsparse.engine.dense import DenseGaussian
    from lightning_dpsparse.mechanisms.adafest import AdaFEST
    from lightning_dpsparse.mechanisms.dpsgd import DPSGD
    from lightning_dpsparse.mechanisms.eana import EANA
    from lightning_dpsparse.mechanisms.exponential import ExponentialSelection
    from lightning_dpsparse.mechanisms.fest import FEST, AdaFESTPlus
    from lightning_dpsparse.mechanisms.lazydp import LazyDP
    from lightning_dpsparse.mechanisms.logit_calibration import LogitCalibration
    from lightning_dpsparse.mechanisms.lsg import LSG, RGP
    from lightning_dpsparse.mechanisms.selection import (
        GumbelHistogram,
        NoisyHistogram,
        PublicFrequencies,
        Selection,
    )
    from lightning_dpsparse.mechanisms.sparse_dpsgd import SparseDPSGD
    from lightning_dpsparse.optimizers.dp_adam import DPAdam
    from lightning_dpsparse.optimizers.linear_decay import LinearDecay
    from lightning_dpsparse.plan import PrivacyPlan, Users
    from lightning_dpsparse.plugin.averaging import AverageWeights
    from lightning_dpsparse.plugin.callbacks import PredictionWriter, PrivacyMonitor, PrivacyReport
    from lightning_dpsparse.plugin.public_weights import PublicWeights
    from lightning_dpsparse.plugin.strategy import DPSparseStrategy
    from lightning_dpsparse.sharded.fused import FusedOptimizer
    from lightning_dpsparse.sharded.placement import Placement, TablePlacement

_HOME = {
    **TABLE_MECHANISMS,
    "GumbelHistogram": "lightning_dpsparse.mechanisms.selection",
    "LogitCalibration": "lightning_dpsparse.mechanisms.logit_calibration",
    "NoisyHistogram": "lightning_dpsparse.mechanisms.selection",
    "PublicFrequencies": "lightning_dpsparse.mechanisms.selection",
    "SecretSharer": "lightning_dpsparse.audit.secret_sharer",
    "Selection": "lightning_dpsparse.mechanisms.selection",
    "AutomaticClipping": "lightning_dpsparse.engine.clipping",
    "AverageWeights": "lightning_dpsparse.plugin.averaging",
    "DPAdam": "lightning_dpsparse.optimizers.dp_adam",
    "PrivacyPlan": "lightning_dpsparse.plan",
    "DPSparseStrategy": "lightning_dpsparse.plugin.strategy",
    "LinearDecay": "lightning_dpsparse.optimizers.linear_decay",
    "FlatClipping": "lightning_dpsparse.engine.clipping",
    "FusedOptimizer": "lightning_dpsparse.sharded.fused",
    "GroupClipping": "lightning_dpsparse.engine.clipping",
    "DenseGaussian": "lightning_dpsparse.engine.dense",
    "LSG": "lightning_dpsparse.mechanisms.lsg",
    "RGP": "lightning_dpsparse.mechanisms.lsg",
    "SparseDPSGD": "lightning_dpsparse.mechanisms.sparse_dpsgd",
    "Placement": "lightning_dpsparse.sharded.placement",
    "PredictionWriter": "lightning_dpsparse.plugin.callbacks",
    "PrivacyMonitor": "lightning_dpsparse.plugin.callbacks",
    "PrivacyReport": "lightning_dpsparse.plugin.callbacks",
    "PublicWeights": "lightning_dpsparse.plugin.public_weights",
    "TablePlacement": "lightning_dpsparse.sharded.placement",
    "Users": "lightning_dpsparse.plan",
}

__all__ = [
    "DPSGD",
    "EANA",
    "FEST",
    "LSG",
    "RGP",
    "AdaFEST",
    "AdaFESTPlus",
    "AutomaticClipping",
    "AverageWeights",
    "DPAdam",
    "DPSparseStrategy",
    "DenseGaussian",
    "ExponentialSelection",
    "FlatClipping",
    "FusedOptimizer",
    "GroupClipping",
    "GumbelHistogram",
    "LazyDP",
    "LinearDecay",
    "LogitCalibration",
    "NoisyHistogram",
    "Placement",
    "PredictionWriter",
    "PrivacyMonitor",
    "PrivacyPlan",
    "PrivacyReport",
    "PublicFrequencies",
    "PublicWeights",
    "SecretSharer",
    "Selection",
    "SparseDPSGD",
    "TablePlacement",
    "Users",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


register_with_lightning()

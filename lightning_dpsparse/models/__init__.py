"""LightningModules: TorchRec's DLRM and DLRM-DCN, AdaFEST's pCTR, EANA's two towers, SASRec.

Private training needs one loss per example and examples that do not depend on each other. All
models here derive from `base.py`, which returns losses by example. `click.py` has what models of
clicks share (`dlrm.py`, `pctr.py`), and `next_item.py` what models of the next item share
(`two_tower.py`, `sasrec.py`).
"""

from lightning_dpsparse.models.click import ClickModule
from lightning_dpsparse.models.dlrm import DLRMDCNModule, DLRMModule
from lightning_dpsparse.models.pctr import PCTRModule
from lightning_dpsparse.models.sasrec import SASRecModule
from lightning_dpsparse.models.two_tower import TwoTowerModule

__all__ = [
    "ClickModule",
    "DLRMDCNModule",
    "DLRMModule",
    "PCTRModule",
    "SASRecModule",
    "TwoTowerModule",
]

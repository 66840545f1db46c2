"""LightningModules: TorchRec's DLRM and DLRM-DCN, AdaFEST's pCTR, EANA's two towers, SASRec."""

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

"""Click models as LightningModules: TorchRec's DLRM and DLRM-DCN, and the AdaFEST paper's pCTR."""

from lightning_dpsparse.models.click import ClickModule
from lightning_dpsparse.models.dlrm import DLRMDCNModule, DLRMModule
from lightning_dpsparse.models.pctr import PCTRModule

__all__ = ["ClickModule", "DLRMDCNModule", "DLRMModule", "PCTRModule"]

"""The fused optimizer: FBGEMM updates a table's rows inside the backward pass.

So no gradient needs to be as large as its table. In return the optimizer is part of the kernel, and
is chosen when tables are sharded. Settings that FBGEMM would ignore or get wrong are refused here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.types import ShardedModule
from torchrec.optim.keyed import CombinedOptimizer

from lightning_dpsparse.checks import check_choice, check_flag, check_number
from lightning_dpsparse.engine.mechanism import Mechanism
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.shards import local_kernels

_FBGEMM_NAME = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,
}


@dataclass(frozen=True, kw_only=True)
class FusedOptimizer:
    """How the embedding tables learn. The module's own optimizer trains everything else."""

    kind: Literal["sgd", "adagrad", "rowwise_adagrad", "adam"] = "rowwise_adagrad"
    """Update rule of the tables. Adam exists on CUDA only."""

    learning_rate: float = 0.01
    """Learning rate of the tables. The dense optimizer has its own."""

    eps: float = 1e-8
    """Number that is added to the root of the second moment. SGD does not use it."""

    beta1: float = 0.9
    """Factor by which Adam's first moment decays in a step."""

    beta2: float = 0.999
    """Factor by which Adam's second moment decays in a step."""

    weight_decay: float = 0.0
    """Factor of the L2 penalty inside the update. Row-wise Adagrad and Adam have it on CUDA only,
    and SGD has it in private training that reaches all rows (DPSGD, LazyDP)."""

    follow_schedule: bool = True
    """Whether the tables' learning rate is multiplied by the factor that the module's scheduler
    applies to the dense one."""

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, _FBGEMM_NAME)
        check_number("learning_rate", self.learning_rate, least=0, remedy="The default is 0.01.")
        check_number("eps", self.eps, above=0, smallest=1e-37, remedy="The default is 1e-8.")
        check_number("beta1", self.beta1, least=0, below=1, remedy="The default is 0.9.")
        check_number("beta2", self.beta2, least=0, below=1, remedy="The default is 0.999.")
        check_number("weight_decay", self.weight_decay, least=0, remedy="The default is 0.")
        check_flag("follow_schedule", self.follow_schedule)
        if self.kind == "sgd" and self.learning_rate * self.weight_decay >= 2:
            raise Refused(
                f"Expected learning_rate x weight_decay below 2, found {self.learning_rate} x "
                f"{self.weight_decay}: weights would grow in every step. Lower one of them."
            )

    def check(self, device: torch.device, mechanism: Mechanism | None = None) -> None:
        """Refuse what FBGEMM or the mechanism would silently leave out or get wrong."""
        if self.kind == "adam" and device.type == "cpu":
            raise Refused(
                "Expected a fused optimizer with a CPU kernel, found adam, which FBGEMM has on "
                "CUDA only. Use rowwise_adagrad, adagrad or sgd."
            )
        if mechanism is not None:
            mechanism.check_optimizer(self.kind, self.weight_decay)
        elif self.weight_decay and self.kind == "sgd":
            raise Refused(
                f"Expected weight_decay=0 with sgd, found {self.weight_decay}: FBGEMM's sgd kernel "
                "ignores it. Use rowwise_adagrad or adam on CUDA, or train privately."
            )
        if self.kind == "sgd":
            return
        if self.weight_decay and self.kind == "adagrad":
            raise Refused(
                f"Expected weight_decay=0 with adagrad, found {self.weight_decay}: FBGEMM's "
                "adagrad kernel ignores it. Use rowwise_adagrad or adam on CUDA."
            )
        if self.weight_decay and device.type == "cpu":
            raise Refused(
                f"Expected weight_decay=0 on CPU, found {self.weight_decay}: FBGEMM's CPU row-wise "
                "Adagrad applies it only to tables that several features share. Set it to 0."
            )

    def fused_params(self) -> dict[str, Any]:
        """The settings under TorchRec's names."""
        params: dict[str, Any] = {
            "optimizer": _FBGEMM_NAME[self.kind],
            "learning_rate": self.learning_rate,
        }
        if self.kind != "sgd":
            params["eps"] = self.eps
        if self.kind == "adam":
            params |= {"beta1": self.beta1, "beta2": self.beta2}
        if self.weight_decay:
            params["weight_decay"] = self.weight_decay
        return params


def check_kernels(module: nn.Module, optimizer: FusedOptimizer) -> None:
    """Refuse tables that an earlier trainer sharded with another optimizer, which they keep."""
    for _, kernel in local_kernels(module):
        found = kernel.optimizer
        if found != _FBGEMM_NAME[optimizer.kind]:
            raise Refused(
                f"Expected tables with {optimizer.kind} fused in, found {found.name}: they were "
                "sharded by an earlier trainer. Use its fused optimizer, or a new module."
            )
        decay = kernel.weight_decay
        if decay != optimizer.weight_decay:
            raise Refused(
                f"Expected tables with weight decay {optimizer.weight_decay} fused in, found "
                f"{decay}: they were sharded by an earlier trainer. Use the same, or a new module."
            )


def combined_fused_optimizer(module: nn.Module) -> CombinedOptimizer:
    """One optimizer object over the fused optimizers of every sharded collection in `module`."""
    return CombinedOptimizer(
        [
            (path, child.fused_optimizer)
            for path, child in module.named_modules()
            if isinstance(child, ShardedModule)
        ]
    )


def set_learning_rate(optimizer: CombinedOptimizer, learning_rate: float) -> None:
    """Give every kernel this learning rate from its next forward pass on."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()  # a fused optimizer's step only hands the learning rate to its kernel


def kernel_steps(module: nn.Module) -> int:
    """Number of updates that the kernels have counted, which Adam's bias correction reads."""
    return max((kernel.steps_to_save for _, kernel in local_kernels(module)), default=0)


def set_kernel_steps(module: nn.Module, steps: int) -> None:
    for _, kernel in local_kernels(module):
        kernel.restore_steps(steps)

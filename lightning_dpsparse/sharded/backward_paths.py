"""Checks the ways that gradients take through a model, in every step.

A private step sees gradients at lookups and at dense calls that it knows. A graph that ends
anywhere else would carry a gradient past clipping and noise: it is refused. A graph that differs
from all before it may also join examples in a new way, so the probe must look at it
(`plugin/probe/`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from lightning_dpsparse.engine.ghost import DenseCapture
from lightning_dpsparse.engine.graph import graph_of
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.kernel_read import KernelRead


class BackwardPaths:
    """Looks at the graph of every step before its backward pass."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known: set[object] = set()
        self._path: object = None
        self.is_probe_due = False
        """Whether the probe must look at this step, even if its path is known."""

    def check(self, loss_n: Tensor, reads: Sequence[KernelRead], dense: DenseCapture) -> None:
        """Refuse a graph that ends anywhere but where a private step sees its gradients."""
        graph = graph_of(loss_n)
        if dense.has_gradients() or any(read.leaf.grad is not None for read in reads):
            raise Refused(
                "Expected the first backward pass of the step, found that one has been made in "
                "training_step. Return the losses instead, one per example."
            )
        leaves = {id(read.leaf) for read in reads}
        for leaf in graph.leaves:
            # TorchRec and the capture make leaves without numbers, which get no gradient.
            if leaf.numel() and id(leaf) not in leaves and not dense.made(leaf):
                raise Refused(
                    "Expected gradients on parameters of the module and on its tables only, found "
                    f"one for another tensor, of shape {tuple(leaf.shape)}"
                    f"{self._whose(leaf)}: it would be neither clipped nor noised. Register it as "
                    "a parameter before training begins, or detach it."
                )
        self._path = (graph.signature, dense.path)

    def _whose(self, leaf: Tensor) -> str:
        names = [name for name, p in self._module.named_parameters() if p is leaf]
        return f" ({names[0]!r})" if names else ""

    @property
    def wants_probe(self) -> bool:
        """Whether the path of this step is new, or the probe is due anyway."""
        return self.is_probe_due or self._path not in self._known

    def note_probed(self) -> None:
        """Note that the probe found nothing wrong with the path that this step took."""
        self._known.add(self._path)
        self.is_probe_due = False

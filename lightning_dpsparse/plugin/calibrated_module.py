"""What a calibration needs of a module: its logits and labels, and a place for slope and bias.

The models of this package have both. A module of the user's own has a method

    def logits_and_labels(self, batch):  # one logit and one label for every example, in order
        return self(batch), batch.labels

and either the path of its last `nn.Linear`, which has one output and a bias, as
`calibrated_layer = "head.2"`, or a method `apply_calibration(slope, bias)` that maps every logit to
slope * logit + bias from then on. The slope and bias go into the weights that are there, so that
checkpoints and exports need nothing else.

Slices of a public feature have biases of their own if the module has `num_calibration_slices`, a
method `calibration_slices(batch)` that numbers every example's slice from zero, and
`apply_slice_biases(slope, biases)`, by which every slice's bias b becomes slope * b + its new one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_dpsparse.mechanisms.logit_calibration.platt import LogitMap
from lightning_dpsparse.refused import Refused

_WAY_OUT = "Or leave the plan's calibration out."


class CalibratedModule:
    """A module that can be calibrated; one that cannot is refused."""

    def __init__(self, module: LightningModule) -> None:
        self._module: Any = module
        if not callable(getattr(module, "logits_and_labels", None)):
            raise Refused(
                f"Expected a click model to calibrate, found {type(module).__name__} without "
                "logits_and_labels. Give it such a method: it takes a batch, and returns one logit "
                f"and one label for every example. {_WAY_OUT}"
            )
        if not callable(getattr(module, "apply_calibration", None)):
            self._last_layer()
        self.num_slices = int(getattr(module, "num_calibration_slices", 1))

    def read(self, batch: Any, num_examples: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits, labels and slices (None without) of a batch that has so many examples."""
        logits, labels = self._module.logits_and_labels(batch)
        slices = self._module.calibration_slices(batch) if self.num_slices > 1 else None
        for name, values in (("logits", logits), ("labels", labels), ("slices", slices)):
            if values is not None and values.shape != (num_examples,):
                raise Refused(
                    f"Expected one number for each of {num_examples:,} examples, found {name} of "
                    f"shape {tuple(values.shape)}. Return them in the order of the batch."
                )
        return logits, labels, slices

    @torch.no_grad()
    def apply(self, found: LogitMap) -> None:
        """From now on the module's logits are calibrated."""
        slope, bias = found.slope, found.bias
        assert math.isfinite(slope)
        assert math.isfinite(bias)
        if callable(getattr(self._module, "apply_calibration", None)):
            self._module.apply_calibration(slope, bias)
        else:
            layer = self._last_layer()
            layer.weight.mul_(slope)
            layer.bias.mul_(slope).add_(bias)
        if self.num_slices > 1:
            self._module.apply_slice_biases(slope, list(found.slice_biases))

    def _last_layer(self) -> nn.Linear:
        """The layer that the module names, if slope and bias can go into it."""
        name, path = type(self._module).__name__, getattr(self._module, "calibrated_layer", None)
        if not isinstance(path, str):
            raise Refused(
                f"Expected {name}.calibrated_layer, the path of the last nn.Linear, or a method "
                f"apply_calibration(slope, bias), found neither. Give it one of them. {_WAY_OUT}"
            )
        layer = dict(self._module.named_modules()).get(path)
        if not isinstance(layer, nn.Linear) or layer.out_features != 1 or layer.bias is None:
            found = "no such layer" if layer is None else f"another {type(layer).__name__}"
            raise Refused(
                f"Expected an nn.Linear with one output and a bias at {path!r}, found {found}. "
                f"Name the layer that makes the logit, or write apply_calibration. {_WAY_OUT}"
            )
        uses = [p for _, p in self._module.named_parameters(remove_duplicate=False)]
        if sum(p is layer.weight or p is layer.bias for p in uses) > 2:
            raise Refused(
                f"Expected a layer of its own at {path!r}, found that it shares weights with "
                f"another: a new slope would change both. Write apply_calibration. {_WAY_OUT}"
            )
        return layer

"""What a calibration needs of a module: its logits and labels, and a place for slope and bias.

The models of this package have both. A module of the user's own has a method

    def logits_and_labels(self, batch):  # one logit and one label for every example, in order
        return self(batch), batch.labels

and either the path of its last `nn.Linear`, which has one output and a bias, as
`calibrated_layer = "head.2"`, or a method `apply_calibration(slope, bias)` that maps every logit to
slope * logit + bias from then on. The slope and bias go into the weights that are there, so that
checkpoints and exports need nothing else.

A module with T binary tasks says so by `num_calibration_tasks = T`, and has logits and labels of
shape (B, T); a label that is NaN is none. Its lines go into `calibrated_layers`, a list of one such
path for each task, or into a `calibrated_layer` with T outputs; `apply_calibration` gets slopes and
biases as tensors of shape (T,).

Slices of a public feature have biases of their own if the module has `num_calibration_slices`, a
method `calibration_slices(batch)` that numbers every example's slice from zero, and
`apply_slice_biases(slope, biases)`, by which every slice's bias b becomes slope * b + its new one.
Tasks have no slices.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_dpsparse.checks import check_whole
from lightning_dpsparse.mechanisms.logit_calibration.platt import LogitMap
from lightning_dpsparse.plugin.calibrated_layers import WAY_OUT, logit_rows
from lightning_dpsparse.refused import Refused

_MOST_TASKS, _MOST_SLICES = 1_000, 100_000


class CalibratedModule:
    """A module that can be calibrated; one that cannot is refused."""

    def __init__(self, module: LightningModule) -> None:
        self._module: Any = module
        if not callable(getattr(module, "logits_and_labels", None)):
            raise Refused(
                f"Expected a click model to calibrate, found {type(module).__name__} without "
                "logits_and_labels. Give it such a method: it takes a batch, and returns one logit "
                f"and one label for every example. {WAY_OUT}"
            )
        self.num_tasks = _number_of(
            module, "num_calibration_tasks", "logits of an example", _MOST_TASKS
        )
        """Number of logits of an example. It is read once, before training: noise depends on it."""
        self.num_slices = _number_of(
            module, "num_calibration_slices", "slices of an example's feature", _MOST_SLICES
        )
        if self.num_tasks > 1 and self.num_slices > 1:
            raise Refused(
                f"Expected tasks or slices in a calibration, found {type(module).__name__} with "
                f"num_calibration_tasks={self.num_tasks:,} and num_calibration_slices="
                f"{self.num_slices:,}. Leave out one of them. {WAY_OUT}"
            )
        for name in ("calibration_slices", "apply_slice_biases"):
            if self.num_slices > 1 and not callable(getattr(module, name, None)):
                raise Refused(
                    f"Expected a method {name} of {type(module).__name__}, which has "
                    f"num_calibration_slices={self.num_slices:,}, found none. Give it one, or "
                    f"leave the slices out. {WAY_OUT}"
                )
        if not self._applies_itself:
            logit_rows(module, self.num_tasks)

    def read(self, batch: Any, num_examples: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits, labels and slices (None without) of a batch that has so many examples.

        Logits and labels have the shape (B,), or (B, T) if there are several tasks.
        """
        logits, labels = self._module.logits_and_labels(batch)
        slices = self._module.calibration_slices(batch) if self.num_slices > 1 else None
        tasks = (self.num_tasks,) if self.num_tasks > 1 else ()
        for name, values in (("logits", logits), ("labels", labels)):
            _check_shape(name, values, (num_examples, *tasks))
        if slices is not None:
            _check_shape("slices", slices, (num_examples,))
        return logits, labels, slices

    @torch.no_grad()
    def apply(self, *lines: LogitMap) -> None:
        """From now on the module's logits are calibrated. There is one line for each task."""
        assert len(lines) == self.num_tasks
        assert all(math.isfinite(line.slope) and math.isfinite(line.bias) for line in lines)
        first = lines[0]
        if not self._applies_itself:
            for row, line in zip(logit_rows(self._module, self.num_tasks), lines, strict=True):
                row.write(line)
        elif self.num_tasks == 1:
            self._module.apply_calibration(first.slope, first.bias)
        else:
            self._module.apply_calibration(
                torch.tensor([line.slope for line in lines], device=self._module.device),
                torch.tensor([line.bias for line in lines], device=self._module.device),
            )
        if self.num_slices > 1:
            self._module.apply_slice_biases(first.slope, list(first.slice_biases))

    @property
    def _applies_itself(self) -> bool:
        return callable(getattr(self._module, "apply_calibration", None))


def _number_of(module: LightningModule, name: str, what: str, most: int) -> int:
    found = getattr(module, name, 1)
    check_whole(name, found, most=most, remedy=f"Set it to the number of {what}. {WAY_OUT}")
    return int(found)


def _check_shape(name: str, values: Any, shape: tuple[int, ...]) -> None:
    """Refuse values of another shape: examples, and tasks if there are several."""
    if isinstance(values, Tensor) and values.shape == shape:
        return
    found = (
        f"{name} of shape {_said(values.shape, shape[0])}"
        if isinstance(values, Tensor)
        else f"{name} that are no tensor but {type(values).__name__}"
    )
    tasks = "" if len(shape) == 1 else f" and each of {shape[1]:,} tasks"
    raise Refused(
        f"Expected one number for each of {shape[0]:,} examples{tasks}, in a tensor of shape "
        f"{shape}, found {found}. Return them in the order of the batch, and set the module's "
        "num_calibration_tasks to the number of its tasks."
    )


def _said(found: torch.Size, num_examples: int) -> str:
    """A shape in words. Of how many examples something is known is not for everybody to see."""
    sizes = list(map(str, found))
    if sizes and found[0] != num_examples:
        sizes[0] = "another number"
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"

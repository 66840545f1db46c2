"""The layers into which a calibration writes its lines.

A line slope * logit + bias that follows an `nn.Linear` is another `nn.Linear`: the weight times
slope, the bias times slope plus bias. So it goes into the row of the last layer that makes the
logit, and nothing has to be carried along. Several tasks have a layer each (`calibrated_layers`),
or a row each of one layer (`calibrated_layer`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_dpsparse.checks import check_names
from lightning_dpsparse.mechanisms.logit_calibration.platt import LogitMap
from lightning_dpsparse.refused import Refused

WAY_OUT = "Or leave the plan's calibration out."


@dataclass(frozen=True)
class LogitRow:
    """The row of a layer that makes the logit of one task."""

    layer: nn.Linear
    row: int

    @torch.no_grad()
    def write(self, line: LogitMap) -> None:
        """From now on this row makes slope * logit + bias."""
        row = slice(self.row, self.row + 1)
        self.layer.weight[row].mul_(line.slope)
        self.layer.bias[row].mul_(line.slope).add_(line.bias)


def logit_rows(module: nn.Module, num_tasks: int) -> list[LogitRow]:
    """One row for each task, in order; refused if the module does not name them.

    A list of layers comes before the one layer, which a model may have inherited.
    """
    paths = getattr(module, "calibrated_layers", None)
    if paths is not None:
        _check_paths(paths, num_tasks)
        return [LogitRow(_layer_at(module, path, 1), 0) for path in paths]
    path, name = getattr(module, "calibrated_layer", None), type(module).__name__
    if not isinstance(path, str):
        many = f", or {name}.calibrated_layers, a list of {num_tasks:,} such paths"
        raise Refused(
            f"Expected {name}.calibrated_layer, the path of the last nn.Linear"
            f"{many if num_tasks > 1 else ''}, or a method apply_calibration(slope, bias), found "
            f"neither. Give it one of them. {WAY_OUT}"
        )
    layer = _layer_at(module, path, num_tasks)
    return [LogitRow(layer, row) for row in range(num_tasks)]


def _check_paths(paths: Any, num_tasks: int) -> None:
    remedy = f"Give the path of each task's last nn.Linear. {WAY_OUT}"
    check_names("calibrated_layers", paths, remedy=remedy)
    found = len(set(paths))
    if not found == len(paths) == num_tasks:
        repeated = ", some of them twice" if found < len(paths) else ""
        raise Refused(
            f"Expected calibrated_layers with a layer of its own for each task, and "
            f"num_calibration_tasks={num_tasks:,} of them, found {len(paths):,} paths{repeated}. "
            f"Name one layer for each task, in the order of the logits. {WAY_OUT}"
        )


def _layer_at(module: nn.Module, path: str, num_outputs: int) -> nn.Linear:
    """The layer of this path, if slopes and biases can go into it."""
    layer = dict(module.named_modules()).get(path)
    if not isinstance(layer, nn.Linear) or layer.out_features != num_outputs or layer.bias is None:
        outputs = "one output" if num_outputs == 1 else f"{num_outputs:,} outputs, one for a task,"
        raise Refused(
            f"Expected an nn.Linear with {outputs} and a bias at {path!r}, found {_said(layer)}. "
            "Name the layer that makes the logit, or write apply_calibration; a model with several "
            f"tasks says how many in num_calibration_tasks. {WAY_OUT}"
        )
    if not (isinstance(layer.weight, nn.Parameter) and isinstance(layer.bias, nn.Parameter)):
        raise Refused(
            f"Expected a weight and a bias that are parameters at {path!r}, found some that are "
            "computed from others: a slope could not be written there. Write apply_calibration. "
            f"{WAY_OUT}"
        )
    uses = [p for _, p in module.named_parameters(remove_duplicate=False)]
    if sum(p is layer.weight or p is layer.bias for p in uses) > 2:
        raise Refused(
            f"Expected a layer of its own at {path!r}, found that it shares weights with "
            f"another: a new slope would change both. Write apply_calibration. {WAY_OUT}"
        )
    return layer


def _said(layer: nn.Module | None) -> str:
    if layer is None:
        return "no such layer"
    if not isinstance(layer, nn.Linear):
        return f"another layer, {type(layer).__name__}"
    bias = "no bias" if layer.bias is None else "a bias"
    return f"one with {layer.out_features:,} outputs and {bias}"

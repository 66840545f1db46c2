"""Hand a ready-made gradient on rows to the fused optimizer, in one call."""

from __future__ import annotations

from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor

from lightning_dpsparse.engine.lookups import Layout
from lightning_dpsparse.engine.rows import RowGradient

# F features, K most rows of one table, E width of all features


def apply_to_rows(
    kernel: Any, layout: Layout, gradients: list[RowGradient], steps_before: int
) -> None:
    """Update the given rows of each of the kernel's tables, once.

    FBGEMM only learns through a backward pass. So every row becomes a bag of its own: a lookup of
    length-1 bags, padded with empty ones to the same number for every feature, whose backward pass
    gets the rows' gradients. (Variable batches would save the padding, and are 100 times slower on
    CPU.)
    """
    most = max((gradient.rows_U.numel() for gradient in gradients), default=0)
    if most == 0:
        return
    tbe = kernel.emb_module
    if tbe.optimizer is EmbOptimType.EXACT_SGD and all(_is_run(g) for g in gradients):
        _add_runs(kernel, gradients)
        return
    first = gradients[0]
    num_features = len(layout.table_of_feature)
    lengths_FK = first.rows_U.new_zeros(num_features, most)
    gradient_KE = first.values_UD.new_zeros(most, layout.columns[-1].stop)
    rows: list[Tensor] = []
    for table, gradient in enumerate(gradients):
        feature = layout.features_of_table[table][0]  # features that share the table have none
        count = gradient.rows_U.numel()
        lengths_FK[feature, :count] = 1
        gradient_KE[:count, layout.columns[feature]] = gradient.values_UD
    for feature, table in enumerate(layout.table_of_feature):
        if layout.features_of_table[table][0] == feature:
            rows.append(gradients[table].rows_U)
    offsets = torch.nn.functional.pad(lengths_FK.flatten().cumsum(0), (1, 0))
    # Every forward pass counts a step, the training step's own too. Adam must see one.
    tbe.iter_cpu.fill_(steps_before)
    tbe.iter.fill_(steps_before)
    with torch.enable_grad():
        output = tbe(torch.cat(rows), offsets)
    output.backward(gradient_KE)


def _is_run(gradient: RowGradient) -> bool:
    return gradient.first_row is not None or gradient.rows_U.numel() == 0


@torch.no_grad()
def _add_runs(kernel: Any, gradients: list[RowGradient]) -> None:
    """SGD on consecutive rows is one addition at memory speed: no lookup, no bags."""
    learning_rate = kernel.emb_module.get_learning_rate()
    for weight, gradient in zip(kernel.split_embedding_weights(), gradients):
        if gradient.first_row is not None:
            stop = gradient.first_row + gradient.rows_U.numel()
            weight[gradient.first_row : stop].add_(gradient.values_UD, alpha=-learning_rate)

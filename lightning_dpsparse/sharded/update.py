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

    FBGEMM's optimizers only learn through a backward pass. So every row becomes a bag of its own: a
    lookup of length-1 bags, padded with empty ones to the same number for every feature, whose
    backward pass gets the rows' gradients. (Variable batches would save the padding, and are 100
    times slower on CPU.) SGD, which has no state, is applied directly.
    """
    most = max((gradient.rows_U.numel() for gradient in gradients), default=0)
    if most == 0:
        return
    tbe = kernel.emb_module
    if tbe.optimizer is EmbOptimType.EXACT_SGD:
        _descend(kernel, gradients)
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


@torch.no_grad()
def _descend(kernel: Any, gradients: list[RowGradient]) -> None:
    """SGD has no state: w -= lr g on the rows themselves, at half the price of a lookup of bags."""
    learning_rate = kernel.emb_module.get_learning_rate()
    for weight, gradient in zip(kernel.split_embedding_weights(), gradients):
        count = gradient.rows_U.numel()
        if gradient.first_row is not None:
            run = weight[gradient.first_row : gradient.first_row + count]
            run.add_(gradient.values_UD, alpha=-learning_rate)
        elif count:
            rows = weight.index_select(0, gradient.rows_U)
            rows.add_(gradient.values_UD, alpha=-learning_rate)
            weight.index_copy_(0, gradient.rows_U, rows)

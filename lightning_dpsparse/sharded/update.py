"""Hand a ready-made gradient on rows to the fused optimizer, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from torch import Tensor

from lightning_dpsparse.engine.lookups import Layout, Stack
from lightning_dpsparse.engine.rows import RowGradient, add_to_rows
from lightning_dpsparse.noise.grid import round_to_

# F features, K most rows of one table, E width of all features


class Landing(Protocol):
    """How steps become multiples of the weights' grid."""

    @property
    def grid(self) -> float | None: ...

    def scale_(self, stack: int, gradient: RowGradient, scale: float) -> None:
        """Multiply the gradient of one stack's rows, onto the grid, in place."""
        ...


def apply_to_rows(
    kernel: Any,
    layout: Layout,
    gradients: list[RowGradient],
    steps_before: int,
    *,
    also_add: list[Tensor] | None = None,
    landing: Landing | None = None,
) -> None:
    """Update the given rows of each stack of the kernel's tables, once.

    `also_add` goes to the same rows in the same write, as it is. With `landing`, rows stay on a
    grid (SGD only).

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
        _descend(tbe, layout.stacks, gradients, also_add=also_add, landing=landing)
        return
    assert len(gradients) == len(layout.widths)  # optimizers with state: every table by itself
    first = gradients[0]
    num_features = len(layout.table_of_feature)
    lengths_FK = first.rows_U.new_zeros(num_features, most)
    # Features that share a table leave all to its first one.
    firsts = sorted(features[0] for features in layout.features_of_table)
    in_order = [gradients[layout.table_of_feature[feature]] for feature in firsts]
    for feature, gradient in zip(firsts, in_order):
        lengths_FK[feature, : gradient.rows_U.numel()] = 1
    if layout.is_pooled:
        gradient_out = first.values_UD.new_zeros(most, layout.columns[-1].stop)
        for feature, gradient in zip(firsts, in_order):
            rows_here = slice(gradient.rows_U.numel())
            gradient_out[rows_here, layout.columns[feature]] = gradient.values_UD
    else:  # every lookup has a row of its own
        gradient_out = torch.cat([gradient.values_UD for gradient in in_order])
    offsets = torch.nn.functional.pad(lengths_FK.flatten().cumsum(0), (1, 0))
    set_steps(tbe, steps_before)  # the forward pass that follows counts this one
    with torch.enable_grad():
        output = tbe(torch.cat([gradient.rows_U for gradient in in_order]), offsets)
    output.backward(gradient_out)


def set_steps(tbe: Any, steps: int) -> None:
    """Correct what the kernel has counted: every forward pass, where Adam must see one a step."""
    tbe.iter_cpu.fill_(steps)
    tbe.iter.fill_(steps)


@torch.no_grad()
def _descend(
    tbe: Any,
    stacks: Sequence[Stack],
    gradients: list[RowGradient],
    *,
    also_add: list[Tensor] | None,
    landing: Landing | None,
) -> None:
    """SGD has no state: w <- (1 - lr decay) w - lr g on the rows themselves.

    At half the price of a lookup of bags, and with a weight decay that FBGEMM's SGD has not.
    """
    learning_rate = float(tbe.get_learning_rate())
    keep = 1.0 - learning_rate * float(tbe.optimizer_args.weight_decay)
    for i, (stack, gradient) in enumerate(zip(stacks, gradients)):
        count = gradient.rows_U.numel()
        if count == 0:
            continue
        weight = matrix_of(tbe, stack)
        if gradient.first_row is not None:
            run = weight[gradient.first_row : gradient.first_row + count]
            if keep != 1.0:
                run.mul_(keep)
            run.add_(gradient.values_UD, alpha=-learning_rate)
            continue
        step_UD = gradient.values_UD  # nobody needs them any more
        if landing is None:
            step_UD.mul_(-learning_rate)
        else:
            landing.scale_(i, gradient, -learning_rate)
        if keep != 1.0:
            assert also_add is None  # rows that decay pay before they are read
            new_UD = step_UD.add_(weight.index_select(0, gradient.rows_U), alpha=keep)
            if landing is not None and landing.grid is not None:
                round_to_(new_UD, landing.grid)
            weight.index_copy_(0, gradient.rows_U, new_UD)
            continue
        if also_add is not None:
            step_UD += also_add[i]
        add_to_rows(weight, gradient.rows_U, step_UD)


def matrix_of(tbe: Any, stack: Stack) -> Tensor:
    """The stack's tables as one matrix: FBGEMM lays a kernel's tables end to end."""
    first, width = stack.tables.start, tbe.dims[stack.tables.start]
    at = [tbe.weights_physical_offsets[table] for table in stack.tables]
    if at != [at[0] + start * width for start in stack.starts[:-1]]:
        raise RuntimeError("Expected a kernel's tables end to end in memory, found a gap.")
    on_host = tbe.embedding_specs[first][2] == EmbeddingLocation.HOST
    memory = tbe.weights_host if on_host else tbe.weights_dev
    return memory.detach()[at[0] : at[0] + stack.num_rows * width].view(-1, width)


def version_of(tbe: Any) -> int:
    """How often the kernel's weights were written to from Python, as torch counts."""
    return int(tbe.weights_host._version + tbe.weights_dev._version)

"""FBGEMM's kernels: everything that this package reads and writes of them, in this one file.

A kernel holds pieces of several tables in one memory, reads rows of them for the examples of all
ranks, and updates rows in its backward pass with an optimizer that is built in. Here are its
layout, its weights, its learning rate, its count of steps, and the way to hand it a gradient that
was made elsewhere. `check_kernel` reads every attribute when tables are sharded, so that a version
of FBGEMM that renamed one is refused before the first step. TorchRec's attributes are in
`upstream.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from torch import Tensor

from lightning_dpsparse.engine.lookups import Layout, Stack
from lightning_dpsparse.engine.rows import RowGradient, add_to_rows
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.upstream import TablePiece, required
from lightning_dpsparse.versions import installed_versions, show_versions

# F features, K most rows of one table, E width of all features, U rows, D width of a table

_ATTRIBUTES = (
    "current_device", "dims", "embedding_specs", "feature_table_map", "get_learning_rate", "iter",
    "iter_cpu", "optimizer", "optimizer_args", "pooling_mode", "set_optimizer_step", "weights_dev",
    "weights_host", "weights_physical_offsets",
)  # fmt: skip
"""Attributes of an FBGEMM kernel that this file uses."""


class Kernel:
    """One kernel of a sharded collection on this rank, with the pieces of tables that it holds."""

    def __init__(self, module: Any, pieces: Sequence[TablePiece]) -> None:
        self.module = module
        """TorchRec's module around the kernel: its hooks see every read."""
        self._tbe = required(module, "emb_module")
        check_kernel(self._tbe)
        self.pieces = tuple(pieces)
        self.layout = _layout_of(self._tbe)
        self.steps_before = 0
        """Number of optimizer steps that were counted when the present private step began."""
        self._own_writes = 0
        self.table_names = [piece.name for piece in self.pieces]
        self.shard_offsets = [piece.shard_offset for piece in self.pieces]
        self.has_whole_rows = all(piece.has_all_columns for piece in self.pieces)
        self.device = torch.device(self._tbe.current_device)
        self.optimizer: EmbOptimType = self._tbe.optimizer

    @property
    def learning_rate(self) -> float:
        return float(self._tbe.get_learning_rate())

    @property
    def weight_decay(self) -> float:
        return float(self._tbe.optimizer_args.weight_decay)

    @property
    def steps(self) -> int:
        """Number of optimizer steps that the kernel has counted, for Adam's bias correction."""
        return int(self._tbe.iter_cpu.item())

    def set_steps(self, steps: int) -> None:
        """Correct the count: FBGEMM counts every forward pass as a step of the optimizer."""
        self._tbe.iter_cpu.fill_(steps)
        self._tbe.iter.fill_(steps)

    @property
    def steps_to_save(self) -> int:
        """The count that a checkpoint keeps."""
        return int(self._tbe.iter.item())

    def restore_steps(self, steps: int) -> None:
        """Set the count from a checkpoint, on the device and on the host."""
        self._tbe.set_optimizer_step(steps)
        self._tbe.iter_cpu.fill_(steps)  # what the kernel itself reads

    # ---- weights --------------------------------------------------------------------------------

    def weights(self) -> list[Tensor]:
        """The tables of each stack as one matrix. Writes to it change the tables."""
        return [self._matrix(stack) for stack in self.layout.stacks]

    def _matrix(self, stack: Stack) -> Tensor:
        """One matrix over the tables of a stack, which FBGEMM lays end to end."""
        tbe, first, width = self._tbe, stack.tables.start, self.layout.widths[stack.tables.start]
        at = [tbe.weights_physical_offsets[table] for table in stack.tables]
        if at != [at[0] + start * width for start in stack.starts[:-1]]:
            raise Refused(
                "Expected FBGEMM to lay the tables of a kernel end to end in memory, found a gap "
                f"in {show_versions(installed_versions())}. Install versions that are supported."
            )
        on_host = tbe.embedding_specs[first][2] == EmbeddingLocation.HOST
        memory = tbe.weights_host if on_host else tbe.weights_dev
        return memory.detach()[at[0] : at[0] + stack.num_rows * width].view(-1, width)

    def table_weights(self) -> list[Tensor]:
        """The piece of each table by itself, as a live view."""
        found: list[Tensor] = self.module.split_embedding_weights()
        return found

    @property
    def writes_by_others(self) -> int:
        """Number of writes to the weights from Python, without those of the mechanism itself."""
        return self._version - self._own_writes

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Surround writes of the mechanism itself, which `writes_by_others` must not count."""
        before = self._version
        yield
        self._own_writes += self._version - before

    @property
    def _version(self) -> int:
        return int(self._tbe.weights_host._version + self._tbe.weights_dev._version)

    # ---- the fused optimizer --------------------------------------------------------------------

    def apply(self, gradients: list[RowGradient]) -> None:
        """Update the given rows of each stack of tables, once.

        FBGEMM's optimizers only learn through a backward pass. So every row becomes a bag of its
        own: a lookup of length-1 bags, padded with empty ones to the same number for every feature,
        whose backward pass gets the rows' gradients. (Variable batches would save the padding, and
        are 100 times slower on CPU.) SGD, which has no state, is applied directly.
        """
        most = max((gradient.rows_U.numel() for gradient in gradients), default=0)
        if most == 0:
            return
        if self.optimizer is EmbOptimType.EXACT_SGD:
            self._descend(gradients)
            return
        layout = self.layout
        assert len(gradients) == len(layout.widths)  # a stack is one table, except with SGD
        first = gradients[0]
        num_features = len(layout.table_of_feature)
        lengths_FK = first.rows_U.new_zeros(num_features, most)
        # Of features that share a table, the first one carries all its rows.
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
        self.set_steps(self.steps_before)  # the forward pass below counts this step
        with torch.enable_grad():
            output = self._tbe(torch.cat([gradient.rows_U for gradient in in_order]), offsets)
        output.backward(gradient_out)

    @torch.no_grad()
    def _descend(self, gradients: list[RowGradient]) -> None:
        """Make an SGD step on the rows themselves: w <- (1 - lr decay) w - lr g.

        SGD has no state, so it needs no kernel. This takes half the time of a lookup of bags, and
        it has weight decay, which FBGEMM's SGD lacks.
        """
        rate = self.learning_rate
        keep = 1.0 - rate * self.weight_decay
        for stack, gradient in zip(self.layout.stacks, gradients):
            count = gradient.rows_U.numel()
            if count == 0:
                continue
            weight_RD = self._matrix(stack)
            if gradient.first_row is not None:
                run_UD = weight_RD[gradient.first_row : gradient.first_row + count]
                if keep != 1.0:
                    run_UD.mul_(keep)
                run_UD.add_(gradient.values_UD, alpha=-rate)
                continue
            step_UD = gradient.values_UD.mul_(-rate)  # in place: nobody needs the gradient any more
            if keep != 1.0:
                new_UD = step_UD.add_(weight_RD.index_select(0, gradient.rows_U), alpha=keep)
                weight_RD.index_copy_(0, gradient.rows_U, new_UD)
                continue
            add_to_rows(weight_RD, gradient.rows_U, step_UD)


def check_kernel(tbe: Any) -> None:
    """Refuse a version of FBGEMM in which something that is needed has another name."""
    for name in _ATTRIBUTES:
        required(tbe, name)
    required(tbe.optimizer_args, "weight_decay")


def _layout_of(tbe: Any) -> Layout:
    """The kernel's tables and features in the engine's terms."""
    return Layout(
        table_of_feature=tuple(tbe.feature_table_map),
        widths=tuple(tbe.dims[t] for t in range(len(tbe.embedding_specs))),
        num_rows=tuple(spec[0] for spec in tbe.embedding_specs),
        is_mean=tbe.pooling_mode == PoolingMode.MEAN,
        is_stacked=tbe.optimizer is EmbOptimType.EXACT_SGD,
        is_pooled=tbe.pooling_mode != PoolingMode.NONE,
    )

"""Forms of dense gradients done naively, with whole gradients; and the sum that a step releases."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dpsparse import DenseGaussian, SparseDPSGD
from lightning_dpsparse.engine.clipping import FlatClipping
from lightning_dpsparse.engine.dense import DenseForms, DenseMechanism
from lightning_dpsparse.engine.ghost import DenseCapture
from lightning_dpsparse.engine.step import Ranks, StepConfig, clipped_sums
from lightning_dpsparse.mechanisms.eana import EANA
from lightning_dpsparse.noise.keys import RunKey, Stream
from lightning_dpsparse.noise.sources import FastNoise, NoiseSource


def decomposition(
    weight: Tensor, name: str, rank: int, step: int, noise: NoiseSource, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Algorithm 2, orthonormalised by Gram and Schmidt."""
    drawn = torch.empty(rank, weight.shape[1], dtype=dtype)
    noise.fill_(drawn, Stream("subspace", name, step), 1.0)
    start = drawn.to(weight.dtype)
    left = gram_schmidt(weight @ start.T)
    return left, gram_schmidt((left.T @ weight).T).T


def gram_schmidt(columns: Tensor) -> Tensor:
    done: list[Tensor] = []
    for vector in columns.T:
        for other in done * 2:
            vector = vector - (vector @ other) * other
        done.append(vector / vector.norm())
    return torch.stack(done, dim=1)


def top(importance: list[float], sparsity: float) -> set[int]:
    keep = len(importance) - int(sparsity * len(importance))
    return set(sorted(range(len(importance)), key=lambda i: -importance[i])[:keep])


class NaiveForm:
    """Coordinates of a whole gradient, spelled out with matrices of zeros and ones."""

    def __init__(
        self,
        mechanism: Any,
        name: str,
        weight: Tensor,
        step: int,
        noise: NoiseSource,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.mechanism, self.shape = mechanism, weight.shape
        matrix = weight.detach().flatten(1)
        rows, columns = matrix.shape
        place = math.prod(weight.shape[2:])
        sparsity = getattr(mechanism, "sparsity", 0.0)
        if step < getattr(mechanism, "warmup", 0):
            sparsity = 0.0
        if isinstance(mechanism, SparseDPSGD):
            kernels = [float(k.abs().sum()) for row in weight for k in row]
            live = top(kernels, sparsity)
            flags = [float(k in live) for k in range(len(kernels)) for _ in range(place)]
            self.mask = torch.tensor(flags, dtype=torch.float64).view(rows, columns)
            return
        self.left, self.right = decomposition(matrix, name, mechanism.rank, step, noise, dtype)
        outputs = top([float(w.abs().sum()) for w in weight], sparsity)
        inputs = top([float(weight[:, i].abs().sum()) for i in range(weight.shape[1])], sparsity)
        self.rows = torch.tensor([float(o in outputs) for o in range(rows)]).double()
        self.columns = torch.tensor([float(i // place in inputs) for i in range(columns)]).double()

    def of(self, gradient: Tensor) -> Tensor:
        gradient = gradient.flatten(1)
        if isinstance(self.mechanism, SparseDPSGD):
            return (gradient * self.mask).flatten()
        left = self.rows[:, None] * (gradient @ self.right.T)
        right = (self.left.T @ gradient) * self.columns
        return torch.cat([left.flatten(), right.flatten()])

    def back(self, numbers: Tensor) -> Tensor:
        if isinstance(self.mechanism, SparseDPSGD):
            return numbers.view(self.shape)
        rank, cut = self.mechanism.rank, self.left.numel()
        left, right = numbers[:cut].view(-1, rank), numbers[cut:].view(rank, -1)
        whole = left @ self.right + self.left @ right - self.left @ self.left.T @ left @ self.right
        return whole.view(self.shape)


def dense_sum(
    model: nn.Module,
    losses: Callable[[], Tensor],
    mechanism: DenseMechanism | None = None,
    first_of_unit_B: Tensor | None = None,
    clip_norm: float = 1.0,
) -> Tensor:
    """All that a step would release of a model without tables, before noise, as one vector."""
    noise = FastNoise(RunKey.fixed(3))
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    capture = DenseCapture(parameters)
    capture.set_forms(DenseForms(mechanism or DenseGaussian(), model, parameters).at(7, noise))
    with capture:
        loss_B = losses()
    config = StepConfig(EANA(), FlatClipping(), clip_norm, 0.0, expected_batch=1.0, noise=noise)
    ranks = Ranks(len(loss_B), 0, lambda tensor: None)
    state = config.open([])
    sums = clipped_sums(loss_B, [], capture, config, state, ranks, 7, first_of_unit_B)
    return sums.dense.double()

"""Sparse DP-SGD for dense layers: small weights are frozen (Luo et al. 2021, CVPR).

Every number that a step releases gets noise, and small weights lose most by it. So a step releases
gradients on the largest weights only. Which weights are large is read from the model before the
step, which is private already, so the choice costs nothing. This is the baseline of the LSG paper
(arXiv:2207.02699) that has sparsity and no low rank; see `lsg.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dpsparse.checks import check_whole
from lightning_dpsparse.engine.dense import Form, OnLayers
from lightning_dpsparse.engine.outer_products import (
    Positions,
    by_position,
    outer_sum,
    weight_square_norm,
)
from lightning_dpsparse.mechanisms.lsg import check_sparsity, most_important
from lightning_dpsparse.noise.sources import NoiseSource

# B examples, T positions, O outputs, I inputs (times places in a kernel), M live numbers

_MOST_NUMBERS = 1 << 22
"""Most numbers of per-example gradients that are built at a time."""


@dataclass(frozen=True)
class SparseDPSGD(OnLayers):
    """Releases gradients on the largest weights only.

    In a convolution these are the kernels with the largest sums of absolute weights. All other
    weights are frozen in the step: they count for no norm, and get no noise and no update.
    """

    sparsity: float
    """Fraction of the weights of a layer that are frozen in a step. 0 freezes nothing."""

    warmup: int = 0
    """Number of steps before anything is frozen: initial weights do not show yet what matters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sparsity(self.sparsity)
        check_whole("warmup", self.warmup, 0)

    def form(
        self, name: str, weight_OI: Tensor, columns: int, noise: NoiseSource, step: int
    ) -> Form | None:
        if step < self.warmup or self.sparsity == 0:
            return None
        kernels = weight_OI.abs().view(-1, columns).sum(1)
        live = most_important(kernels, self.sparsity)
        is_live = torch.zeros_like(kernels).index_fill_(0, live, 1.0)
        is_live_OI = is_live[:, None].expand(-1, columns).reshape(weight_OI.shape)
        return Masked(is_live_OI)


class Masked(Form):
    """A gradient as the list of its live numbers."""

    def __init__(self, is_live_OI: Tensor) -> None:
        self._is_live_OI = is_live_OI
        self._live_M = is_live_OI.flatten().nonzero().squeeze(1)
        self.size = self._live_M.numel()

    def square_norms(self, positions: Positions, first_of_unit_B: Tensor | None) -> Tensor:
        return weight_square_norm(positions, first_of_unit_B, self._square_norm)

    def weighted_sum(self, positions: Positions, factors_B: Tensor, out: Tensor) -> None:
        sum_OI = torch.empty_like(self._is_live_OI, dtype=out.dtype)
        outer_sum(*by_position(positions, factors_B), out=sum_OI)
        torch.index_select(sum_OI.flatten(), 0, self._live_M, out=out)

    def rebuild(self, released: Tensor) -> Tensor:
        whole = released.new_zeros(self._is_live_OI.numel())
        return whole.index_copy_(0, self._live_M, released).view_as(self._is_live_OI)

    def _square_norm(self, a: Tensor, g: Tensor) -> Tensor:
        """sum over live (o, i) of (sum_t g_to a_ti)^2.

        With one position this is (g^2)^T live a^2. With more positions the gradients are built, for
        a few examples at a time.
        """
        live_OI = self._is_live_OI.to(g.dtype)
        if a.shape[1] == 1:
            # The squares of g and a may leave the range of floats where that of g a does not.
            a, largest_a = _scaled(a)
            g, largest_g = _scaled(g)
            norms_B = ((g.square() @ live_OI) * a.square()).sum((1, 2)).sqrt_()
            return (norms_B * largest_a * largest_g).square_()
        at_once = max(1, _MOST_NUMBERS // live_OI.numel())
        squares = [
            (torch.einsum("bto,bti->boi", g_few, a_few).square_() * live_OI).sum((1, 2))
            for a_few, g_few in zip(a.split(at_once), g.split(at_once))
        ]
        return torch.cat(squares)


def _scaled(value: Tensor) -> tuple[Tensor, Tensor]:
    """Every example divided by its largest absolute number, and these numbers, (B,)."""
    largest_B = value.abs().amax((1, 2)).clamp_min(torch.finfo(value.dtype).tiny)
    return value / largest_B[:, None, None], largest_B

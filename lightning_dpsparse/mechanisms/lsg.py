"""Low-rank gradients for dense layers: RGP, and LSG, which makes them sparse as well.

Every number that a step releases gets noise, so a layer suffers less if it releases fewer. A weight
W is decomposed into L R by one step of the power method, and a step releases gradients on L and R:
rank * (outputs + inputs) numbers instead of outputs * inputs, each with the same noise.

References: Yu et al. 2021, RGP (arXiv:2106.09352); Ito et al. 2022, LSG (arXiv:2207.02699). We
correct the papers in three points: L and R of all layers are clipped together and with the tables,
so that a step is one Gaussian, not two for every layer; outputs and inputs that do *not* matter are
frozen; W is the weight before the step. The papers write W with inputs first; here, as in PyTorch,
outputs come first. Equation 3 is the same either way as long as there is no noise and nothing is
frozen; otherwise its last term is made of dL here, and of dR in the papers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dpsparse.checks import check_number, check_whole
from lightning_dpsparse.engine.dense import Form, OnLayers
from lightning_dpsparse.engine.outer_products import (
    Positions,
    by_position,
    outer_square_norm,
    outer_sum,
    weight_square_norm,
)
from lightning_dpsparse.noise.keys import Stream
from lightning_dpsparse.noise.sources import NoiseSource

# B examples, T positions, O outputs, I inputs (times places in a kernel), K rank, N live outputs,
# M live inputs


@dataclass(frozen=True)
class RGP(OnLayers):
    """Releases gradients on two factors L and R of each weight, of the given rank.

    A layer whose factors would be no smaller than its weight releases the gradient itself.
    """

    rank: int
    """Number of columns of L and of rows of R, for every layer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("rank", self.rank)

    def form(
        self, name: str, weight_OI: Tensor, columns: int, noise: NoiseSource, step: int
    ) -> Form | None:
        outputs, inputs = weight_OI.shape
        if self.rank * (outputs + inputs) >= outputs * inputs:
            return None
        random_KI = weight_OI.new_empty(self.rank, inputs)
        noise.fill_(random_KI, Stream("subspace", name, step), 1.0)
        left_OK, right_KI = decompose(weight_OI, random_KI)
        return LowRank(left_OK, right_KI, *self._live(weight_OI, columns, step))

    def _live(
        self, weight_OI: Tensor, columns: int, step: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Outputs and inputs that are updated in this step; None means all of them."""
        return None, None


@dataclass(frozen=True)
class LSG(RGP):
    """RGP on those rows of L and columns of R only whose outputs and inputs matter most.

    An output or an input matters by the sum of its absolute weights. In a convolution an input is a
    channel, with all places of its kernels (equations 4 to 7).
    """

    sparsity: float = 0.3
    """Fraction of the outputs, and of the inputs, that are frozen in a step. 0 freezes nothing."""

    warmup: int = 0
    """Number of steps before anything is frozen: initial weights do not show yet what matters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sparsity(self.sparsity)
        check_whole("warmup", self.warmup, 0)

    def _live(
        self, weight_OI: Tensor, columns: int, step: int
    ) -> tuple[Tensor | None, Tensor | None]:
        if step < self.warmup or self.sparsity == 0:
            return None, None
        size_OI = weight_OI.abs()
        live_N = most_important(size_OI.sum(1), self.sparsity)
        channel_N = most_important(size_OI.sum(0).view(-1, columns).sum(1), self.sparsity)
        places = torch.arange(columns, device=channel_N.device)
        return live_N, (channel_N[:, None] * columns + places).flatten()


def check_sparsity(sparsity: float) -> None:
    """Refuse what is no share of the weights that can be frozen."""
    check_number("sparsity", sparsity, least=0, below=1, remedy="Freezing nothing is 0.")


def most_important(importance: Tensor, sparsity: float) -> Tensor:
    """Positions of the largest values, increasing; a fraction `sparsity` of all is left out.

    >>> most_important(torch.tensor([1.0, 3.0, 2.0, 0.0]), 0.5)
    tensor([1, 2])
    """
    frozen = int(sparsity * importance.numel())
    return torch.topk(importance, importance.numel() - frozen).indices.sort().values


def decompose(weight_OI: Tensor, random_KI: Tensor) -> tuple[Tensor, Tensor]:
    """L (O, K) and R (K, I), which span nearly the largest singular vectors of a weight.

    Columns of L and rows of R are orthonormal. They come from one step of the power method with a
    random start (algorithm 2).
    """
    left_OK = torch.linalg.qr(weight_OI @ random_KI.mT).Q
    right_IK = torch.linalg.qr(weight_OI.mT @ left_OK).Q
    return left_OK, right_IK.mT.contiguous()


class LowRank(Form):
    """Gradients dL = G R^T and dR = L^T G, on their live rows and columns (equation 8).

    G is a sum of outer products g a^T, so these are sums of g (R a)^T and (L^T g) a^T.
    """

    def __init__(
        self,
        left_OK: Tensor,
        right_KI: Tensor,
        live_N: Tensor | None = None,
        live_M: Tensor | None = None,
    ) -> None:
        self.left_OK, self.right_KI, self.live_N, self.live_M = left_OK, right_KI, live_N, live_M
        (outputs, rank), inputs = left_OK.shape, right_KI.shape[1]
        live_outputs = outputs if live_N is None else live_N.numel()
        live_inputs = inputs if live_M is None else live_M.numel()
        self._sizes = [live_outputs * rank, rank * live_inputs]
        self.size = sum(self._sizes)

    def square_norms(self, positions: Positions, first_of_unit_B: Tensor | None) -> Tensor:
        return weight_square_norm(positions, first_of_unit_B, self._square_norm)

    def weighted_sum(self, positions: Positions, factors_B: Tensor, out: Tensor) -> None:
        left_OK, right_KI = torch.empty_like(self.left_OK), torch.empty_like(self.right_KI)
        a_RI, g_RO, f_R = by_position(positions, factors_B)
        outer_sum(a_RI @ self.right_KI.mT, g_RO, f_R, out=left_OK)
        outer_sum(a_RI, g_RO @ self.left_OK, f_R, out=right_KI)
        for piece, part in zip(self._split(out), self._live_of(left_OK, right_KI)):
            piece.copy_(part)

    def rebuild(self, released: Tensor) -> Tensor:
        """dW = dL R + L dR - L L^T dL R (equation 3), with zeros for what is frozen."""
        left_OK, right_KI = self._split(released)
        if self.live_N is not None:
            left_OK = torch.zeros_like(self.left_OK).index_copy_(0, self.live_N, left_OK)
        if self.live_M is not None:
            right_KI = torch.zeros_like(self.right_KI).index_copy_(1, self.live_M, right_KI)
        outside_OK = left_OK - self.left_OK @ (self.left_OK.mT @ left_OK)
        return outside_OK @ self.right_KI + self.left_OK @ right_KI

    def _square_norm(self, a_BTI: Tensor, g_BTO: Tensor) -> Tensor:
        left_OK, right_KI = self.left_OK.to(g_BTO.dtype), self.right_KI.to(a_BTI.dtype)
        left = outer_square_norm(a_BTI @ right_KI.mT, _masked(g_BTO, self.live_N))
        return left + outer_square_norm(_masked(a_BTI, self.live_M), g_BTO @ left_OK)

    def _split(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the live rows of dL, and of the live columns of dR."""
        rank = self.right_KI.shape[0]
        left, right = flat.split(self._sizes)
        return left.view(-1, rank), right.view(rank, -1)

    def _live_of(self, left_OK: Tensor, right_KI: Tensor) -> tuple[Tensor, Tensor]:
        return (
            left_OK if self.live_N is None else left_OK[self.live_N],
            right_KI if self.live_M is None else right_KI[:, self.live_M],
        )


def _masked(values: Tensor, live: Tensor | None) -> Tensor:
    """Values with zeros in all columns that are not live. To copy the live ones would be slower."""
    if live is None:
        return values
    is_live = values.new_zeros(values.shape[-1]).index_fill_(0, live, 1.0)
    return values * is_live

"""Low-rank gradients for dense layers: RGP, and LSG, which makes them sparse as well.

A weight W is taken apart into L R by one step of the power method, and a step releases gradients on
L and R: rank * (outputs + inputs) numbers instead of outputs * inputs, each with the same noise.

References: Yu et al. 2021, RGP (arXiv:2106.09352); Ito et al. 2022, LSG (arXiv:2207.02699). Read
with these corrections: L and R of all layers are clipped together and with the tables, so that a
step is one Gaussian, not two for every layer; units that do *not* matter are frozen; W is the one
before the step. The papers write W with inputs first; here, as in PyTorch, outputs come first, and
without noise equation 3 is the same either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dpsparse.engine.dense import Form, OnLayers
from lightning_dpsparse.engine.uses import Positions, by_position, outer_sum, weight_square_norm
from lightning_dpsparse.noise.keys import Stream
from lightning_dpsparse.noise.sources import NoiseSource

# B examples, T positions, O outputs, I inputs (times places in a kernel), K rank, N live outputs,
# M live inputs


@dataclass(frozen=True)
class RGP(OnLayers):
    """Gradients on L and R of the given rank.

    A layer whose factors would be no smaller than itself stays as it is.
    """

    rank: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1:
            raise ValueError(f"Expected rank >= 1, found {self.rank}.")

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
        """Outputs and inputs that are updated; None is all."""
        return None, None


@dataclass(frozen=True)
class LSG(RGP):
    """The same, only on rows of L and columns of R whose outputs and inputs matter most.

    A unit matters by the sum of its absolute weights: those of an output, or of an input; of a
    whole kernel in a convolution (equations 4 to 7).
    """

    sparsity: float = 0.3
    """The part of the outputs, and of the inputs, that is frozen."""

    warmup: int = 0
    """Steps before anything is frozen: weights at their initial values say little."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sparsity(self.sparsity)
        if self.warmup < 0:
            raise ValueError(f"Expected warmup >= 0, found {self.warmup}.")

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
    if not 0 <= sparsity < 1:
        raise ValueError(f"Expected sparsity of at least 0 and below 1, found {sparsity}.")


def most_important(importance: Tensor, sparsity: float) -> Tensor:
    """Where the largest stand, in order, without a `sparsity` part of all.

    >>> most_important(torch.tensor([1.0, 3.0, 2.0, 0.0]), 0.5)
    tensor([1, 2])
    """
    frozen = int(sparsity * importance.numel())
    return torch.topk(importance, importance.numel() - frozen).indices.sort().values


def decompose(weight_OI: Tensor, random_KI: Tensor) -> tuple[Tensor, Tensor]:
    """L (O, K) and R (K, I), with orthonormal columns and rows, near the span of the largest
    singular vectors: one step of the power method from a random start (algorithm 2)."""
    left_OK = torch.linalg.qr(weight_OI @ random_KI.mT).Q
    right_IK = torch.linalg.qr(weight_OI.mT @ left_OK).Q
    return left_OK, right_IK.mT.contiguous()


@dataclass(frozen=True)
class LowRank(Form):
    """dL = G R^T and dR = L^T G, on their live rows and columns (equation 8).

    G is a sum of outer products g a^T, so these are sums of g (R a)^T and (L^T g) a^T.
    """

    left_OK: Tensor
    right_KI: Tensor
    live_N: Tensor | None = None
    live_M: Tensor | None = None

    @property
    def size(self) -> int:  # type: ignore[override]
        return self._left_size + self.right_KI.shape[0] * self._num_inputs

    @property
    def _left_size(self) -> int:
        outputs = self.left_OK.shape[0] if self.live_N is None else self.live_N.numel()
        return outputs * self.left_OK.shape[1]

    @property
    def _num_inputs(self) -> int:
        return self.right_KI.shape[1] if self.live_M is None else self.live_M.numel()

    def square_norms(self, positions: Positions, leader_B: Tensor | None) -> Tensor:
        left, right = self._factors(*positions)
        return weight_square_norm(left, leader_B) + weight_square_norm(right, leader_B)

    def weighted_sum(self, uses: Sequence[Positions], factors_B: Tensor, out: Tensor) -> None:
        out.zero_()
        total_NK, total_KM = self._split(out)
        for positions in uses:
            for part, total in zip(self._factors(*positions), (total_NK, total_KM)):
                sum_of_use = total if len(uses) == 1 else torch.empty_like(total)
                outer_sum(*by_position(part, factors_B), out=sum_of_use)
                if sum_of_use is not total:
                    total += sum_of_use

    def rebuild(self, released: Tensor) -> Tensor:
        """dW = dL R + L dR - L L^T dL R (equation 3), with zeros for what is frozen."""
        left_NK, right_KM = self._split(released)
        if self.live_N is not None and self.live_M is not None:
            left_OK = torch.zeros_like(self.left_OK).index_copy_(0, self.live_N, left_NK)
            right_KI = torch.zeros_like(self.right_KI).index_copy_(1, self.live_M, right_KM)
        else:
            left_OK, right_KI = left_NK, right_KM
        outside_OK = left_OK - self.left_OK @ (self.left_OK.mT @ left_OK)
        return outside_OK @ self.right_KI + self.left_OK @ right_KI

    def _factors(self, a_BTI: Tensor, g_BTO: Tensor) -> tuple[Positions, Positions]:
        """Of dL, with outputs N and inputs K, and of dR, with outputs K and inputs M."""
        live_g, live_a = g_BTO, a_BTI
        if self.live_N is not None and self.live_M is not None:
            live_g, live_a = g_BTO[..., self.live_N], a_BTI[..., self.live_M]
        return Positions(a_BTI @ self.right_KI.mT, live_g), Positions(live_a, g_BTO @ self.left_OK)

    def _split(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        rank = self.right_KI.shape[0]
        left, right = flat.split([self._left_size, rank * self._num_inputs])
        return left.view(-1, rank), right.view(rank, -1)

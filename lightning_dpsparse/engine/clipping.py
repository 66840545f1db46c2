"""From norms to factors that bound every example's gradient."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from lightning_dpsparse.refused import Refused

# B examples, K groups of parameters


class Clipping(ABC):
    """Factors f with sum over groups k of (f_kb n_kb)^2 <= C^2 for every example b."""

    @property
    def num_groups(self) -> int:
        return 1

    def groups_of(self, names: list[str]) -> list[int]:
        """The group of each table or dense parameter."""
        return [0] * len(names)

    @abstractmethod
    def factors(self, squares_KB: Tensor, clip_norm: float | Tensor) -> Tensor:
        """Factors (K, B) from squared norms (K, B), for C of all examples or of each, (B,)."""


@dataclass(frozen=True)
class FlatClipping(Clipping):
    """One norm over all parameters of an example.

    f_b = min(1, C / n_b), and f_b = 0 where n_b is not finite.

    Guarantees: f_b n_b <= C.
    Reference: Abadi et al. 2016, Algorithm 1 (arXiv:1607.00133).

    >>> FlatClipping().factors(torch.tensor([[16.0, 0.25, torch.inf]]), 1.0)
    tensor([[0.2500, 1.0000, 0.0000]])
    """

    def factors(self, squares_KB: Tensor, clip_norm: float | Tensor) -> Tensor:
        return _shrink(squares_KB, clip_norm)


@dataclass(frozen=True)
class AutomaticClipping(Clipping):
    """Every gradient is scaled to a norm just under C, however small it was.

    f_b = C / (n_b + stability), and f_b = 0 where n_b is not finite.

    Guarantees: f_b n_b < C.
    Reference: Bu et al. 2023, Automatic Clipping (arXiv:2206.07136), AUTO-S.

    >>> AutomaticClipping(stability=0.01).factors(torch.tensor([[1.0, 0.0]]), 1.0)
    tensor([[  0.9901, 100.0000]])
    """

    stability: float = 0.01

    def __post_init__(self) -> None:
        if self.stability <= 0:
            raise Refused(f"Expected stability > 0, found {self.stability}.")

    def factors(self, squares_KB: Tensor, clip_norm: float | Tensor) -> Tensor:
        return _finite(clip_norm / (squares_KB.sqrt() + self.stability))


@dataclass(frozen=True)
class GroupClipping(Clipping):
    """A norm for each group of parameters, with C_k = C share_k and shares normalised.

    f_kb = min(1, C_k / n_kb), with sum_k C_k^2 = C^2, and f_kb = 0 where n_kb is not finite.

    Guarantees: sum_k (f_kb n_kb)^2 <= C^2, so the noise that goes with C covers it.
    """

    shares: Mapping[str, float]
    """Pattern of names (as in a shell) to the group's share. The first match counts."""

    def __post_init__(self) -> None:
        if not self.shares or min(self.shares.values()) <= 0:
            raise Refused(f"Expected positive shares, found {dict(self.shares)}.")

    @property
    def num_groups(self) -> int:
        return len(self.shares)

    def groups_of(self, names: list[str]) -> list[int]:
        patterns = list(self.shares)
        groups = []
        for name in names:
            match = next((k for k, p in enumerate(patterns) if fnmatchcase(name, p)), None)
            if match is None:
                raise Refused(
                    f"Expected every parameter to belong to a group, found none for {name!r} among "
                    f"{patterns}. Add a pattern, or '*' at the end."
                )
            groups.append(match)
        return groups

    def factors(self, squares_KB: Tensor, clip_norm: float | Tensor) -> Tensor:
        total = math.sqrt(sum(share**2 for share in self.shares.values()))
        bounds = [clip_norm * (share / total) for share in self.shares.values()]
        return torch.stack([_shrink(row, bound) for row, bound in zip(squares_KB, bounds)])


def _shrink(squares: Tensor, bound: float | Tensor) -> Tensor:
    # An infinite bound clips nothing; inf / 0 is clamped to one all the same.
    norms = squares.sqrt().clamp_min_(torch.finfo(squares.dtype).tiny)
    return _finite(norms.reciprocal_().mul_(bound).clamp_max_(1.0))


def _finite(factors: Tensor) -> Tensor:
    """An example whose gradient overflowed or is not a number counts nothing.

    C / inf is zero by itself.
    """
    return factors.nan_to_num_(nan=0.0, posinf=torch.inf)

"""Clip factors: from the norm of every example's gradient to a factor that bounds it.

Noise can hide one example in a sum only if that example cannot move the sum far. So each gradient
is multiplied by a factor that makes its norm at most the clip norm C. The classes below differ in
how they choose the factor. Where a user is protected, everything here holds for the summed
gradient of the user's examples.

Read next: `norms.py`, the norms of tables; `ghost.py`, those of dense layers; `step.py`, their use.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from lightning_dpsparse.checks import check_mapping, check_number
from lightning_dpsparse.refused import Refused

# B examples, K groups of parameters


class Clipping(ABC):
    """Chooses factors f with sum over groups k of (f_kb n_kb)^2 <= C^2 for every example b."""

    @property
    def num_groups(self) -> int:
        return 1

    def groups_of(self, names: list[str]) -> list[int]:
        """Return the group of each table or dense parameter, a number below `num_groups`."""
        return [0] * len(names)

    def check_parameters(self, names: Collection[str]) -> None:  # noqa: B027 (most have none)
        """Refuse settings that name tables or parameters which the model does not have."""

    @abstractmethod
    def factors(self, squares_KB: Tensor, clip_norm: float | Tensor) -> Tensor:
        """Compute factors (K, B) from squared norms (K, B).

        `clip_norm` is one C for all examples, or one C for each of them, (B,).
        """


@dataclass(frozen=True)
class FlatClipping(Clipping):
    """Clips by one norm over all parameters of an example.

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
    """Scales every gradient to a norm just under C, however small it was.

    f_b = C / (n_b + stability), and f_b = 0 where n_b is not finite.

    Guarantees: f_b n_b < C.
    Reference: Bu et al. 2023, Automatic Clipping (arXiv:2206.07136), AUTO-S.

    >>> AutomaticClipping(stability=0.01).factors(torch.tensor([[1.0, 0.0]]), 1.0)
    tensor([[  0.9901, 100.0000]])
    """

    stability: float = 0.01

    def __post_init__(self) -> None:
        check_number("stability", self.stability, above=0, remedy="The default is 0.01.")

    def factors(self, squares_KB: Tensor, clip_norm: float | Tensor) -> Tensor:
        return _finite(clip_norm / (squares_KB.sqrt() + self.stability))


@dataclass(frozen=True)
class GroupClipping(Clipping):
    """Clips each group of parameters by a norm of its own.

    C_k = C share_k, where the shares are scaled so that their squares add up to one.
    f_kb = min(1, C_k / n_kb), with sum_k C_k^2 = C^2, and f_kb = 0 where n_kb is not finite.

    Guarantees: sum_k (f_kb n_kb)^2 <= C^2, so the noise that goes with C covers it.
    """

    shares: Mapping[str, float]
    """The share of each group, by a pattern of parameter names (as in a shell). A name belongs to
    the first pattern that matches it."""

    def __post_init__(self) -> None:
        check_mapping("shares", self.shares)
        if not self.shares:
            raise Refused("Expected positive shares, found none. Give each group of layers one.")
        for pattern, share in self.shares.items():
            check_number(f"positive shares: that of {pattern!r}", share, above=0)

    @property
    def num_groups(self) -> int:
        return len(self.shares)

    def check_parameters(self, names: Collection[str]) -> None:
        for pattern in self.shares:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise Refused(
                    f"Expected patterns of tables' and parameters' names in shares, found "
                    f"{pattern!r}, which matches none of {sorted(names)}. Correct it, or leave it "
                    "out."
                )

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
    # An infinite bound clips nothing: inf / n is clamped to one. The norm zero is raised to a
    # tiny number first, so that its factor is one as well.
    norms = squares.sqrt().clamp_min_(torch.finfo(squares.dtype).tiny)
    return _finite(norms.reciprocal_().mul_(bound).clamp_max_(1.0))


def _finite(factors: Tensor) -> Tensor:
    """Set factors that are not numbers to zero, so that these examples count nothing.

    An example whose norm is infinite has the factor zero already, because C / inf is zero.
    """
    return factors.nan_to_num_(nan=0.0, posinf=torch.inf)

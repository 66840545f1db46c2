"""Attacks on the last digits of released numbers: what rounding tells of the sum under the noise.

A step releases y = x + n. The adversary knows everything but one membership: it knows two candidate
sums, x with the target and x without, and how noise is drawn. On the real line n hides which of the
two it was. In a computer n comes from a finite set, and x + n is rounded: for the wrong x there may
be no n at all that leads to y, however large the noise is. The attacks ask, number by number, how
well y - x fits to what the sampler can have drawn, and compare the candidates.

    unreachable  y must be the rounded sum of x and of some float32 number, whatever the sampler
    angle        torch draws float32 normals in pairs, radius times cosine and sine of one of 2^24
                 angles: y - x must point in one of these directions
    off grid     noise consists of multiples of a public spacing: y - x must be close to one
    rounding     y is a multiple of one spacing that was rounded to another: where the spacing was
                 wider, some numbers are never reached; where it was finer, some are reached more
                 often than others. Candidates are then two spacings, not two sums

Against noise and sums on one public grid (`noise/grid.py`) the first three must guess.

References: Mironov 2012 (CCS), who read the low bits of Laplace noise; Jin, McMurtry, Rubinstein,
Ohrimenko 2022 (arXiv:2112.05307), for samplers of normal noise in pairs; Haney, Desfontaines,
Hartman, Shrestha, Hay 2022 (arXiv:2207.13793), for what rounding of the sum leaves.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_dpsparse.noise.grid import round_to_

Scores = dict[str, NDArray[np.float64]]
"""A number for each trial, by the name of the attack. A high one says that the target was in."""

_BLOCK = 16
"""torch fills float32 tensors in blocks: the cosines of eight pairs, then their sines."""
_ANGLES = 2.0**24

_RARE = 0.01
"""Count of numbers that a candidate never leads to. It is not zero, since float64 may err."""

# M trials, D numbers of each


def attacks_on_sums(
    released_MD: Tensor, without_MD: Tensor, with_MD: Tensor, grid: float | None = None
) -> Scores:
    """How much each trial's numbers look as if the target's gradient were among the sums.

    `released_MD` is float32, as it came out of the step. `without_MD` and `with_MD` are the float32
    sums before any noise, without and with the target; `grid` is the spacing of the noise, if it
    has one. A sum that the step rounds to the grid is known to be rounded: the attacks take the
    candidates as they are, and rounded, and both are scored.
    """
    candidates = {"": (without_MD, with_MD)}
    if grid is not None:
        rounded = (round_to_(without_MD.clone(), grid), round_to_(with_MD.clone(), grid))
        candidates[", rounded"] = rounded
    scores = {}
    for suffix, (out_MD, in_MD) in candidates.items():
        more = is_unreachable(released_MD, out_MD).sum(1) - is_unreachable(released_MD, in_MD).sum(
            1
        )
        scores["unreachable" + suffix] = more.double()
        if released_MD.shape[1] % _BLOCK == 0:
            fits = fit_to_angles(released_MD, in_MD) - fit_to_angles(released_MD, out_MD)
            scores["angle" + suffix] = fits
        if grid is not None:
            fits = fit_to_grid(released_MD, in_MD, grid) - fit_to_grid(released_MD, out_MD, grid)
            scores["off grid" + suffix] = fits
    return {name: score_M.cpu().numpy() for name, score_M in scores.items()}


def is_unreachable(released: Tensor, sums: Tensor) -> Tensor:
    """Numbers that no float32 noise can have made of these sums, in float32.

    Where noise is larger than its sum with x, it has fewer digits than x: n = y - x must do without
    the last digits of x.

    >>> third = torch.tensor([1.0]) / 3
    >>> is_unreachable(third + 100.0, third), is_unreachable(third, torch.tensor([-100.0]))
    (tensor([False]), tensor([True]))
    """
    nearest = (released.double() - sums.double()).float()
    # Below a power of two numbers lie closer than above: the neighbours may do what it does not.
    up, down = torch.full_like(nearest, math.inf), torch.full_like(nearest, -math.inf)
    tries = (nearest, torch.nextafter(nearest, up), torch.nextafter(nearest, down))
    return torch.stack([sums + noise != released for noise in tries]).all(0)


def fit_to_angles(released_MD: Tensor, sums_MD: Tensor) -> Tensor:
    """How close pairs of `released - sums` come to angles that torch draws: D / 2 is perfect.

    Averages about zero where they have nothing to do with such angles.
    """
    pairs = (released_MD.double() - sums_MD.double()).view(len(released_MD), -1, 2, _BLOCK // 2)
    angle = torch.atan2(pairs[:, :, 1], pairs[:, :, 0]).remainder(2.0 * math.pi)
    nearest = (angle * (_ANGLES / (2.0 * math.pi))).round()
    # torch multiplies in float32, so that angles are not evenly spaced.
    around = torch.stack([nearest - 1.0, nearest, nearest + 1.0])
    drawn = ((around / _ANGLES).float() * torch.tensor(2.0 * math.pi)).double()
    apart = (angle - drawn).abs().amin(0) * (_ANGLES / (2.0 * math.pi))
    return torch.cos(2.0 * math.pi * apart.clamp_max_(0.5)).flatten(1).sum(1)


def fit_to_grid(released_MD: Tensor, sums_MD: Tensor, grid: float) -> Tensor:
    """How close `released - sums` comes to multiples of `grid`: D is perfect, zero is chance."""
    multiples_MD = (released_MD.double() - sums_MD.double()).mul_(1.0 / grid)
    return torch.cos(2.0 * math.pi * (multiples_MD - multiples_MD.round())).sum(1)


def attack_on_rounding(
    released_MD: Tensor, grid: float, spacing_without: float, spacing_with: float
) -> Scores:
    """How much numbers look like rounded multiples of one spacing rather than of another.

    Without the target they are multiples of `spacing_without`, rounded to `grid`; with it, of
    `spacing_with`. The score is the log-likelihood ratio, sum_d log(#with / mean) - log(#without /
    mean), where # counts the multiples that are rounded to y_d.
    """
    score_M = _log_shares(released_MD, spacing_with, grid).sum(1)
    score_M -= _log_shares(released_MD, spacing_without, grid).sum(1)
    return {"rounding": score_M.cpu().numpy()}


def _log_shares(values: Tensor, spacing: float, grid: float) -> Tensor:
    counts = multiples_rounded_to(values, spacing, grid).double()
    return torch.log((counts + _RARE) / (grid / spacing + _RARE))


def multiples_rounded_to(values: Tensor, spacing: float, grid: float) -> Tensor:
    """How many multiples of `spacing` have each of the values, on `grid`, as the nearest there.

    >>> multiples_rounded_to(torch.arange(6.0), 1.6, 1.0)
    tensor([1, 0, 1, 1, 0, 1])
    """
    place = (values.double() / grid).round()
    first = torch.floor((place - 0.5) * (grid / spacing))
    count = torch.zeros_like(place, dtype=torch.int64)
    for k in range(math.ceil(grid / spacing) + 2):
        count += ((first + k) * (spacing / grid)).round() == place
    return count

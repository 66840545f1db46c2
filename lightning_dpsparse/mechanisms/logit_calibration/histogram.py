"""Counts of the training data by logit, label and slice, and the noise that lets them be seen.

The counts are whole numbers and secret. Their noise lies on a public grid of powers of two, at most
one, so that no digit of a noisy count belongs to the noise alone (`noise/grid.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dpsparse.mechanisms.logit_calibration.description import LogitCalibration
from lightning_dpsparse.noise.grid import grid_of
from lightning_dpsparse.noise.keys import Stream
from lightning_dpsparse.noise.sources import NoiseSource
from lightning_dpsparse.refused import Refused

# B examples, S slices, L labels (2), K bins


class LogitHistogram:
    """Counts examples by slice, label and bin of the logit.

    Guarantees: an example adds one to one count, or nothing if its logit or label is no number. In
    which cell it is counted depends on its own logit, label and slice alone.
    """

    def __init__(
        self, settings: LogitCalibration, device: torch.device, num_slices: int = 1
    ) -> None:
        self._settings, self._num_slices = settings, num_slices
        shape = (num_slices, 2, settings.bins)
        self.counts_SLK = torch.zeros(shape, dtype=torch.int64, device=device)

    def add(self, logits_B: Tensor, labels_B: Tensor, slices_B: Tensor | None = None) -> None:
        """Count these examples. A label from one half on is a click."""
        bins, largest = self._settings.bins, self._settings.largest_logit
        logits, labels = logits_B.double(), labels_B.double()
        is_number = logits.isfinite() & labels.isfinite()
        logits = torch.where(is_number, logits, 0.0)
        bin_B = ((logits + largest) * (bins / (2.0 * largest))).floor().clamp(0, bins - 1).long()
        cell_B = bin_B + bins * (labels >= 0.5)
        if slices_B is not None:
            cell_B += 2 * bins * slices_B.long().clamp(0, self._num_slices - 1)
        found = torch.bincount(cell_B[is_number], minlength=self.counts_SLK.numel())
        self.counts_SLK += found.view_as(self.counts_SLK)


def centres(settings: LogitCalibration) -> Tensor:
    """The logits in the middle of the bins."""
    edges = torch.linspace(
        -settings.largest_logit, settings.largest_logit, settings.bins + 1, dtype=torch.float64
    )
    return (edges[:-1] + edges[1:]) / 2


def noisy_counts(counts_SLK: Tensor, stddev: float, source: NoiseSource, release: int) -> Tensor:
    """Add noise to all counts, of examples that occur and of those that do not.

    `release` names the draws, and must be new. The result is in float64, on the CPU.
    """
    counts = counts_SLK.cpu().double()
    if stddev == 0:
        return counts
    if grid_of(stddev) > 1.0:
        raise Refused(
            f"Expected noise of less than {2**20:,} on counts, found {stddev:,.0f}. Use a smaller "
            "noise_multiplier in the calibration."
        )
    drawn = source.fill_(torch.empty(counts.numel(), 1), Stream("calibration", "", release), stddev)
    return counts + drawn.double().view_as(counts)

"""Counts of the training data by logit, label and slice or task, and the noise that covers them.

The counts are whole numbers and secret. Their noise lies on a public grid of powers of two, at most
one, so that no digit of a noisy count belongs to the noise alone (`noise/grid.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dpsparse.mechanisms.logit_calibration.description import LogitCalibration
from lightning_dpsparse.noise.grid import grid_of
from lightning_dpsparse.noise.keys import Stream
from lightning_dpsparse.noise.keystream import SMALLEST_HIDDEN_SHARE
from lightning_dpsparse.noise.sources import NoiseSource
from lightning_dpsparse.refused import Refused

# B examples, S slices or tasks, L labels (2), K bins, T tasks


class LogitHistogram:
    """Counts examples by slice, label and bin of the logit; or by task, label and bin.

    Guarantees: an example adds one to one count, or nothing if its logit or label is no number. In
    which cell it is counted depends on its own logit, label and slice alone. Where there are tasks,
    this holds of each task's counts: all together, an example moves them by at most sqrt(T) in L2.
    """

    def __init__(
        self,
        settings: LogitCalibration,
        device: torch.device,
        num_slices: int = 1,
        num_tasks: int = 1,
    ) -> None:
        assert num_slices == 1 or num_tasks == 1
        self._settings, self._num_parts = settings, num_slices * num_tasks
        shape = (self._num_parts, 2, settings.bins)
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
            cell_B += 2 * bins * slices_B.long().clamp(0, self._num_parts - 1)
        found = torch.bincount(cell_B[is_number], minlength=self.counts_SLK.numel())
        self.counts_SLK += found.view_as(self.counts_SLK)

    def add_tasks(self, logits_BT: Tensor, labels_BT: Tensor) -> None:
        """Count these examples once for each task. A label that is NaN counts nothing there."""
        assert logits_BT.shape[1] == self._num_parts
        task_BT = torch.arange(self._num_parts, device=logits_BT.device).expand_as(logits_BT)
        self.add(logits_BT.flatten(), labels_BT.flatten(), task_BT.flatten())


def centres(settings: LogitCalibration) -> Tensor:
    """The logits in the middle of the bins."""
    edges = torch.linspace(
        -settings.largest_logit, settings.largest_logit, settings.bins + 1, dtype=torch.float64
    )
    return (edges[:-1] + edges[1:]) / 2


def check_shares_grid(stddev: float) -> None:
    """Refuse noise that has no digits below one, as counts would show between its multiples."""
    if stddev > 0 and grid_of(stddev / SMALLEST_HIDDEN_SHARE) > 1.0:
        raise Refused(
            f"Expected noise of less than {2**20:,} on counts, found {stddev:,.0f}. Use a smaller "
            "noise_multiplier in the calibration."
        )


def noisy_counts(counts_SLK: Tensor, stddev: float, source: NoiseSource, release: int) -> Tensor:
    """Add noise to all counts, of examples that occur and of those that do not.

    `release` names the draws, and must be new. The result is in float64, on the CPU. Of a draw
    only its Gaussian part is relied on (`noise/keystream.py`), so that draws are larger by what is
    not: by a part in 3,000.
    """
    counts = counts_SLK.cpu().double()
    if stddev == 0:
        return counts
    check_shares_grid(stddev)
    stddev /= SMALLEST_HIDDEN_SHARE
    drawn = source.fill_(torch.empty(counts.numel(), 1), Stream("calibration", "", release), stddev)
    return counts + drawn.double().view_as(counts)

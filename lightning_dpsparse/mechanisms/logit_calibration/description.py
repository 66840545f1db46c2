"""The settings of a calibration, and what it costs.

Every example of the training data is counted once, in one cell of a public histogram: the bin of
its logit, its label, and its slice if the model has slices. So a unit of up to k examples moves the
counts by at most k in L2 norm, and all counts with noise of standard deviation sigma k are one
Gaussian event of noise multiplier sigma, without amplification by sampling.

A model with T tasks has one such histogram for each. An example is in one cell of each, or in none
where it has no label, so it moves all counts together by at most sqrt(T), and a unit by k sqrt(T).
Noise of standard deviation sigma k sqrt(T) makes it the same event at the same price.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lightning_dpsparse.accounting.calibration import calibrate, epsilon_of
from lightning_dpsparse.accounting.events import DpEvent, gaussian
from lightning_dpsparse.accounting.privacy_loss import COARSE
from lightning_dpsparse.checks import check_flag, check_number, check_whole

SHARE = 0.01
"""The part of the budget that a calibration takes by default, where the budget is what adds up: the
sum of 1 / sigma^2 over Gaussian queries. The noise of training grows by half of it, 0.5%."""
_WITHOUT_TARGET = 50.0
"""Noise multiplier of a calibration where the plan has no epsilon to take a part of."""
MOST_NOISE = 1e4
"""Largest noise multiplier: with the most examples of a user that are allowed, counts and noise
still share a grid of whole numbers and their parts."""
_MOST_BINS = 4096


@dataclass(frozen=True, kw_only=True)
class LogitCalibration:
    """Set the last slope and bias of a click model by one private query after the last step."""

    noise_multiplier: float | None = None
    """Standard deviation of the noise on each count, divided by the most examples that one unit
    has and by the square root of the number of tasks. The default takes 1% of the budget epsilon,
    and is 50 in a plan without epsilon. Zero is not private."""

    bins: int = 96
    """Number of bins of logits, all of one width."""

    largest_logit: float = 12.0
    """The bins reach from minus this to this. Logits beyond are counted in the outermost bins."""

    fit_slope: bool = True
    """Whether the slope is fitted, or the bias alone. Where noise is too large for a slope, the
    bias is fitted alone in any case."""

    def __post_init__(self) -> None:
        if self.noise_multiplier is not None:
            remedy = "Leave it out for 1% of the budget; 0 is not private."
            check_number(
                "noise_multiplier", self.noise_multiplier, least=0, most=MOST_NOISE, remedy=remedy
            )
        check_whole("bins", self.bins, 2, _MOST_BINS)
        check_number("largest_logit", self.largest_logit, above=0, smallest=1e-3, most=1e3)
        check_flag("fit_slope", self.fit_slope)

    def resolve(self, epsilon: float | None, delta: float) -> LogitCalibration:
        """The same calibration with its noise chosen for this target.

        A Gaussian query of noise multiplier s costs epsilon; s / sqrt(SHARE) costs that part of it.
        """
        if self.noise_multiplier is not None:
            return self
        if epsilon is None:
            return replace(self, noise_multiplier=_WITHOUT_TARGET)

        def cost(noise_multiplier: float, grid: float) -> float:
            return epsilon_of([(gaussian(noise_multiplier), 1)], delta, grid)

        whole = calibrate(cost, epsilon, tolerance=1e-3, grid=COARSE)
        return replace(self, noise_multiplier=min(whole / math.sqrt(SHARE), MOST_NOISE))

    def event(self) -> DpEvent:
        """What the query costs a unit. Its noise must have been chosen."""
        assert self.noise_multiplier is not None
        return gaussian(self.noise_multiplier)

    def stddev(self, examples_per_unit: int, num_tasks: int = 1) -> float:
        """Standard deviation of the noise on each count, sigma k sqrt(T).

        >>> LogitCalibration(noise_multiplier=2.0).stddev(examples_per_unit=3, num_tasks=4)
        12.0
        """
        assert self.noise_multiplier is not None
        return self.noise_multiplier * examples_per_unit * math.sqrt(num_tasks)

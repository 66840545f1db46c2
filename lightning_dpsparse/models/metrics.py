"""Metrics of click models, in memory that does not grow with the epoch.

All but AUROC are ratios of four sums, which are kept in float64 and added over ranks.
`retrieval.py` has the metrics of models that rank items.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import BinaryAUROC
from typing_extensions import override

# B examples


class _ClickSums(Metric):
    """The float64 sums of which the metrics below are ratios."""

    full_state_update = False
    examples: Tensor
    clicks: Tensor
    predicted: Tensor
    log_loss: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("examples", "clicks", "predicted", "log_loss"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    @override
    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: predicted probabilities_B and labels_B."""
        p, y = preds.double(), target.double()
        self.examples += y.numel()
        self.clicks += y.sum()
        self.predicted += p.sum()
        self.log_loss += torch.nn.functional.binary_cross_entropy(p, y, reduction="sum")


class LogLoss(_ClickSums):
    """Mean cross-entropy in nats.

    >>> metric = LogLoss()
    >>> metric(torch.tensor([0.5, 0.5]), torch.tensor([0.0, 1.0])).item()
    0.6931471805599453
    """

    higher_is_better = False

    @override
    def compute(self) -> Tensor:
        return self.log_loss / self.examples


class NormalizedEntropy(_ClickSums):
    """Log loss divided by the log loss of always predicting the average click rate; 1 is no better.

    Reference: He et al. 2014, Practical Lessons from Predicting Clicks on Ads at Facebook.

    >>> metric = NormalizedEntropy()
    >>> metric(torch.tensor([0.5, 0.5]), torch.tensor([0.0, 1.0])).item()
    1.0
    """

    higher_is_better = False

    @override
    def compute(self) -> Tensor:
        rate = self.clicks / self.examples
        entropy = -(torch.xlogy(rate, rate) + torch.xlogy(1 - rate, 1 - rate))
        return self.log_loss / self.examples / entropy


class Calibration(_ClickSums):
    """Predicted clicks divided by real clicks; 1 is calibrated.

    >>> metric = Calibration()
    >>> metric(torch.tensor([0.75, 0.75]), torch.tensor([0.0, 1.0])).item()
    1.5
    """

    @override
    def compute(self) -> Tensor:
        return self.predicted / self.clicks


def click_metrics(prefix: str) -> MetricCollection:
    """AUROC, log loss, normalised entropy and calibration under `prefix`.

    AUROC is binned. Its thresholds are even in the logit, where a click model's scores spread out,
    not in the probability, where they crowd near 0. Beyond all of them come 0, which every score
    reaches, and 2, which none does: without these ends of the curve a model whose scores are all
    extreme would seem to rank its examples backwards.
    """
    inner = torch.sigmoid(torch.linspace(-12.0, 12.0, 601, dtype=torch.float64)).float()
    thresholds = torch.cat([inner.new_tensor([0.0]), inner, inner.new_tensor([2.0])])
    return MetricCollection(
        {
            "auroc": BinaryAUROC(thresholds=thresholds, validate_args=False),
            "log_loss": LogLoss(),
            "normalized_entropy": NormalizedEntropy(),
            "calibration": Calibration(),
        },
        prefix=prefix,
    )

"""Metrics of models that rank items, in memory that does not grow with the epoch.

An example has one label, and a model answers with its best items. How often the label stood at each
place of the answer is all that recall and precision need. `metrics.py` has those of click models.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

# B examples, K items in an answer

CUTOFFS = (1, 5, 10, 20)


class _LabelPlaces(Metric):
    """How often the one label of an example stood at each place of its answer.

    All metrics below have the same state, so that a collection of metrics stores it once.
    """

    full_state_update = False
    higher_is_better = True
    examples: Tensor
    places_K: Tensor

    def __init__(self, k: int, answer_size: int) -> None:
        super().__init__()
        self.k = k
        self.add_state("examples", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state(
            "places_K", torch.zeros(answer_size, dtype=torch.int64), dist_reduce_fx="sum"
        )

    @override
    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: answers_BK, best item first, and labels_B."""
        self.examples += target.numel()
        self.places_K += (preds == target[:, None]).sum(0)


class RecallAtK(_LabelPlaces):
    """Share of examples whose label is among the first k items.

    >>> metric = RecallAtK(k=2, answer_size=3)
    >>> metric(torch.tensor([[5, 3, 4], [5, 4, 3]]), torch.tensor([3, 3])).item()
    0.5
    """

    @override
    def compute(self) -> Tensor:
        return self.places_K[: self.k].sum() / self.examples


class PrecisionAtK(RecallAtK):
    """Share of the first k items that are labels. With one label per example, recall / k.

    >>> metric = PrecisionAtK(k=2, answer_size=3)
    >>> metric(torch.tensor([[5, 3, 4], [5, 4, 3]]), torch.tensor([3, 3])).item()
    0.25
    """

    @override
    def compute(self) -> Tensor:
        return super().compute() / self.k


def retrieval_metrics(prefix: str, answer_size: int) -> MetricCollection:
    """Precision and recall at 1, 5, 10 and 20, as far as an answer has that many items."""
    cutoffs = [k for k in CUTOFFS if k <= answer_size]
    precision = {f"precision@{k}": PrecisionAtK(k, answer_size) for k in cutoffs}
    recall = {f"recall@{k}": RecallAtK(k, answer_size) for k in cutoffs}
    return MetricCollection(precision | recall, prefix=prefix)

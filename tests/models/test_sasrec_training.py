"""SASRec in training: private or not, what moves is what a loop over examples moves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.datasets.utils import Batch

from lightning_dpsparse import DPSGD, AdaFEST, LazyDP, Placement, PrivacyPlan
from lightning_dpsparse.models import SASRecModule
from tests.support.item_windows import EXAMPLES, ITEMS, Windows, collate, loader
from tests.support.naive_step import EXPECTED, plan
from tests.support.plain_sasrec import SETTINGS, Plain, sasrec
from tests.support.plain_training import SGD, assert_close
from tests.support.ranks import Ranks
from tests.support.tiny_model import assemble, make_trainer, snapshot

STEPS = 3


class Recorded(SASRecModule):
    """Keeps how it started and what it drew."""

    def on_train_start(self) -> None:
        super().on_train_start()
        self.start, self.drawn = snapshot(self), []

    def draw_negatives(self, batch: Batch) -> Tensor:
        self.drawn.append(super().draw_negatives(batch))
        return self.drawn[-1]


class Given:
    """Three steps of EXPECTED examples in all, with empty contexts among them."""

    def __init__(self, rank: int, world_size: int) -> None:
        examples, share = Windows(STEPS * EXPECTED).examples, EXPECTED // world_size
        starts = [step * EXPECTED + rank * share for step in range(STEPS)]
        self.examples = [examples[start : start + share] for start in starts]

    def __len__(self) -> int:
        return len(self.examples)

    def __iter__(self) -> Any:
        return iter([collate(examples) for examples in self.examples])


def train(world_size: int, privacy: PrivacyPlan | None, placement: Placement) -> dict[str, Any]:
    """Runs inside a rank."""
    torch.manual_seed(0)
    module = Recorded(**SETTINGS)
    given = Given(torch.distributed.get_rank(), world_size)
    make_trainer(world_size, placement, SGD, privacy=privacy).fit(module, given)
    return {
        "start": module.start,
        "end": snapshot(module),
        "drawn": module.drawn,
        "examples": given.examples,
    }


def by_a_loop(start: dict[str, Tensor], ranks: list[Any], clip_norm: float) -> dict[str, Tensor]:
    """Every example's gradient by itself, with the negatives that were drawn for it."""
    plain, clipped = Plain(start), 0
    weights = list(plain.weights.values())
    for step in range(STEPS):
        total = [torch.zeros_like(weight) for weight in weights]
        for rank in ranks:
            for example, negatives in zip(rank["examples"][step], rank["drawn"][step].tolist()):
                each = torch.autograd.grad(plain.loss(example, negatives), weights)
                norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in each))
                clipped += norm > clip_norm
                for sum_, gradient in zip(total, each):
                    sum_ += min(1.0, clip_norm / norm) * gradient
        with torch.no_grad():
            for weight, gradient in zip(weights, total):
                weight -= 0.3 * gradient / EXPECTED
    assert math.isinf(clip_norm) or clipped > 5
    return {name: weight.detach() for name, weight in plain.weights.items()}


@pytest.mark.parametrize("clip_norm", [0.5, math.inf, None], ids=["clipped", "unbounded", "plain"])
def test_a_step_is_a_loop_over_examples(one_rank: Ranks, clip_norm: float | None) -> None:
    privacy = None if clip_norm is None else plan(clip_norm, mechanism=DPSGD(chunk_rows=16))
    results = one_rank.run(train, 1, privacy, Placement())
    start, end = (assemble([result[key] for result in results]) for key in ("start", "end"))
    assert_close(end, by_a_loop(start, results, clip_norm or math.inf), 1e-5)
    moved = {key: float((end[key] - start[key]).abs().max()) for key in start}
    # What a key adds to all scores alike, a softmax does not see.
    assert all(moved[key] > 1e-4 for key in start if not key.endswith("attention.key.bias"))


def test_two_ranks_are_a_loop_over_examples(two_ranks: Ranks) -> None:
    privacy = plan(0.5, mechanism=DPSGD(chunk_rows=16))
    results = two_ranks.run(train, 2, privacy, Placement(default="row_wise"))
    start, end = (assemble([result[key] for result in results]) for key in ("start", "end"))
    assert_close(end, by_a_loop(start, results, 0.5), 1e-5)


def fit(mechanism: Any) -> dict[str, Any]:
    """Runs inside a rank: batches are drawn, some of them empty."""
    torch.manual_seed(0)
    module = sasrec(dropout=0.1, normalize=True)
    noisy = PrivacyPlan(mechanism=mechanism, noise_multiplier=1.0, delta=1e-3)
    trainer = make_trainer(1, None, SGD, privacy=noisy, max_epochs=1)
    trainer.fit(module, loader(16, 1, shuffle=True), loader(11, 3, seed=1))
    module.eval()
    batch = collate(EXAMPLES)
    return {
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "losses": module.example_losses(batch),
        "best": module.predict_step(batch, 0),
        "state": snapshot(module),
    }


@pytest.mark.parametrize("mechanism", [AdaFEST(threshold=1.0), LazyDP()], ids=["adafest", "lazydp"])
def test_a_private_fit_runs_and_ranks_all_items(one_rank: Ranks, mechanism: Any) -> None:
    [found] = one_rank.run(fit, mechanism)
    metrics = found["metrics"]
    assert 0 <= metrics["val_recall@10"] <= metrics["val_recall@20"] <= 1
    assert metrics["epsilon"] > 0
    plain = Plain(assemble([found["state"]]), normalize=True)
    scores = [plain.scores(plain.outputs(c)[-1], list(range(ITEMS))) for c, _ in EXAMPLES]
    losses = [s.exp().sum().log() - s[label] for s, (_, label) in zip(scores, EXAMPLES)]
    torch.testing.assert_close(
        found["losses"].double(), torch.stack(losses).detach(), rtol=1e-4, atol=1e-4
    )
    assert found["best"].tolist() == [s.argsort(descending=True)[:20].tolist() for s in scores]

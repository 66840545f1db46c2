"""The two towers in training: private or not, what moves is what a loop over examples moves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torchrec.datasets.utils import Batch

from lightning_dpsparse import DPSGD, EANA, AdaFEST, LazyDP, Placement, PrivacyPlan
from lightning_dpsparse.models import TwoTowerModule
from tests.support.item_windows import ITEMS, NEGATIVES, Windows, collate, loader, sgd
from tests.support.naive_step import EXPECTED, plan
from tests.support.plain_training import SGD, assert_close
from tests.support.plain_two_tower import TABLE, WIDTH, Plain, two_towers
from tests.support.ranks import Ranks
from tests.support.tiny_model import assemble, make_trainer, snapshot


class Recorded(TwoTowerModule):
    """Keeps how it started and what it drew."""

    def on_train_start(self) -> None:
        super().on_train_start()
        self.start, self.drawn = snapshot(self), []

    def draw_negatives(self, batch: Batch) -> Tensor:
        self.drawn.append(super().draw_negatives(batch))
        return self.drawn[-1]


class Given:
    """Three steps of EXPECTED examples in all."""

    def __init__(self, rank: int, world_size: int) -> None:
        examples, share = Windows(3 * EXPECTED).examples, EXPECTED // world_size
        starts = [step * EXPECTED + rank * share for step in range(3)]
        self.examples = [examples[start : start + share] for start in starts]

    def __len__(self) -> int:
        return len(self.examples)

    def __iter__(self) -> Any:
        return iter([collate(examples) for examples in self.examples])


def train(privacy: PrivacyPlan | None, placement: Placement, layers: list[int]) -> dict[str, Any]:
    """Runs inside one of two ranks."""
    torch.manual_seed(0)
    module = Recorded(ITEMS, WIDTH, layers, NEGATIVES, temperature=0.2, optimizer=sgd)
    given = Given(torch.distributed.get_rank(), 2)
    make_trainer(2, placement, SGD, privacy=privacy).fit(module, given)
    return {
        "start": module.start,
        "end": snapshot(module),
        "drawn": module.drawn,
        "examples": given.examples,
    }


def trained(ranks: Ranks, *args: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Any]]:
    results = ranks.run(train, *args)
    start, end = (assemble([result[key] for result in results]) for key in ("start", "end"))
    return start, end, results


@pytest.mark.parametrize("layers", [[6, WIDTH], []], ids=["layers", "no_layers"])
@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
def test_infinite_clip_and_zero_noise_is_plain_training(
    two_ranks: Ranks, kind: Any, layers: list[int]
) -> None:
    placement = Placement(default=kind)
    unbounded = plan(math.inf, mechanism=DPSGD(chunk_rows=16))
    start, private, _ = trained(two_ranks, unbounded, placement, layers)
    _, plain, _ = trained(two_ranks, None, placement, layers)
    assert_close(private, plain, 1e-6)
    assert all((plain[key] - start[key]).abs().max() > 1e-4 for key in start)


@pytest.mark.parametrize("mechanism", [DPSGD(chunk_rows=16), EANA()], ids=["dpsgd", "eana"])
def test_a_private_step_clips_each_example_by_itself(two_ranks: Ranks, mechanism: Any) -> None:
    """As a loop over examples does, each with the negatives that were drawn for it."""
    clip_norm = 0.5
    placement, layers = Placement(default="table_wise"), [6, WIDTH]
    start, end, ranks = trained(two_ranks, plan(clip_norm, mechanism=mechanism), placement, layers)
    plain, clipped = Plain(start), 0
    for step in range(3):
        total = [torch.zeros_like(parameter) for parameter in plain.parameters()]
        for rank in ranks:
            for example, negatives in zip(rank["examples"][step], rank["drawn"][step].tolist()):
                loss = plain.loss(example, negatives)
                each = torch.autograd.grad(loss, plain.parameters())
                norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in each))
                clipped += norm > clip_norm
                for sum_, gradient in zip(total, each):
                    sum_ += min(1.0, clip_norm / norm) * gradient
        with torch.no_grad():
            for parameter, gradient in zip(plain.parameters(), total):
                parameter -= 0.3 * gradient / EXPECTED
    assert clipped > 5
    names = [TABLE.format("context"), TABLE.format("item")]
    names += [f"mlp.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")]
    expected = {name: p.detach() for name, p in zip(names, plain.parameters())}
    assert_close(end, expected, 1e-6)


def fit(mechanism: Any, layers: list[int]) -> dict[str, float]:
    """Runs inside one of two ranks: batches are drawn, some of them empty."""
    torch.manual_seed(0)
    module = two_towers(context_layers=layers)
    noisy = PrivacyPlan(mechanism=mechanism, noise_multiplier=1.0, delta=1e-3)
    trainer = make_trainer(2, None, SGD, privacy=noisy, max_epochs=2)
    trainer.fit(module, loader(16, 1, shuffle=True), loader(11, 3, seed=1))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(
    ("mechanism", "layers"),
    [
        (DPSGD(), [WIDTH]),
        pytest.param(LazyDP(), [WIDTH], marks=pytest.mark.slow),
        pytest.param(AdaFEST(threshold=1.0), [WIDTH], marks=pytest.mark.slow),
        (EANA(), [WIDTH]),
        pytest.param(LazyDP(), [], marks=pytest.mark.slow),
    ],
)
def test_a_private_fit_runs_and_validates(
    two_ranks: Ranks, mechanism: Any, layers: list[int]
) -> None:
    for found in two_ranks.run(fit, mechanism, layers):
        assert 0 <= found["val_recall@10"] <= found["val_recall@20"] <= 1
        assert isinstance(mechanism, EANA) or found["epsilon"] > 0  # EANA has none


class Epochs(LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)

    def train_dataloader(self) -> Any:
        return loader(8, 4)


def tell_epochs() -> list[int]:
    data = Epochs()
    make_trainer(1, max_epochs=3).fit(two_towers(), datamodule=data)
    return data.told


def test_the_data_module_is_told_the_epoch(one_rank: Ranks) -> None:
    [told] = one_rank.run(tell_epochs)
    assert told == sorted(told)
    assert set(told) == {0, 1, 2}

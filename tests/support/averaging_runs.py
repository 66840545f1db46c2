"""Training with averages, on any number of ranks, and the same averages by hand."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dpsparse import AverageWeights, FusedOptimizer, Placement
from tests.support.lazydp_runs import SIZES, Curious, unmoved
from tests.support.naive_step import Batches, plan
from tests.support.tiny_model import (
    Bags,
    SmallModule,
    assemble,
    collate,
    loader,
    make_trainer,
    snapshot,
)

STEPS = 40
VALIDATED = 20
"""Number of steps between two validations."""


class Watching(Curious):
    """Keeps the weights that validation sees, beside what it predicts from them."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.validated: dict[int, Any] = {}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.state_dict()  # has all rows pay, also those that nobody reads
        self.validated[self.trainer.global_step] = snapshot(self)


class Loaded(SmallModule):
    """Remembers itself as it was loaded, and may fail."""

    loaded: Any = None
    fails_at: int | None = None

    def on_train_start(self) -> None:
        self.loaded = snapshot(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step == self.fails_at:
            raise KeyboardInterrupt
        return super().training_step(batch, batch_idx)


class Weights(Callback):
    """Keeps the weights after every step."""

    def __init__(self) -> None:
        self.after: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.after.append(snapshot(module))


def train(
    world_size: int,
    placement: Placement,
    optimizer: FusedOptimizer,
    mechanism: Any = None,
    averages: dict[str, float] | None = None,
    *,
    steps: int = STEPS,
    watches: bool = True,
    validates: bool = True,
    is_moved: bool = False,
    sequences: tuple[str, ...] = (),
    hosts: int = 1,
    most: int | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Runs inside a rank: a cosine schedule, replayed noise if there is a mechanism."""
    torch.manual_seed(0)
    module, weights = Watching(schedule="cosine", sequences=sequences), Weights()
    callbacks: list[Callback] = [weights] if watches else []
    if averages is not None:
        callbacks.append(AverageWeights(**averages))
    settings = {"noise": 2.0, "noise_source": "row_keyed"} | settings
    trainer = make_trainer(
        world_size,
        placement,
        optimizer,
        hosts=hosts,
        privacy=None if mechanism is None else plan(mechanism=mechanism, **settings),
        max_physical_batch=most,
        val_check_interval=VALIDATED,
        callbacks=callbacks,
    )
    validation = DataLoader(Bags(8, seed=3), batch_size=8 // world_size, collate_fn=collate)
    rank = torch.distributed.get_rank() if world_size > 1 else None
    sizes = SIZES[:steps] if world_size <= 2 else [[*size, 1, 0] for size in SIZES[:steps]]
    data: Any = Batches(sizes, rank)
    if mechanism is None:
        data = loader(4 * steps, 4, world_size)
    with nullcontext() if is_moved else unmoved():
        trainer.fit(module, data, validation if validates else None)
    return {"end": snapshot(module), "after": weights.after, "validated": module.validated}


def whole(results: Sequence[dict[str, Any]], which: str = "end") -> dict[str, Tensor]:
    return parameters(assemble([result[which] for result in results]))


def validated(results: Sequence[dict[str, Any]], step: int) -> dict[str, Tensor]:
    return parameters(assemble([result["validated"][step] for result in results]))


def after(results: Sequence[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """The weights after every step."""
    steps = zip(*(result["after"] for result in results), strict=True)
    return [parameters(assemble(list(ranks))) for ranks in steps]


def parameters(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the optimizer's state, which is not averaged."""
    return {key: value for key, value in state.items() if ":" not in key}


def by_hand(
    weights: list[dict[str, Tensor]],
    fraction: float | None = None,
    half_life: float | None = None,
    planned: int | None = None,
) -> dict[str, Tensor]:
    """The average after the last of these steps, as a weighted sum in float64."""
    count = len(weights)
    if half_life is not None:
        shares = [0.5 ** ((count - 1 - t) / half_life) for t in range(count)]
    else:
        assert fraction is not None
        total = planned or count
        first = total - round(fraction * total)
        shares = [float(t >= first) for t in range(count)]
    if not any(shares):  # the window has not begun
        shares[-1] = 1.0
    return {
        key: sum(s * w[key].double() for s, w in zip(shares, weights)) / sum(shares)  # type: ignore[misc]
        for key in weights[0]
    }


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        error = float((found[key].double() - value.double()).abs().max())
        assert error <= atol, f"{key}: {error}"

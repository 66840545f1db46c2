"""LazyDP and DP-SGD with the same draws, on a module that reads its tables in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dpsparse import DPSGD, FusedOptimizer, LazyDP, Placement
from lightning_dpsparse.mechanisms.lazydp import weight_grid
from lightning_dpsparse.noise.sources import RowNoise
from tests.support.naive_step import Batches, plan
from tests.support.tiny_model import Bags, Recording, assemble, collate, make_trainer, snapshot

STEPS = 200
# Few examples, so that rows sleep for long; empty steps; ranks of unequal size.
SIZES = [[2, 1], [0, 0], [1, 0], [0, 2], [0, 0]] * (STEPS // 5)
DECAYING = FusedOptimizer(kind="sgd", learning_rate=0.3, weight_decay=0.05)
EAGER, LAZY = DPSGD(chunk_rows=16), LazyDP(aggregate=False, chunk_rows=16)


class Curious(Recording):
    """Keeps what validation saw, and may look twice in a step or ask for its state."""

    def __init__(self, *, looks_twice: bool = False, **kwargs: Any) -> None:
        super().__init__(lr=0.05, **kwargs)
        self.looks_twice = looks_twice
        self.seen: list[Tensor] = []
        self.glances: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.looks_twice and len(batch.labels):
            with torch.no_grad():
                self.glances.append(self(batch))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self(batch))


class States(Callback):
    """Exports the model in the middle of training."""

    def __init__(self, at: list[int]) -> None:
        self.at, self.states = at, []

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step in self.at:
            module.state_dict()
            self.states.append(snapshot(module))


@contextmanager
def unmoved() -> Iterator[None]:
    """Noise lands on a grid as fine as its own, and nobody moves it first: what is left is what
    LazyDP does, to the last digits. (That it is moved is `noise/test_regrid.py`'s to test.)"""
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(weight_grid, "_ENOUGH_NOISE", 1 << 20))
        patches.enter_context(
            mock.patch.object(RowNoise, "dither_", lambda _, out, *rest: out.zero_())
        )
        yield


def train(
    world_size: int,
    placement: Placement,
    optimizer: FusedOptimizer,
    mechanism: Any,
    *,
    steps: int = STEPS,
    most: int | None = None,
    hosts: int = 1,
    looks_twice: bool = False,
    export_at: tuple[int, ...] = (),
    sequences: tuple[str, ...] = (),
    is_moved: bool = False,
) -> dict[str, Any]:
    """Runs inside a rank: replayed noise, a cosine schedule, validation every 20 steps."""
    torch.manual_seed(0)
    module = Curious(schedule="cosine", looks_twice=looks_twice, sequences=sequences)
    states = States(list(export_at))
    rank = torch.distributed.get_rank() if world_size > 1 else None
    trainer = make_trainer(
        world_size,
        placement,
        optimizer,
        hosts=hosts,
        privacy=plan(noise=2.0, mechanism=mechanism, noise_source="row_keyed"),
        max_physical_batch=most,
        val_check_interval=20,
        callbacks=[states],
    )
    validation = DataLoader(Bags(8, seed=3), batch_size=8 // world_size, collate_fn=collate)
    sizes = SIZES[:steps] if world_size <= 2 else [[*size, 1, 0] for size in SIZES[:steps]]
    with nullcontext() if is_moved else unmoved():
        trainer.fit(module, Batches(sizes, rank), validation)
    return {
        "end": snapshot(module),
        "seen": torch.cat(module.seen) if module.seen else torch.zeros(0),
        "glances": module.glances,
        "states": states.states,
    }


def whole(results: list[dict[str, Any]]) -> dict[str, Tensor]:
    return assemble([result["end"] for result in results])

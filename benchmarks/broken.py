"""Broken variants of the product on purpose, and small runs to audit them on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from lightning.pytorch import Trainer

from lightning_dpsparse import DPSGD, EANA, DPSparseStrategy, FusedOptimizer, Placement, PrivacyPlan
from lightning_dpsparse.audit.one_run import OneRunResult, one_run_audit
from lightning_dpsparse.data import SyntheticData
from lightning_dpsparse.engine.mechanism import Mechanism
from lightning_dpsparse.engine.step import Recipe
from lightning_dpsparse.models import DLRMModule
from lightning_dpsparse.noise.keys import RunKey, Stream
from lightning_dpsparse.sharded.private import PrivateSteps

ROWS = [100, 60]
CLAIM = 1.3
NOISE = 6.6274  # which four steps on all of the data need for it
CANARIES = 100_000


@contextmanager
def noise_divided_by(divisor: float) -> Iterator[None]:
    right = vars(Recipe)["noise_stddev"].fget
    wrong = property(lambda recipe: right(recipe) / divisor)
    with mock.patch.object(Recipe, "noise_stddev", wrong):
        yield


@contextmanager
def no_flush() -> Iterator[None]:
    with mock.patch.object(PrivateSteps, "pay_all"):
        yield


@contextmanager
def sold_as_private() -> Iterator[None]:
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(EANA, "is_private", True))
        patches.enter_context(mock.patch.object(EANA, "event", DPSGD.event))
        yield


@contextmanager
def one_seed_for_all_shards() -> Iterator[None]:
    right = RunKey.bytes_for

    def wrong(key: RunKey, stream: Stream, size: int) -> bytes:
        return right(key, Stream(stream.purpose, stream.table, stream.step), size)

    with mock.patch.object(RunKey, "bytes_for", wrong):
        yield


VARIANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "as it is": ExitStack,
    "noise / 2": lambda: noise_divided_by(2.0),
    "noise / sqrt(2)": lambda: noise_divided_by(2.0**0.5),
    "no flush": no_flush,
    "called private": sold_as_private,
    "one seed for all shards": one_seed_for_all_shards,
}


def model() -> DLRMModule:
    return DLRMModule(num_rows=ROWS, embedding_dim=8, dense_arch=[16, 8], over_arch=[16, 1])


def data(size: int = 2000) -> SyntheticData:
    """All of it in every step."""
    return SyntheticData(
        num_rows=ROWS, batch_size=size, examples_per_day=size, train_days=1, val_days=1
    )


def audit(
    variant: str,
    mechanism: Mechanism,
    world_size: int = 1,
    *,
    seed: int | None = None,
    canaries: int = CANARIES,
    kind: Any = "sgd",
    is_white_box: bool = True,
) -> OneRunResult:
    """One audited run of four steps. `seed` is that of coins and canaries; noise is fresh."""
    with TemporaryDirectory() as folder, VARIANTS[variant]():
        trainer = Trainer(
            strategy=DPSparseStrategy(
                privacy=PrivacyPlan(mechanism=mechanism, noise_multiplier=NOISE, delta=1e-6),
                placement=Placement(default="table_wise", tables={"canaries": "row_wise"})
                if world_size > 1
                else None,
                fused_optimizer=FusedOptimizer(kind=kind, learning_rate=1.0),
            ),
            accelerator="cpu",
            devices=world_size,
            max_epochs=-1,
            max_steps=4,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=folder,
        )
        return one_run_audit(
            trainer,
            model(),
            data(),
            num_canaries=canaries,
            seed=seed,
            is_white_box=is_white_box,
        )

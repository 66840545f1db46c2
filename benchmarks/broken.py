"""Broken variants of the product on purpose, and small runs to audit them on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from typing_extensions import override

from lightning_dpsparse import DPSGD, EANA, DPSparseStrategy, FusedOptimizer, Placement, PrivacyPlan
from lightning_dpsparse.audit.bound import CONFIDENCE, measure
from lightning_dpsparse.audit.low_bits import attack_on_rounding, attacks_on_sums
from lightning_dpsparse.audit.one_run import OneRunResult, one_run_audit
from lightning_dpsparse.data import SyntheticData
from lightning_dpsparse.engine import step as engine_step
from lightning_dpsparse.engine.mechanism import Mechanism
from lightning_dpsparse.engine.step import Clipped, StepConfig
from lightning_dpsparse.mechanisms.lazydp import LazyDP
from lightning_dpsparse.mechanisms.lazydp import state as lazy_state
from lightning_dpsparse.mechanisms.lazydp.weight_grid import payment_grid
from lightning_dpsparse.models import DLRMModule
from lightning_dpsparse.noise.grid import grid_of
from lightning_dpsparse.noise.keys import RunKey, Stream
from lightning_dpsparse.noise.sources import FastNoise
from lightning_dpsparse.plugin.callbacks import private_run
from lightning_dpsparse.sharded import private
from lightning_dpsparse.sharded.private import PrivateSteps
from lightning_dpsparse.sharded.shards import whole_table

ROWS = [100, 60]
CLAIM = 1.3
NOISE = 6.6274  # which four steps on all of the data need for it
CANARIES = 100_000

LOW_BIT_NOISE = 50.0  # so much that nothing but low bits can tell anything
TARGETS, WIDTH = 128, 64
DELTA = 1e-6

# B examples, M targets, D width of a row


@contextmanager
def noise_divided_by(divisor: float) -> Iterator[None]:
    right = vars(StepConfig)["noise_stddev"].fget
    wrong = property(lambda config: right(config) / divisor)
    with mock.patch.object(StepConfig, "noise_stddev", wrong):
        yield


@contextmanager
def no_flush() -> Iterator[None]:
    with mock.patch.object(PrivateSteps, "before_release"):
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


def _torch_normal(noise: FastNoise, count: int, stream: Stream) -> Tensor:
    device = torch.device("cpu")
    return torch.randn(count, generator=noise._generator(device, stream))


def _numpy_normal(noise: FastNoise, count: int, stream: Stream) -> Tensor:
    draws = np.random.default_rng(list(noise._key.bytes_for(stream, 8)))
    return torch.from_numpy(draws.standard_normal(count, dtype=np.float32))


@contextmanager
def sums_off_the_grid() -> Iterator[None]:
    """Noise consists of multiples of its grid, and what it is added to does not."""
    with mock.patch.object(engine_step, "round_to_", lambda values, grid: values):
        yield


@contextmanager
def noise_in_float32(draw: Callable[[FastNoise, int, Stream], Tensor]) -> Iterator[None]:
    """Float32 noise is added to float32 sums, and nothing has a grid."""

    def fill_(
        noise: FastNoise, out: Tensor, stream: Stream, stddev: float = 1.0, *_: Any
    ) -> Tensor:
        return out.copy_(draw(noise, out.numel(), stream).view_as(out)).mul_(stddev)

    def add_(noise: FastNoise, out: Tensor, stream: Stream, stddev: float) -> Tensor:
        return out.add_(fill_(noise, torch.empty_like(out), stream, stddev))

    with ExitStack() as patches:
        patches.enter_context(sums_off_the_grid())
        patches.enter_context(mock.patch.object(FastNoise, "fill_", fill_))
        patches.enter_context(mock.patch.object(FastNoise, "add_", add_))
        patches.enter_context(mock.patch.object(lazy_state, "payment_grid", return_value=None))
        yield


VARIANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "as it is": ExitStack,
    "noise / 2": lambda: noise_divided_by(2.0),
    "noise / sqrt(2)": lambda: noise_divided_by(2.0**0.5),
    "no flush": no_flush,
    "called private": sold_as_private,
    "one seed for all shards": one_seed_for_all_shards,
    "sums off the grid": sums_off_the_grid,
    "noise of torch in float32": lambda: noise_in_float32(_torch_normal),
    "noise of numpy in float32": lambda: noise_in_float32(_numpy_normal),
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


class RowReaders(LightningModule):
    """A table of zeros. An example reads one row, and its gradient there is a given vector."""

    def __init__(self) -> None:
        super().__init__()
        self.table: EmbeddingBagCollection | None = None
        self.unused = nn.Linear(1, 1)  # every module has an optimizer

    @override
    def configure_model(self) -> None:
        if self.table is None:
            config = EmbeddingBagConfig(
                name="rows",
                num_embeddings=TARGETS + 1,
                embedding_dim=WIDTH,
                feature_names=["row"],
                init_fn=nn.init.zeros_,
            )
            self.table = EmbeddingBagCollection(tables=[config])

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.unused.parameters(), lr=1.0)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        assert self.table is not None
        loss_B: Tensor = (self.table(batch.sparse_features).values() * batch.dense_features).sum(1)
        return loss_B


def audit_low_bits(
    variant: str,
    mechanism: Mechanism,
    *,
    readers: int = 39,
    noise_source: Any = "fast",
    learning_rate: float = 1.0,
    seed: int | None = None,
) -> OneRunResult:
    """One audited step. Each of the targets is a reader more of a row of its own, or is not.

    `readers` others read each such row. The adversary knows their gradients, and so the clipped
    sums of both cases: the engine's own, from a run with all targets and from one with none. One
    more row is read by somebody in any case. `seed` is that of coins and gradients.
    """
    draws = np.random.default_rng(seed)
    is_included_M = draws.random(TARGETS) < 0.5
    rows = np.concatenate([np.repeat(np.arange(TARGETS), readers), [TARGETS], np.arange(TARGETS)])
    # Readers of a row are of one mind, roughly: their sum is not small beside the noise.
    common = draws.standard_normal((TARGETS + 1, WIDTH), dtype=np.float32)
    gradient_BD = 10.0 * common[rows]
    gradient_BD += 5.0 * draws.standard_normal(gradient_BD.shape, dtype=np.float32)

    expected = len(rows) - TARGETS // 2

    def step(chosen_M: Any, variant: str) -> tuple[Tensor, Tensor, float | None]:
        is_in_B = np.concatenate([np.ones(len(rows) - TARGETS, dtype=np.bool_), chosen_M])
        batch = _batch(rows[is_in_B], gradient_BD[is_in_B])
        return _one_step(batch, variant, mechanism, noise_source, expected, learning_rate)

    without_MD, _, _ = step(np.zeros(TARGETS, dtype=np.bool_), "as it is")
    with_MD, _, _ = step(np.ones(TARGETS, dtype=np.bool_), "as it is")
    sums_MD, released_MD, claimed = step(is_included_M, variant)
    is_in = torch.from_numpy(is_included_M)[:, None]
    assert torch.equal(sums_MD, torch.where(is_in, with_MD, without_MD))

    stddev = LOW_BIT_NOISE / expected
    grid = grid_of(stddev)
    scores = attacks_on_sums(released_MD / learning_rate, without_MD, with_MD, grid)
    if isinstance(mechanism, LazyDP) and not readers:
        # Rows that nobody read get their noise late, as scaled draws of standard deviation one.
        paid = payment_grid([torch.zeros(1)], learning_rate * stddev)
        late = float(torch.tensor(learning_rate * stddev)) * grid_of(1.0)
        assert paid is not None
        scores |= attack_on_rounding(released_MD, paid, late, learning_rate * grid)
    found = measure(scores, is_included_M, DELTA, guessed=(0.5, 1.0))
    return OneRunResult(claimed, DELTA, found, CONFIDENCE, TARGETS, is_white_box=True)


def _batch(row_B: Any, gradient_BD: Any) -> Batch:
    lengths_B = torch.ones(len(row_B), dtype=torch.int64)
    features = KeyedJaggedTensor(["row"], torch.from_numpy(row_B), lengths=lengths_B)
    return Batch(torch.from_numpy(gradient_BD), features, torch.zeros(len(row_B)))


def _one_step(
    batch: Batch,
    variant: str,
    mechanism: Mechanism,
    noise_source: Any,
    expected: int,
    learning_rate: float,
) -> tuple[Tensor, Tensor, float | None]:
    """Clipped sums on the targets' rows, what was released of them, and the epsilon claimed.

    From zero and with a learning rate of one, weights are what was released, but for the sign. With
    another one they are not, to the last digit.
    """
    sums_RD, right = torch.zeros(TARGETS + 1, WIDTH), engine_step.release

    def look_and_release(clipped: Clipped, *args: Any) -> None:
        [[gradient]] = clipped.tables
        sums_RD[gradient.rows_U] = gradient.values_UD
        right(clipped, *args)

    plan = PrivacyPlan(
        mechanism=mechanism,
        noise_multiplier=LOW_BIT_NOISE,
        delta=DELTA,
        sampling="unamplified",
        expected_batch_size=expected,
        noise_source=noise_source,
    )
    with TemporaryDirectory() as folder, ExitStack() as patches:
        patches.enter_context(VARIANTS[variant]())
        patches.enter_context(mock.patch.object(private, "release", look_and_release))
        trainer = Trainer(
            strategy=DPSparseStrategy(
                privacy=plan,
                fused_optimizer=FusedOptimizer(kind="sgd", learning_rate=learning_rate),
            ),
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=folder,
        )
        module = RowReaders()
        batches: Any = [batch]
        trainer.fit(module, DataLoader(batches, batch_size=None))
        released_RD = -whole_table(module, "rows")
    claimed = private_run(trainer).facts()["guarantee"]["epsilon"]
    return sums_RD[:TARGETS], released_RD[:TARGETS], claimed

"""LazyDP is DP-SGD: the same draws replayed give the same model, whatever is read in between."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from scipy import stats
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dpsparse import DPSGD, FusedOptimizer, LazyDP, Placement
from lightning_dpsparse.mechanisms import lazydp
from lightning_dpsparse.noise.sources import RowNoise
from tests.plugin.test_training import PLACEMENTS, SGD, assert_close
from tests.support.naive_step import Batches, plan
from tests.support.ranks import Ranks
from tests.support.row_choice import rows_of_unit
from tests.support.tiny_model import (
    BAGS_OR_SEQUENCES,
    SEQUENCES,
    Bags,
    Recording,
    assemble,
    collate,
    make_trainer,
    paths,
    snapshot,
)

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
        patches.enter_context(mock.patch.object(lazydp, "_ENOUGH_NOISE", 1 << 20))
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


@functools.cache
def eager(ranks: Ranks, optimizer: FusedOptimizer, steps: int = STEPS) -> dict[str, Any]:
    """DP-SGD on one rank, once."""
    settings: dict[str, Any] = {"steps": steps, "export_at": (57, 123)}
    return ranks.run(train, 1, Placement(), optimizer, EAGER, **settings)[0]


OPTIMIZERS = pytest.mark.parametrize("optimizer", [SGD, DECAYING], ids=["plain", "decaying"])


@OPTIMIZERS
def test_one_rank_is_eager_dp_sgd(one_rank: Ranks, optimizer: Any) -> None:
    expected = eager(one_rank, optimizer)
    [found] = one_rank.run(train, 1, Placement(), optimizer, LAZY, export_at=(57, 123))
    assert_close(whole([found]), whole([expected]), 1e-6)
    # What validation read had paid. Some thirty rows add up to a prediction.
    assert (found["seen"] - expected["seen"]).abs().max() <= 2e-6
    for one, two in zip(found["states"], expected["states"], strict=True):  # so had exports
        assert_close(assemble([one]), assemble([two]), 1e-6)


@OPTIMIZERS
def test_moved_within_its_spacing_noise_is_hardly_another(one_rank: Ranks, optimizer: Any) -> None:
    """A step's noise of 0.05 is moved by up to 5e-8 and rounded by up to 4e-7. Over 200 steps, and
    with what training makes of it, that adds up to 8e-6: a six-thousandth of one step's noise."""
    [found] = one_rank.run(train, 1, Placement(), optimizer, LAZY, is_moved=True)
    assert_close(whole([found]), whole([eager(one_rank, optimizer)]), 1e-5)


@pytest.mark.parametrize(
    ("name", "optimizer", "steps"),
    [
        ("table_wise", SGD, 60),
        ("row_wise", SGD, STEPS),
        ("column_wise", SGD, 60),
        ("table_wise", DECAYING, 60),
        ("row_wise", DECAYING, 60),
        ("mixed", DECAYING, STEPS),
    ],
)
def test_two_ranks_are_eager_dp_sgd(
    one_rank: Ranks, two_ranks: Ranks, optimizer: Any, name: str, steps: int
) -> None:
    """Column pieces of one row owe apart; repeated ids and rows of several ranks owe once."""
    expected = whole([eager(one_rank, optimizer, steps)])
    found = two_ranks.run(train, 2, PLACEMENTS[name], optimizer, LAZY, steps=steps)
    assert_close(whole(found), expected, 1e-6)


@pytest.mark.parametrize("kind", ["grid", "table_row_wise"])
def test_four_ranks_on_two_hosts_are_eager_dp_sgd(four_ranks: Ranks, kind: Any) -> None:
    placement = Placement(default=kind)
    eager, lazy = (
        whole(four_ranks.run(train, 4, placement, SGD, mechanism, steps=20, hosts=2))
        for mechanism in (EAGER, LAZY)
    )
    assert_close(lazy, eager, 1e-6)


@OPTIMIZERS
def test_a_step_in_parts_is_eager_dp_sgd(two_ranks: Ranks, optimizer: Any) -> None:
    """A row that two parts read pays before the first, and once."""
    eager, lazy = (
        whole(two_ranks.run(train, 2, PLACEMENTS["mixed"], optimizer, mechanism, steps=40, most=1))
        for mechanism in (EAGER, LAZY)
    )
    assert_close(lazy, eager, 1e-6)


@pytest.mark.parametrize(
    ("optimizer", "sequences"),
    [(SGD, ()), (DECAYING, ()), (SGD, SEQUENCES)],
    ids=["plain", "decaying", "sequences"],
)
def test_a_second_look_in_a_step_sees_the_same_rows(
    one_rank: Ranks, optimizer: Any, sequences: tuple[str, ...]
) -> None:
    """Rows that were read on credit pay before anybody else reads them."""
    settings: dict[str, Any] = {"steps": 40, "looks_twice": True, "sequences": sequences}
    [expected], [found] = (
        one_rank.run(train, 1, Placement(), optimizer, mechanism, **settings)
        for mechanism in (EAGER, LAZY)
    )
    assert_close(whole([found]), whole([expected]), 1e-6)
    for one, two in zip(found["glances"], expected["glances"], strict=True):
        assert (one - two).abs().max() <= 1e-6


class NoLoss(Recording):
    """Reads rows, and learns nothing from them: what moves is noise."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * 0.0


def sleep(
    world_size: int, placement: Placement, key: int, sequences: tuple[str, ...]
) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = NoLoss(schedule="cosine", sequences=sequences)
    noisy = plan(2.0, noise=1.5, mechanism=LazyDP(chunk_rows=16))
    object.__setattr__(noisy, "fixed_key", key)
    trainer = make_trainer(world_size, placement, SGD, privacy=noisy)
    rank = torch.distributed.get_rank()
    trainer.fit(module, Batches([[1, 0], [0, 1]] * 15, rank))
    return module.start, snapshot(module)


@pytest.mark.parametrize("name", ["table_wise", "row_wise", "column_wise"])
@BAGS_OR_SEQUENCES
def test_aggregated_noise_has_its_variance_however_often_a_row_was_read(
    two_ranks: Ranks, name: str, sequences: tuple[str, ...]
) -> None:
    """Two runs of 30 steps: the mean square of n draws has standard error sqrt(2 / n)."""
    readers = [rows_of_unit([Bags(100)[i]]) for i in range(30)]
    # The module's cosine schedule has a period of 20 steps; rates are those of the steps taken.
    rates = [0.3 * 0.5 * (1 + math.cos(math.pi * step / 10)) for step in range(30)]
    stddev = math.sqrt(sum((rate * 1.5 * 2.0 / 10) ** 2 for rate in rates))
    draws: dict[str, list[Tensor]] = {"never": [], "once": [], "often": []}
    for key in range(2):
        results = two_ranks.run(sleep, 2, PLACEMENTS[name], key, sequences)
        start, end = (assemble([result[i] for result in results]) for i in (0, 1))
        for table, path in paths(sequences).items():
            moved = (end[path] - start[path]) / stddev
            visits = torch.tensor(
                [sum((table, row) in rows for rows in readers) for row in range(len(moved))]
            )
            for group, rows in (
                ("never", visits == 0),
                ("once", visits == 1),
                ("often", visits > 2),
            ):
                draws[group].append(moved[rows].flatten().double())
    for group, parts in draws.items():
        values = torch.cat(parts)
        assert values.numel() > 450, group
        assert stats.kstest(values.numpy(), "norm").pvalue > 1e-4, group
        bound = 5 * math.sqrt(2 / values.numel())
        assert abs(float(values.square().mean()) - 1) < bound, group

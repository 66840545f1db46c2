"""An average is that of the weights after every step: validated, saved, and kept in the end."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor

from lightning_dpsparse import (
    DPSGD,
    EANA,
    AdaFEST,
    AverageWeights,
    FusedOptimizer,
    LazyDP,
    Placement,
)
from lightning_dpsparse.engine.averaging import AverageClock
from lightning_dpsparse.report.page import page
from tests.support.averaging_runs import (
    STEPS,
    VALIDATED,
    Weights,
    after,
    assert_near,
    by_hand,
    train,
    validated,
    whole,
)
from tests.support.lazydp_runs import DECAYING, EAGER, LAZY
from tests.support.naive_step import Batches, plan
from tests.support.plain_training import PLACEMENTS, SGD
from tests.support.ranks import Ranks
from tests.support.tiny_model import SEQUENCES, SmallModule, make_trainer, snapshot

LAST, FADING = {"fraction": 0.4}, {"half_life": 7.0}
ADAGRAD = FusedOptimizer(kind="adagrad", learning_rate=0.2, eps=1e-3)
ROWWISE = FusedOptimizer(kind="rowwise_adagrad", learning_rate=0.2, eps=1e-3)


def check(results: list[dict[str, Any]], averages: dict[str, float], atol: float = 1e-6) -> None:
    """All that validation saw, and what was left in the end."""
    weights = after(results)
    assert_near(whole(results), by_hand(weights, **averages), atol)
    moved = whole(results)["head.out.weight"] - weights[-1]["head.out.weight"]
    assert moved.abs().max() > 1e-3  # the average is not the weights
    for step in range(VALIDATED, STEPS + 1, VALIDATED):
        expected = by_hand(weights[:step], **averages, planned=STEPS)
        assert_near(validated(results, step), expected, atol)


@pytest.mark.parametrize("averages", [LAST, FADING], ids=["last", "fading"])
@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD, ROWWISE], ids=lambda o: o.kind)
def test_without_a_plan(one_rank: Ranks, optimizer: FusedOptimizer, averages: Any) -> None:
    check(one_rank.run(train, 1, Placement(), optimizer, None, averages), averages)


@pytest.mark.parametrize("sequences", [(), SEQUENCES], ids=["bags", "sequences"])
@pytest.mark.parametrize("name", ["row_wise", "column_wise"])
def test_without_a_plan_on_two_ranks(two_ranks: Ranks, name: str, sequences: Any) -> None:
    found = two_ranks.run(train, 2, PLACEMENTS[name], SGD, None, LAST, sequences=sequences)
    check(found, LAST)


@pytest.mark.parametrize(
    ("mechanism", "optimizer"),
    [
        (EANA(), SGD),
        (EANA(), ROWWISE),
        (AdaFEST(threshold=1.0), SGD),
        (AdaFEST(threshold=1.0), ADAGRAD),
        (DPSGD(chunk_rows=16), ROWWISE),
        (DPSGD(chunk_rows=16), DECAYING),
    ],
    ids=lambda x: type(x).__name__ if not isinstance(x, FusedOptimizer) else x.kind,
)
def test_of_rows_that_rest(one_rank: Ranks, mechanism: Any, optimizer: FusedOptimizer) -> None:
    check(one_rank.run(train, 1, Placement(), optimizer, mechanism, FADING), FADING)
    check(one_rank.run(train, 1, Placement(), optimizer, mechanism, LAST), LAST)


@pytest.mark.parametrize(
    "mechanism", [EANA(), DPSGD(chunk_rows=16)], ids=lambda m: type(m).__name__
)
def test_of_rows_that_rest_on_two_ranks(two_ranks: Ranks, mechanism: Any) -> None:
    check(two_ranks.run(train, 2, PLACEMENTS["mixed"], SGD, mechanism, LAST), LAST)


# ---- rows that owe noise -------------------------------------------------------------------------


@functools.cache
def eager(ranks: Ranks, optimizer: FusedOptimizer) -> list[dict[str, Tensor]]:
    """The weights of DP-SGD after every step, once."""
    return after(ranks.run(train, 1, Placement(), optimizer, EAGER))


@pytest.mark.parametrize("averages", [LAST, FADING], ids=["last", "fading"])
@pytest.mark.parametrize("optimizer", [SGD, DECAYING], ids=["plain", "decaying"])
def test_of_rows_that_owe_noise_is_that_of_eager_dp_sgd(
    one_rank: Ranks, optimizer: FusedOptimizer, averages: Any
) -> None:
    """Draw by draw, with what validation reads in between."""
    weights = eager(one_rank, optimizer)
    lazy = one_rank.run(train, 1, Placement(), optimizer, LAZY, averages, watches=False)
    assert_near(whole(lazy), by_hand(weights, **averages), 1e-6)
    for step in range(VALIDATED, STEPS + 1, VALIDATED):
        expected = by_hand(weights[:step], **averages, planned=STEPS)
        assert_near(validated(lazy, step), expected, 1e-6)


@pytest.mark.parametrize("optimizer", [SGD, DECAYING], ids=["plain", "decaying"])
@pytest.mark.parametrize("name", ["row_wise", "column_wise", "mixed"])
def test_of_rows_that_owe_noise_on_two_ranks(
    one_rank: Ranks, two_ranks: Ranks, optimizer: FusedOptimizer, name: str
) -> None:
    settings = {"watches": False, "validates": False}
    lazy = two_ranks.run(train, 2, PLACEMENTS[name], optimizer, LAZY, LAST, **settings)
    assert_near(whole(lazy), by_hand(eager(one_rank, optimizer), **LAST), 1e-6)


@pytest.mark.parametrize("kind", ["grid", "table_row_wise"])
def test_of_rows_that_owe_noise_on_four_ranks_of_two_hosts(four_ranks: Ranks, kind: Any) -> None:
    placement, settings = Placement(default=kind), {"steps": 20, "validates": False, "hosts": 2}
    weights = after(four_ranks.run(train, 4, placement, SGD, EAGER, **settings))
    lazy = four_ranks.run(train, 4, placement, SGD, LAZY, FADING, watches=False, **settings)
    assert_near(whole(lazy), by_hand(weights, **FADING), 1e-6)


def in_parts(mechanism: Any, averages: Any, sequences: Any, watches: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {"most": 1, "watches": watches, "sequences": sequences}
    return train(1, Placement(), DECAYING, mechanism, averages, **settings)


@pytest.mark.parametrize("sequences", [("t0", "t2"), SEQUENCES], ids=["both", "sequences"])
def test_of_rows_that_are_read_in_parts(one_rank: Ranks, sequences: Any) -> None:
    """Of bags and sequences, in batches that are cut."""
    weights = after(one_rank.run(in_parts, EAGER, None, sequences, True))
    lazy = one_rank.run(in_parts, LAZY, LAST, sequences, False)
    assert_near(whole(lazy), by_hand(weights, **LAST), 1e-6)


class Masked(SmallModule):
    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "mask"):
            mask = torch.tensor([0.0, -torch.inf])
            self.mask = torch.nn.Parameter(mask, requires_grad=False)


def fit_masked(folder: Path, mechanism: Any) -> Tensor:
    module = Masked()
    privacy = None if mechanism is None else plan(noise=1.0, mechanism=mechanism)
    averages, root = [AverageWeights(half_life=3)], str(folder)
    trainer = make_trainer(1, callbacks=averages, privacy=privacy, default_root_dir=root)
    trainer.fit(module, Batches([[2, 1]] * 4, None))
    return module.mask.detach()


@pytest.mark.parametrize("mechanism", [None, LazyDP()], ids=["plain", "LazyDP"])
def test_masks_stay_as_they_are(one_rank: Ranks, tmp_path: Path, mechanism: Any) -> None:
    [mask] = one_rank.run(fit_masked, tmp_path, mechanism)
    assert torch.equal(mask, torch.tensor([0.0, -torch.inf]))


# ---- settings that make no sense, and the report -------------------------------------------------


def fit_with(callbacks: Any, folder: Path, **settings: Any) -> Any:
    strategy = settings.pop("strategy", None)
    trainer = make_trainer(1, callbacks=callbacks, default_root_dir=str(folder), **settings)
    if strategy is not None:
        trainer = Trainer(strategy=strategy, accelerator="cpu", callbacks=callbacks, logger=False)
    trainer.fit(SmallModule(), Batches([[2, 1]] * 4, None))
    return trainer


@pytest.mark.parametrize(
    ("callbacks", "settings", "words"),
    [
        ([AverageWeights(fraction=0.5)], {"strategy": "auto"}, "Use Lightning's WeightAveraging"),
        ([AverageWeights(fraction=0.5)], {"max_epochs": -1}, "found training without end"),
        (
            [AverageWeights(fraction=0.5), StochasticWeightAveraging(swa_lrs=0.1)],
            {},
            "one average of the weights",
        ),
        ([AverageWeights(half_life=5), AverageWeights(fraction=0.1)], {}, "one average of the"),
    ],
    ids=["strategy", "endless", "lightnings", "twice"],
)
def test_averages_that_cannot_be_are_refused(
    one_rank: Ranks, tmp_path: Path, callbacks: Any, settings: Any, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        one_rank.run(fit_with, callbacks, tmp_path, **settings)


class TwoOptimizers(SmallModule):
    """Lightning counts two steps for each of its batches."""

    def __init__(self) -> None:
        super().__init__(scalar_loss=True)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(p.parameters(), 0.1) for p in (self.head.hidden, self.head.out)]


def fit_two_optimizers(averages: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    module, weights = TwoOptimizers(), Weights()
    trainer = make_trainer(1, callbacks=[weights, AverageWeights(**averages)])
    trainer.fit(module, Batches([[2, 1]] * 8, None))
    return {"end": snapshot(module), "after": weights.after}


def test_two_optimizers_have_no_last_part(one_rank: Ranks) -> None:
    found = one_rank.run(fit_two_optimizers, FADING)
    assert_near(whole(found), by_hand(after(found), **FADING), 1e-6)
    with pytest.raises(ValueError, match=r"Expected one optimizer.*found 2.*Use half_life"):
        one_rank.run(fit_two_optimizers, LAST)


def fit_with_lightnings(kind: Any) -> None:
    """Callbacks are made here: they cannot be sent to a rank."""
    settings = {"swa_lrs": 0.1} if issubclass(kind, StochasticWeightAveraging) else {}
    fit_with([kind(**settings)], Path(), privacy=plan(noise=1.0, mechanism=LazyDP()))


class SomebodysEMA(EMAWeightAveraging):
    pass


@pytest.mark.parametrize("kind", [WeightAveraging, SomebodysEMA, StochasticWeightAveraging])
def test_lightnings_averages_are_refused_where_rows_owe_noise(one_rank: Ranks, kind: Any) -> None:
    words = f"found {kind.__name__}: .*Use lightning_dpsparse.AverageWeights"
    with pytest.raises(ValueError, match=words):
        one_rank.run(fit_with_lightnings, kind)


def report_of(folder: Path, averages: bool) -> dict[str, Any]:
    callbacks = [AverageWeights(half_life=50)] if averages else []
    trainer = fit_with(callbacks, folder, privacy=plan(noise=1.0, mechanism=LazyDP()))
    facts: dict[str, Any] = trainer.strategy.private_run.facts()
    assert ("post-processing" in page(facts)) == averages
    return facts


def test_the_report_says_what_is_averaged_and_charges_nothing(
    one_rank: Ranks, tmp_path: Path
) -> None:
    [plain] = one_rank.run(report_of, tmp_path / "plain", False)
    [found] = one_rank.run(report_of, tmp_path / "averaged", True)
    assert found["ran"]["averaged"].startswith("all steps, each counting half of one that comes 50")
    assert "averaged" not in plain["ran"]
    for key in ("ledger", "taints", "assumptions"):
        assert found[key] == plain[key]
    assert found["guarantee"]["epsilon"] == plain["guarantee"]["epsilon"]


@pytest.mark.parametrize(
    ("fraction", "steps", "first"), [(0.25, 100, 75), (1, 7, 0), (0.001, 7, 6), (0.1, 30, 27)]
)
def test_the_last_part_of_the_planned_steps(fraction: float, steps: int, first: int) -> None:
    assert AverageWeights(fraction=fraction).starts_after(steps) == first


def test_steps_of_an_average_weigh_what_they_should() -> None:
    clock = AverageClock(half_life=3.0, total=2.5)
    total, since = 2.5, torch.arange(6, dtype=torch.int32)
    totals = [total]
    for _ in range(5):
        total = 0.5 ** (1 / 3) * total + 1
        totals.append(total)
        assert clock.tick() == pytest.approx(1 / total)
    expected = [0.5 ** ((5 - t) / 3) * totals[t] / total for t in range(6)]
    torch.testing.assert_close(clock.kept(since), torch.tensor(expected, dtype=torch.float64))

"""Every step has a batch that the plan drew, whole, once; and every step releases the same."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_dpsparse import DPSGD, AdaFEST, LazyDP, PrivacyPlan
from lightning_dpsparse.plugin.deliveries import Deliveries, delivered
from lightning_dpsparse.sharded.examples import take_examples
from tests.support.private_runs import BATCH, SIZE, Marked, marked_loader
from tests.support.probe_models import Model
from tests.support.ranks import Ranks
from tests.support.tiny_model import collate, make_trainer, snapshot

NOISY = PrivacyPlan(
    mechanism=DPSGD(),
    noise_multiplier=1.0,
    delta=1e-3,
    assume_independent_examples="these tests are about something else",
)
PROBED = PrivacyPlan(mechanism=DPSGD(), noise_multiplier=1.0, delta=1e-3)
UNAMPLIFIED = PrivacyPlan(noise_multiplier=1.0, delta=1e-3, sampling="unamplified")


def fit(
    folder: Path,
    module: Any = None,
    plan: PrivacyPlan = NOISY,
    loader: Any = None,
    world_size: int = 1,
    **settings: Any,
) -> dict[str, Any]:
    """Runs inside a rank."""
    torch.manual_seed(0)
    module = Model() if module is None else module()
    loader = marked_loader(world_size) if loader is None else loader()
    settings = {"max_steps": 6, "max_epochs": -1} | settings
    trainer = make_trainer(world_size, privacy=plan, default_root_dir=str(folder), **settings)
    error = None
    try:
        trainer.fit(module, loader)
    except ValueError as found:
        error = str(found)
    run = trainer.strategy.private_run
    has_started = run is not None and run.has_started
    return {
        "error": error,
        "steps": trainer.global_step,
        "charged": run.budget.ledger.steps if has_started else 0,
        "facts": run.facts() if has_started and error is None else None,
    }


# ---- one batch, one step -------------------------------------------------------------------------


class TwiceClosing(torch.optim.SGD):
    """As sharpness-aware minimisation does."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


class SharpnessAware(Model):
    def configure_optimizers(self) -> Any:
        return TwiceClosing(self.parameters(), lr=0.1)


class StepsTwice(Model):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        optimizer.step(closure=closure)
        optimizer.step(closure=closure)


class Skips(Model):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


class Repeats(Model):
    """Every example twice in the batch that the tables read."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        size = len(batch.labels)
        return take_examples(batch, size, [*range(size), *range(size)])


class Filters(Model):
    """Only the labelled ones, before the tables read them."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        size = len(batch.labels)
        return take_examples(batch, size, (batch.labels > 0).nonzero().squeeze(1).tolist())


class Stored(Model):
    """Always the same batch, whatever was drawn, in the number that was drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.examples = Marked().examples

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        mine = collate([self.examples[i % SIZE] for i in range(len(batch.labels))])
        return mine if len(batch.labels) else batch


class Manual(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class TakesIterator(Model):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


class AccumulatesLater(Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            trainer.accumulate_grad_batches = 4


REFUSED = {
    SharpnessAware: ("a fresh batch for every step", 0, NOISY),
    StepsTwice: ("a fresh batch for every step", 0, NOISY),
    Skips: ("found one that was skipped", 2, NOISY),
    Repeats: ("found another number of them", 0, NOISY),
    Filters: ("found another number of them", 0, NOISY),
    Stored: ("train on the batch that was drawn for it", 0, PROBED),
    Manual: ("Expected automatic optimization", 0, NOISY),
    TakesIterator: ("found dataloader_iter", 0, NOISY),
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_a_batch_that_is_not_what_was_drawn_is_refused(
    one_rank: Ranks, tmp_path: Path, kind: Any
) -> None:
    message, steps, plan = REFUSED[kind]
    (found,) = one_rank.run(fit, tmp_path, kind, plan)
    assert message in str(found["error"])
    assert found["steps"] == steps


def test_a_second_closure_is_not_charged_and_moves_nothing(one_rank: Ranks, tmp_path: Path) -> None:
    (found,) = one_rank.run(fit, tmp_path, SharpnessAware)
    assert found["charged"] == 1


def accumulating(folder: Path, kind: str) -> dict[str, Any]:
    callback = (
        AccumulatesLater() if kind == "later" else GradientAccumulationScheduler({0: 1, 4: 8})
    )
    return fit(folder, callbacks=[callback])


def test_accumulation_is_refused_whenever_it_comes(one_rank: Ranks, tmp_path: Path) -> None:
    (later,) = one_rank.run(accumulating, tmp_path, "later")
    assert "Expected accumulate_grad_batches=1, found 4" in later["error"]
    assert later["steps"] == 2
    (scheduled,) = one_rank.run(accumulating, tmp_path, "scheduled")
    assert "found GradientAccumulationScheduler" in scheduled["error"]


def two_loaders() -> Any:
    return CombinedLoader([marked_loader(1), marked_loader(1)], "max_size_cycle")


def named_loaders() -> Any:
    return {"a": marked_loader(1), "b": marked_loader(1)}


class TwoBatches(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first = batch["a"] if isinstance(batch, dict) else batch[0]
        return super().training_step(first, batch_idx)


@pytest.mark.parametrize("loaders", [two_loaders, named_loaders])
def test_several_loaders_are_refused(one_rank: Ranks, tmp_path: Path, loaders: Any) -> None:
    (found,) = one_rank.run(fit, tmp_path, TwoBatches, loader=loaders)
    assert "Expected one training loader in private training, found 2" in found["error"]


def test_a_loader_that_reads_ahead_is_no_skipping_one() -> None:
    deliveries = Deliveries()
    unknown = delivered((x for x in range(4)), deliveries)
    arriving = iter(unknown)
    next(arriving), next(arriving)  # Lightning has one in store
    assert deliveries.take().batch == 0
    next(arriving)
    assert deliveries.take().batch == 1
    next(arriving)
    with pytest.raises(StopIteration):
        next(arriving)
    assert [deliveries.take().batch for _ in range(2)] == [2, 3]
    with pytest.raises(ValueError, match="a fresh batch"):
        deliveries.take()


def test_workers_read_ahead_and_epochs_end() -> None:
    """Batches are drawn before they are delivered; a pass that is cut short leaves some."""
    deliveries = Deliveries()

    class ReadsAhead:
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[int]:
            for number in range(3):
                deliveries.note_drawn([number] * (number + 1))
            yield from range(3)

    loader = delivered(ReadsAhead(), deliveries)
    for _ in range(2):
        for number, batch in enumerate(loader):
            if number == 2:
                break
            found = deliveries.take()
            assert (found.batch, found.num_examples) == (batch, number + 1)
        deliveries.take()


# ---- every step releases the same ----------------------------------------------------------------


class ReadsSometimes(Model):
    """A second collection, read only in steps in which somebody marked is drawn."""

    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "rare"):
            self.rare = EmbeddingBagCollection(
                tables=[
                    EmbeddingBagConfig(
                        name="rare", num_embeddings=20, embedding_dim=8, feature_names=["f3"]
                    )
                ]
            )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = self.loss_n(batch)
        if bool((batch.dense_features[:, 0] == 7.0).any()):
            bags = batch.sparse_features["f3"]
            ids = KeyedJaggedTensor(keys=["f3"], values=bags.values() % 20, lengths=bags.lengths())
            losses = losses + self.rare(ids).values().sum(1)
        return losses


class Watches(Callback):
    def __init__(self) -> None:
        self.moved: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        module.state_dict()  # LazyDP's rows pay
        pieces = [p[3].flatten() for p in snapshot(module)["pieces"] if "rare" in p[0]]
        now = torch.cat([torch.zeros(0), *pieces])
        if hasattr(self, "before") and now.numel():
            self.moved.append(float((now != self.before).float().mean()))
        self.before = now


def sometimes(folder: Path, world_size: int, mechanism: Any) -> tuple[Any, list[float]]:
    watch = Watches()
    plan = PrivacyPlan(
        mechanism=mechanism,
        noise_multiplier=1.0,
        delta=1e-3,
        assume_independent_examples="ranks may read apart",
    )
    found = fit(folder, ReadsSometimes, plan, None, world_size, callbacks=[watch], max_steps=12)
    return found["error"], watch.moved


@pytest.mark.parametrize(
    "mechanism", [DPSGD(), LazyDP(), AdaFEST(threshold=-20.0)], ids=lambda m: type(m).__name__
)
def test_tables_that_a_step_does_not_read_have_their_noise(
    one_rank: Ranks, tmp_path: Path, mechanism: Any
) -> None:
    """All numbers move in every step, whether the person was drawn or not."""
    ((error, moved),) = one_rank.run(sometimes, tmp_path, 1, mechanism)
    assert error is None
    assert min(moved) > 0.99


def test_so_they_have_on_all_ranks_where_one_reads(two_ranks: Ranks, tmp_path: Path) -> None:
    for error, moved in two_ranks.run(sometimes, tmp_path, 2, DPSGD()):
        assert error is None
        assert min(moved, default=1.0) > 0.99


# ---- order and adjacency -------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(Marked().examples)


class Twice(Sampler[list[int]]):
    """A batch sampler of the user's, with an example that comes twice."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1, 2, 3], [4, 5, 5, 6])

    def __len__(self) -> int:
        return 2


def sampled(kind: str) -> Any:
    data = Marked()
    settings: dict[str, Any] = {"collate_fn": collate, "batch_size": BATCH}
    if kind == "replacement":
        return DataLoader(data, sampler=RandomSampler(data, replacement=True), **settings)
    if kind == "weights":
        weights = [1.0 + float(e[2]) for e in data.examples]
        sampler = WeightedRandomSampler(weights, len(data), replacement=False)
        return DataLoader(data, sampler=sampler, **settings)
    if kind == "twice":
        return DataLoader(data, batch_sampler=Twice(), collate_fn=collate)
    if kind == "own":
        batches = BatchSampler(SequentialSampler(data), BATCH, drop_last=False)
        return DataLoader(data, batch_sampler=_Own(batches), collate_fn=collate)
    if kind == "stream":
        return DataLoader(Stream(), **settings)
    if kind == "shuffled":
        return DataLoader(data, shuffle=True, **settings)
    return DataLoader(data, **settings)


class _Own(Sampler[list[int]]):
    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def unamplified(folder: Path, kind: str, plan: PrivacyPlan = UNAMPLIFIED) -> dict[str, Any]:
    if kind in ("own", "twice"):
        plan = replace(plan, expected_batch_size=BATCH)
    return fit(
        folder,
        plan=plan,
        loader=lambda: sampled(kind),
        max_epochs=2,
        max_steps=-1,
        use_distributed_sampler=kind not in ("own", "twice", "replacement"),
    )


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("replacement", "every example comes once, found RandomSampler"),
        ("weights", "every example comes once, found WeightedRandomSampler"),
        ("twice", "Expected every example once in a batch"),
    ],
)
def test_an_order_that_repeats_examples_is_refused(
    one_rank: Ranks, tmp_path: Path, kind: str, message: str
) -> None:
    (found,) = one_rank.run(unamplified, tmp_path, kind)
    assert message in found["error"]


@pytest.mark.parametrize("kind", ["plain", "shuffled", "own", "stream"])
def test_other_orders_protect_an_example_in_its_place(
    one_rank: Ranks, tmp_path: Path, kind: str
) -> None:
    """One more example would shift all others: the neighbour has none in its place."""
    (found,) = one_rank.run(unamplified, tmp_path, kind)
    assert found["error"] is None
    guarantee = found["facts"]["guarantee"]
    assert guarantee["adjacency"] == "one example replaced by none, in its place"
    believed = [line for line in found["facts"]["not_covered"] if "order" in line]
    assert bool(believed) == (kind in ("own", "stream"))


@pytest.mark.parametrize("kind", ["concat", "subset"])
def test_a_data_set_that_repeats_examples_is_refused(
    one_rank: Ranks, tmp_path: Path, kind: str
) -> None:
    (found,) = one_rank.run(repeating, tmp_path, kind)
    assert "Expected every example once in the data set, found 60" in found["error"]


def repeating(folder: Path, kind: str) -> dict[str, Any]:
    data = Marked()
    twice = ConcatDataset([data, data]) if kind == "concat" else Subset(data, [*range(SIZE)] * 2)
    loader = DataLoader(twice, batch_size=BATCH, collate_fn=collate)
    return fit(folder, loader=lambda: loader)


@pytest.mark.parametrize("delta", [0.9, 0.05, 1 / SIZE])
def test_a_delta_that_protects_nobody_is_refused(
    one_rank: Ranks, tmp_path: Path, delta: float
) -> None:
    plan = PrivacyPlan(noise_multiplier=1.0, delta=delta)
    (found,) = one_rank.run(fit, tmp_path, plan=plan)
    assert "Expected delta below 1 / 60" in found["error"]


def test_a_large_delta_is_warned_of(one_rank: Ranks, tmp_path: Path) -> None:
    (said,) = one_rank.run(warned, tmp_path)
    assert any("the chance that something goes wrong for somebody is 48%" in text for text in said)


def warned(folder: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(folder, plan=PrivacyPlan(noise_multiplier=1.0, delta=0.008))
    return [str(warning.message) for warning in caught]

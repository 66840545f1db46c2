"""What only shows when a plan meets a model, a loader or a trainer is refused before a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader, IterableDataset

from lightning_dpsparse import (
    AdaFEST,
    ExponentialSelection,
    GroupClipping,
    PrivacyPlan,
    Users,
)
from lightning_dpsparse.data import SyntheticData
from lightning_dpsparse.models import DLRMModule
from lightning_dpsparse.sampling.units import check_day_starts, check_one_day, check_users
from tests.support.bad_input import HUGE, NAN, refused
from tests.support.private_runs import NOISY, Marked, Watching, fit
from tests.support.ranks import Ranks
from tests.support.tiny_model import Bags, SmallModule, collate, make_trainer

UNAMPLIFIED = PrivacyPlan(
    noise_multiplier=1.0, delta=1e-3, sampling="unamplified", expected_batch_size=12
)


def noisy(**settings: Any) -> PrivacyPlan:
    return PrivacyPlan(noise_multiplier=1.0, delta=1e-3, **settings)


class Stream(IterableDataset[Any]):
    """Examples that come one after the other, without numbers."""

    def __iter__(self) -> Iterator[Any]:
        return iter(Marked().examples)


class Counted(Stream):
    def __len__(self) -> int:
        return 60


class Odd(Marked):
    """Marked examples whose users or days are of another kind."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        vars(self).update(attributes)


def streamed(data: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=6, collate_fn=collate)


def loaded(data: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=12, collate_fn=collate)


@pytest.mark.parametrize("data", [Stream, Counted])
def test_a_stream_trains_without_amplification(
    data: Any, one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    for ranks, world in ((one_rank, 1), (two_ranks, 2)):
        results = ranks.run(fit, world, UNAMPLIFIED, tmp_path, loader=streamed(data()))
        assert [result["steps"] for result in results] == [10] * world


PLANS: dict[str, tuple[PrivacyPlan, Any, str]] = {
    "no examples": (NOISY, loaded(Bags(0)), "Expected examples to train on"),
    "no examples in order": (
        noisy(sampling="fixed_order"),
        loaded(Bags(0)),
        "Expected examples to train on",
    ),
    "a table that is not there": (
        noisy(mechanism=AdaFEST(threshold=1.0, table_thresholds={"t1": 2.0, "nosuch": 1.0})),
        None,
        "found 'nosuch', which matches none of",
    ),
    "a layer that is not there": (
        noisy(clipping=GroupClipping({"nosuch*": 1.0, "*": 1.0})),
        None,
        "found 'nosuch*', which matches none of",
    ),
    "more rows than there are": (
        noisy(mechanism=ExponentialSelection(num_rows=2**31)),
        None,
        "of at most the 131 rows of all tables",
    ),
    "more users a step than there are": (
        noisy(unit=Users(max_examples=2), expected_batch_size=21),
        None,
        "Expected a batch size of at most 20, the number of users, found 21",
    ),
    "a batch of examples where users are drawn": (
        noisy(unit=Users(max_examples=2)),
        loaded(Odd(users=np.arange(60) // 6)),
        "Divide it by the examples that a user has, or set drawn='examples'",
    ),
    "users of another number": (
        noisy(unit=Users(max_examples=2)),
        loaded(Odd(users=np.zeros(59))),
        "Expected 60 users, one for each example",
    ),
    "users in two dimensions": (
        noisy(unit=Users(max_examples=2)),
        loaded(Odd(users=np.zeros((60, 1)))),
        "Expected 60 users, one for each example",
    ),
    "users of nan": (
        noisy(unit=Users(max_examples=2)),
        loaded(Odd(users=np.full(60, NAN))),
        "found numbers that are not finite",
    ),
    "users of several kinds": (
        noisy(unit=Users(max_examples=2)),
        loaded(Odd(users=np.array([None, "a"] * 30, dtype=object))),
        "Expected 60 users, one for each example",
    ),
    "days in another order": (
        noisy(by_day=True),
        loaded(Odd(day_starts=[30, 0])),
        "Expected day_starts to be the numbers",
    ),
    "days beyond the data": (
        noisy(by_day=True),
        loaded(Odd(day_starts=[0, 61])),
        "Expected day_starts from 0 to 60",
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_that_does_not_fit_is_refused_before_a_step(
    name: str, one_rank: Ranks, tmp_path: Path
) -> None:
    plan, loader, words = PLANS[name]
    found = one_rank.run(refusal_of_fit, plan, tmp_path, loader)[0]
    assert words in found["message"]
    assert found["drawn"] == []


def refusal_of_fit(plan: PrivacyPlan, folder: Path, loader: Any) -> dict[str, Any]:
    """Runs inside a rank."""
    module, message = Watching(), ""
    try:
        fit(1, plan, folder, module=module, loader=loader)
    except ValueError as error:
        message = f"{type(error).__name__}: {error}"
    assert message.startswith("Refused: Expected"), message
    return {"message": message, "drawn": module.drawn}


@pytest.mark.parametrize(
    "starts", [[], [0.5], ["a"], [[0]], [True], [NAN], [-1, 3], [HUGE], [0, 9]], ids=str
)
def test_days_that_are_none_are_refused(starts: Any) -> None:
    refused(lambda: check_day_starts(np.asarray(starts), 8), "day_starts")


def test_users_may_be_texts() -> None:
    for users in (["a", "b", "a"], np.array(["a", "b", "a"], dtype=object), [1.0, 2.0, 1.0]):
        check_users(np.asarray(users), 3)
        check_one_day(users, [0, 3])
        refused(lambda users=users: check_one_day(users, [0, 2]), "in_one_day to False")


# ---- searches of Lightning's ---------------------------------------------------------------------


class Tuned(SmallModule):
    """Its learning rate is looked for."""


def search(plan: PrivacyPlan | None, scalar: bool, by_callback: bool) -> str:
    """Runs inside a rank. What became of a search for a learning rate."""
    module, data = Tuned(scalar_loss=scalar), DataLoader(Bags(24), 8, collate_fn=collate)
    try:
        if by_callback:
            finder = LearningRateFinder(num_training_steps=3, attr_name="lr")
            make_trainer(1, privacy=plan, callbacks=[finder]).fit(module, data)
        else:
            trainer = make_trainer(1, privacy=plan, max_epochs=2)
            Tuner(trainer).lr_find(module, data, num_training=3, attr_name="lr")
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "found" if module.losses else "never trained"


@pytest.mark.parametrize("by_callback", [False, True], ids=["tuner", "callback"])
@pytest.mark.parametrize(
    ("plan", "scalar", "words"),
    [
        (
            NOISY,
            False,
            "Refused: Expected a learning rate that is set, found LearningRateFinder in",
        ),
        (None, False, "Refused: Expected a learning rate that is set, found LearningRateFinder w"),
        (None, True, "found"),
    ],
)
def test_a_search_for_a_learning_rate_is_refused_where_it_cannot_work(
    plan: PrivacyPlan | None, scalar: bool, words: str, by_callback: bool, one_rank: Ranks
) -> None:
    assert one_rank.run(search, plan, scalar, by_callback)[0].startswith(words)


@pytest.mark.parametrize("rate", [NAN, float("inf"), 1e300])
def test_a_dense_learning_rate_that_is_none_is_refused(
    rate: float, one_rank: Ranks, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="Expected a learning rate of the dense layers"):
        one_rank.run(train_at, rate)


def train_at(rate: float) -> None:
    """Runs inside a rank."""
    make_trainer(1).fit(SmallModule(lr=rate), DataLoader(Bags(8), 8, collate_fn=collate))


def test_a_model_without_its_strategy_is_refused() -> None:
    trainer = Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    data = SyntheticData(batch_size=4, num_rows=[5], examples_per_day=8)
    model = DLRMModule([5], 4, [4], [4, 1])
    refused(lambda: trainer.fit(model, datamodule=data), "found SingleDeviceStrategy")


def test_a_batch_with_other_counts_is_refused() -> None:
    data = SyntheticData(batch_size=4, num_rows=[5], examples_per_day=8)
    batch = data.collate(data.train_set.__getitems__([0, 1]))
    model = DLRMModule([5], 4, [4], [4, 1], num_counts=12)
    with torch.no_grad():
        model.configure_model()
        refused(lambda: model(batch), "num_counts=12 counts of every example, found 13")


def train_into(name: str, folder: Path) -> None:
    """Runs inside a rank."""
    where = FOLDERS[name](folder)
    refused(lambda: fit(1, NOISY, where, save_every=2), "Expected a folder")


def a_file(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file"


FOLDERS: dict[str, Callable[[Path], Path]] = {
    "no file system for files": lambda folder: Path("/proc/nothing"),
    "a file": a_file,
    "below a file": lambda folder: a_file(folder) / "runs",
    "a name that is too long": lambda folder: folder / ("a" * 300),
    "nowhere to write": lambda folder: Path("/sys/kernel"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_cannot_be_written_to_is_refused(
    name: str, one_rank: Ranks, tmp_path: Path
) -> None:
    one_rank.run(train_into, name, tmp_path)

"""Coupled examples are refused before anything is released, and nobody else is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dpsparse import DPSGD, LazyDP, PrivacyPlan, Users
from lightning_dpsparse.plugin.probe import coupling
from tests.support.naive_step import Batches
from tests.support.private_runs import BATCH, Marked, marked_loader
from tests.support.probe_models import COUPLED, FINE, Model
from tests.support.ranks import Ranks
from tests.support.tiny_model import collate, make_trainer, snapshot

NOISY = PrivacyPlan(mechanism=DPSGD(), noise_multiplier=1.0, delta=1e-3)


def fit(
    change: str,
    folder: Path,
    world_size: int = 1,
    plan: PrivacyPlan = NOISY,
    loader: Any = None,
    callbacks: Any = None,
    module: Any = None,
    **settings: Any,
) -> dict[str, Any]:
    """Runs inside a rank. Says whether anything moved, also where training was refused."""
    torch.manual_seed(0)
    module = module or Model(change)
    trainer = make_trainer(
        world_size,
        privacy=plan,
        default_root_dir=str(folder),
        callbacks=callbacks,
        **({"max_steps": 3, "max_epochs": -1} | settings),
    )
    error = None
    try:
        trainer.fit(module, loader or marked_loader(world_size))
    except ValueError as found:
        error = str(found)
    return {"error": error, "steps": trainer.global_step, "calls": module.calls}


@pytest.mark.parametrize("name", FINE)
def test_a_model_that_treats_examples_apart_is_let_through(
    one_rank: Ranks, tmp_path: Path, name: str
) -> None:
    (found,) = one_rank.run(fit, name, tmp_path)
    assert found["error"] is None
    assert found["steps"] == 3
    assert found["calls"] == 3  # what the probe did to the module was undone


@pytest.mark.parametrize(("name", "message"), COUPLED.items(), ids=COUPLED)
def test_a_model_that_couples_examples_is_refused_before_the_first_release(
    one_rank: Ranks, tmp_path: Path, name: str, message: str
) -> None:
    (found,) = one_rank.run(fit, name, tmp_path)
    assert found["error"] is not None
    assert any(part in found["error"] for part in message.split("|")), found["error"]
    assert found["steps"] == 0


def test_the_refusal_names_the_layer_where_it_shows_first(one_rank: Ranks, tmp_path: Path) -> None:
    (found,) = one_rank.run(fit, "minus_detached_mean", tmp_path)
    assert "the input of 'linear' with 'head.out.weight'" in found["error"]


class GathersRanks(Model):
    """Cross-rank negatives: every loss sees the hidden vectors of all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits, hidden = self.logits_and_hidden(batch)
        size = torch.tensor(len(hidden))
        torch.distributed.all_reduce(size, op=torch.distributed.ReduceOp.MAX)
        padded = F.pad(hidden.detach(), (0, 0, 0, int(size) - len(hidden)))
        gathered = [torch.zeros_like(padded) for _ in range(2)]
        torch.distributed.all_gather(gathered, padded)
        other = gathered[1 - torch.distributed.get_rank()]
        labels = batch.labels
        own = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return own + (hidden @ other.t()).sum(1)


@pytest.mark.parametrize("name", ["as_it_is", "with_dropout"])
def test_two_ranks_are_let_through(two_ranks: Ranks, tmp_path: Path, name: str) -> None:
    for found in two_ranks.run(fit, name, tmp_path, 2):
        assert found["error"] is None
        assert found["steps"] == 3


@pytest.mark.parametrize("name", ["minus_mean", "flipped", "over_batch_size"])
def test_all_ranks_refuse_together(two_ranks: Ranks, tmp_path: Path, name: str) -> None:
    one, two = two_ranks.run(fit, name, tmp_path, 2)
    assert one["error"] is not None
    assert one["error"] == two["error"]


def gathers(folder: Path) -> dict[str, Any]:
    return fit("", folder, 2, module=GathersRanks())


def beside_nobody(folder: Path, name: str) -> dict[str, Any]:
    """One rank has no examples in the first step, the other none in the second."""
    sizes = [[9, 0], [0, 5], [3, 40]]
    plan = PrivacyPlan(
        noise_multiplier=1.0, delta=1e-3, sampling="unamplified", expected_batch_size=20
    )
    loader = Batches(sizes, torch.distributed.get_rank())
    return fit(name, folder, 2, plan, loader)


def test_a_rank_without_examples_keeps_step(two_ranks: Ranks, tmp_path: Path) -> None:
    for found in two_ranks.run(beside_nobody, tmp_path, "as_it_is"):
        assert found["error"] is None
        assert found["steps"] == 3
    for found in two_ranks.run(beside_nobody, tmp_path, "minus_detached_mean"):
        assert "others change when some are" in found["error"]


def test_examples_of_other_ranks_count_as_others(two_ranks: Ranks, tmp_path: Path) -> None:
    for found in two_ranks.run(gathers, tmp_path):
        assert "others change when some are" in found["error"]


# ---- before training_step -----------------------------------------------------------------------


def mixing_collate(examples: list[Any]) -> Any:
    """Mix-up: every example's counts are mixed with the next one's."""
    batch = collate(examples)
    batch.dense_features = 0.7 * batch.dense_features + 0.3 * batch.dense_features.roll(1, 0)
    return batch


class MixesOnDevice(Model):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch.dense_features = batch.dense_features - batch.dense_features.mean(0)
        return batch


class ScalesOnDevice(Model):
    """Each example by itself: nothing wrong."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch.dense_features = batch.dense_features / 10
        return batch


class MixesInCallback(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        batch.dense_features -= batch.dense_features.mean(0)


def in_loader(folder: Path) -> dict[str, Any]:
    loader = DataLoader(Marked(), batch_size=BATCH, collate_fn=mixing_collate)
    return fit("as_it_is", folder, loader=loader)


def on_device(folder: Path, kind: Any) -> dict[str, Any]:
    return fit("as_it_is", folder, module=kind())


def in_callback(folder: Path) -> dict[str, Any]:
    return fit("as_it_is", folder, callbacks=[MixesInCallback()])


def test_a_collate_function_that_mixes_examples_is_found(one_rank: Ranks, tmp_path: Path) -> None:
    assert "others change when some are" in one_rank.run(in_loader, tmp_path)[0]["error"]


def test_a_transfer_hook_that_mixes_examples_is_found(one_rank: Ranks, tmp_path: Path) -> None:
    (found,) = one_rank.run(on_device, tmp_path, MixesOnDevice)
    assert "others change when some are" in found["error"]
    assert one_rank.run(on_device, tmp_path, ScalesOnDevice)[0]["error"] is None


def test_a_callback_that_writes_to_the_batch_is_found(one_rank: Ranks, tmp_path: Path) -> None:
    assert "a hook replaced it or wrote to it" in one_rank.run(in_callback, tmp_path)[0]["error"]


# ---- when --------------------------------------------------------------------------------------


class CouplesLater(Model):
    """Harmless for two steps, by another path from then on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.minus_mean(batch) if self.global_step >= 2 else self.as_it_is(batch)


class CouplesQuietly(Model):
    """From step 12 on, by the same operations."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        share = 1.0 if self.global_step >= 12 else 0.0
        return self.loss_n(batch, lambda h: h - share * h.mean(0).detach())


def later(folder: Path, kind: Any, steps: int) -> dict[str, Any]:
    return fit("", folder, module=kind(), max_steps=steps)


def test_another_path_is_probed_when_it_is_taken(one_rank: Ranks, tmp_path: Path) -> None:
    (found,) = one_rank.run(later, tmp_path, CouplesLater, 5)
    assert found["steps"] == 2
    assert found["error"] is not None


def test_the_same_path_is_probed_again_by_a_public_rule(one_rank: Ranks, tmp_path: Path) -> None:
    (found,) = one_rank.run(later, tmp_path, CouplesQuietly, 102)
    assert found["steps"] == 100
    assert found["error"] is not None
    assert [step for step in range(10**5) if coupling.is_due(step)][:7] == [
        0, 10, 100, 1000, 10000, 50000,
    ]  # fmt: skip


def test_whoever_says_why_is_not_probed(one_rank: Ranks, tmp_path: Path) -> None:
    plan = PrivacyPlan(
        noise_multiplier=1.0, delta=1e-3, assume_independent_examples="the mean is of no data"
    )
    (found,) = one_rank.run(fit, "minus_mean", tmp_path, plan=plan)
    assert found["error"] is None
    assert found["calls"] == 3
    assert any("the mean is of no data" in line for line in plan.assumptions())


def test_a_reason_must_be_given() -> None:
    with pytest.raises(ValueError, match="Expected a reason in assume_independent_examples"):
        PrivacyPlan(noise_multiplier=1.0, assume_independent_examples=" ")


@pytest.mark.parametrize(
    "plan",
    [
        PrivacyPlan(noise_multiplier=1.0, delta=1e-3, unit=Users(max_examples=3, drawn="users")),
        PrivacyPlan(noise_multiplier=1.0, delta=1e-3, sampling="fixed_order"),
        PrivacyPlan(mechanism=LazyDP(), noise_multiplier=1.0, delta=1e-3),
    ],
    ids=["users", "fixed order", "lazydp"],
)
def test_every_way_of_sampling_is_probed(one_rank: Ranks, tmp_path: Path, plan: Any) -> None:
    assert one_rank.run(fit, "as_it_is", tmp_path, plan=plan)[0]["error"] is None
    found = one_rank.run(fit, "minus_detached_mean", tmp_path, plan=plan)[0]
    assert "others change when some are" in found["error"]


def weights_after(folder: Path, probes: bool) -> Any:
    """Noise and samples are the same under one key, so only the probe could make a difference."""
    import secrets
    from unittest import mock

    plan = PrivacyPlan(
        mechanism=DPSGD(),
        noise_multiplier=1.0,
        delta=1e-3,
        assume_independent_examples=None if probes else "to compare",
    )
    torch.manual_seed(0)
    module = Model("with_dropout")
    with mock.patch.object(secrets, "token_bytes", bytes):
        trainer = make_trainer(1, privacy=plan, default_root_dir=str(folder), max_steps=3)
        trainer.fit(module, marked_loader(1))
    return snapshot(module), torch.rand(3), np.random.rand(3)


def test_the_probe_leaves_no_trace(one_rank: Ranks, tmp_path: Path) -> None:
    """The same weights to the last bit, with dropout, as without it."""
    (with_probe,), (without,) = (
        one_rank.run(weights_after, tmp_path, probes) for probes in (True, False)
    )
    for one, two in zip(with_probe[0]["pieces"], without[0]["pieces"]):
        assert torch.equal(one[3], two[3])
    for name, value in with_probe[0]["dense"].items():
        assert torch.equal(value, without[0]["dense"][name])
    assert torch.equal(with_probe[1], without[1])

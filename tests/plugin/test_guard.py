"""Nothing moves but what was released: whatever else writes is found in the step that it does."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn

from lightning_dpsparse import DPSGD, LazyDP, PrivacyPlan
from tests.support.private_runs import BATCH, marked_loader
from tests.support.probe_models import Model
from tests.support.ranks import Ranks
from tests.support.tiny_model import make_trainer, snapshot

PLAIN = {"noise_multiplier": 1.0, "delta": 1e-3, "clip_norm": 1.0}
ASSUMED = {"assume_independent_examples": "these tests are about something else"}
NOISY = PrivacyPlan(mechanism=DPSGD(), **PLAIN, **ASSUMED)
TRUSTED = PrivacyPlan(
    mechanism=DPSGD(), **PLAIN, **ASSUMED, assume_post_processing="a projection of weights"
)


class Plain(Model):
    """With one frozen layer, a buffer, and a place for whatever a test does."""

    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "extra"):
            self.extra = nn.Linear(12, 12)
            self.extra.requires_grad_(False)
            self.register_buffer("state", torch.zeros(12))
            self.register_buffer("large", torch.zeros(1 << 17))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss_n(batch, self.around)

    def around(self, hidden: Tensor) -> Tensor:
        return hidden + 0.1 * self.extra(hidden)


class CountsInPlace(Plain):
    def around(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            self.state.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        return super().around(hidden)


class CountsAnew(Plain):
    def around(self, hidden: Tensor) -> Tensor:
        self.state = 0.9 * self.state + 0.1 * hidden.detach().mean(0)
        return super().around(hidden)


class CountsThroughData(Plain):
    def around(self, hidden: Tensor) -> Tensor:
        self.state.data.copy_(hidden.detach().mean(0))
        return super().around(hidden)


class CountsInKernel(Plain):
    """torch's own normalisation writes its running mean without counting."""

    def around(self, hidden: Tensor) -> Tensor:
        out = F.instance_norm(
            hidden[:, :, None].expand(-1, -1, 2).detach(), self.state, self.state.abs() + 1
        )
        return super().around(hidden) + 0.0 * out.sum((1, 2))[:, None]


class WritesFrozen(Plain):
    def around(self, hidden: Tensor) -> Tensor:
        self.extra.weight.data.add_(hidden.detach().mean())
        return super().around(hidden)


class WritesTrainable(Plain):
    def around(self, hidden: Tensor) -> Tensor:
        self.head.out.bias.data.fill_(float(hidden.detach().mean()))
        return super().around(hidden)


class WritesInHook(Plain):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.head.out.bias.data.fill_(float(batch.labels.mean()))


class ReplacesInHook(Plain):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.head.out.bias.data = batch.labels.mean()[None]


class WritesTables(Plain):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for parameter in self.ebc.parameters():
                parameter.data[0] = batch.labels.mean()


class WritesMomentum(Plain):
    """Into the optimizer's state, which outlives the step."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for state in self.optimizers().optimizer.state.values():
            state["momentum_buffer"].add_(batch.labels.mean())


class ChangesGradients(Plain):
    def on_after_backward(self) -> None:
        self.head.out.weight.grad.add_(1.0)


class ReplacesGradients(Plain):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.head.out.weight.grad = torch.ones_like(self.head.out.weight)


class GivesFrozenGradients(Plain):
    """A frozen layer that is in the optimizer all the same."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.extra.weight.grad = torch.ones_like(self.extra.weight)


class SecondBackward(Plain):
    def on_after_backward(self) -> None:
        F.linear(torch.ones(1, 12), self.head.out.weight).sum().backward()


class BackwardInside(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = super().training_step(batch, batch_idx)
        losses.mean().backward(retain_graph=True)
        return losses


class Foreign(Plain):
    """A parameter that lives outside the module, in its optimizer."""

    def configure_optimizers(self) -> Any:
        self.others = [nn.Parameter(torch.ones(1))]
        return torch.optim.SGD([*self.parameters(), *self.others], lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.others[0]


class ForeignTensor(Plain):
    """Not even in the optimizer: updated by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not hasattr(self, "temperature"):
            object.__setattr__(self, "temperature", torch.ones(1, requires_grad=True))
        return super().training_step(batch, batch_idx) * self.temperature


class MakesParameter(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Parameter(torch.ones(1))
        return super().training_step(batch, batch_idx) * self.late


class KeepsGraph(Plain):
    """The last batch's graph is part of this one's loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = super().training_step(batch, batch_idx)
        before = self.bank[-1] if self.bank else 0.0
        self.bank.append(losses.sum())
        return losses + 1e-3 * before


class WritesInValidation(Plain):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.head.out.bias.data.fill_(float(batch.labels.mean()))


class WritesLargeBuffer(Plain):
    """Too large to be added up in every step, and written past the counter."""

    def around(self, hidden: Tensor) -> Tensor:
        self.large.data[: len(hidden)] = hidden.detach()[:, 0]
        return super().around(hidden)


class ReadsTable(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weights = [parameter.square().sum() for parameter in self.ebc.parameters()]
        return super().training_step(batch, batch_idx) + 1e-3 * sum(weights)


FORWARD = "changed in the forward pass"
REFUSED = {
    CountsInPlace: ("'state' changed in the forward pass", 0),
    CountsAnew: ("'state' changed in the forward pass", 0),
    CountsThroughData: ("'state' changed in the forward pass", 0),
    CountsInKernel: ("'state' changed in the forward pass", 0),
    WritesFrozen: ("'extra.weight' changed in the forward pass", 0),
    WritesTrainable: ("'head.out.bias' changed in the forward pass", 0),
    WritesInHook: ("'head.out.bias' changed since the last step", 1),
    ReplacesInHook: ("'head.out.bias' changed since the last step", 1),
    WritesMomentum: ("changed since the last step", 1),
    WritesTables: ("'the tables' changed since the last step", 1),
    ChangesGradients: ("as the private step released it, found that it was changed", 0),
    ReplacesGradients: ("'head.out.weight' as the private step released it, found one that was", 0),
    GivesFrozenGradients: ("'extra.weight' as the private step released it, found one that", 0),
    SecondBackward: ("a backward pass of its own left on 'head.out.weight'", 0),
    BackwardInside: ("found that one has been made in training_step", 0),
    Foreign: ("to hold parameters of the module only", 0),
    ForeignTensor: ("one for another tensor, of shape (1,)", 0),
    MakesParameter: ("one for another tensor, of shape (1,) ('late')", 0),
    KeepsGraph: ("one for another tensor", 1),
    WritesInValidation: ("'head.out.bias' changed in validation", 5),
    ReadsTable: ("reads a table's weight itself", 0),
}


def fit(kind: Any, folder: Path, plan: PrivacyPlan = NOISY, **settings: Any) -> dict[str, Any]:
    """Runs inside a rank."""
    torch.manual_seed(0)
    module = kind()
    settings = {"max_steps": 6, "max_epochs": -1, "num_sanity_val_steps": 0} | settings
    trainer = make_trainer(1, privacy=plan, default_root_dir=str(folder), **settings)
    error = None
    try:
        trainer.fit(module, marked_loader(1), marked_loader(1, shuffle=False))
        if kind is WritesLargeBuffer:
            trainer.save_checkpoint(folder / "last.ckpt")
    except ValueError as found:
        error = str(found)
    return {"error": error, "steps": trainer.global_step, "saved": list(folder.glob("*.ckpt"))}


class WithoutOptimizer(Plain):
    """Only its tables learn."""

    def configure_optimizers(self) -> Any:
        return None


@pytest.mark.parametrize("kind", [Plain, WithoutOptimizer])
def test_a_module_that_leaves_all_alone_is_let_through(
    one_rank: Ranks, tmp_path: Path, kind: Any
) -> None:
    found = one_rank.run(fit, kind, tmp_path)[0]
    assert found["error"] is None
    assert found["steps"] == 6


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_whatever_else_moves_is_refused_in_its_step(
    one_rank: Ranks, tmp_path: Path, kind: Any
) -> None:
    message, steps = REFUSED[kind]
    (found,) = one_rank.run(fit, kind, tmp_path)
    assert found["error"] is not None
    assert message in found["error"]
    assert found["steps"] == steps
    assert not found["saved"]


class Saves(Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir) / "any.ckpt")


def large(folder: Path) -> dict[str, Any]:
    return fit(WritesLargeBuffer, folder, callbacks=[Saves()])


def test_a_large_buffer_is_compared_before_it_is_saved(one_rank: Ranks, tmp_path: Path) -> None:
    (found,) = one_rank.run(large, tmp_path)
    assert "'large' changed before it was saved" in found["error"]
    assert not found["saved"]


@pytest.mark.parametrize("kind", [WritesInHook, CountsInPlace, ChangesGradients, WritesTables])
def test_whoever_says_why_may_write(one_rank: Ranks, tmp_path: Path, kind: Any) -> None:
    assert one_rank.run(fit, kind, tmp_path, TRUSTED)[0]["error"] is None
    assert "a projection of weights" in TRUSTED.assumptions()[1]


@pytest.mark.parametrize("kind", [ReplacesGradients, SecondBackward, Foreign, ForeignTensor])
def test_nobody_may_bring_raw_gradients(one_rank: Ranks, tmp_path: Path, kind: Any) -> None:
    assert one_rank.run(fit, kind, tmp_path, TRUSTED)[0]["error"] is not None


# ---- averages of Lightning's ---------------------------------------------------------------------


def averaged(folder: Path, kind: Any) -> dict[str, Any]:
    callback = (
        EMAWeightAveraging(decay=0.5)
        if kind == "ema"
        else StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
    )
    return fit(Plain, folder, callbacks=[callback], max_epochs=3, max_steps=-1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_averages_of_released_weights_are_let_through(
    one_rank: Ranks, tmp_path: Path, kind: str
) -> None:
    assert one_rank.run(averaged, tmp_path, kind)[0]["error"] is None


# ---- layers that are thawed ----------------------------------------------------------------------


class Thaws(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            module.extra.requires_grad_(True)
        if trainer.global_step == 4:
            module.head.hidden.requires_grad_(False)


class Gradual(Plain):
    """Losses of enormous gradients; weights are remembered after every step."""

    scale = 1e6

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Tensor]] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.head.parameters(), *self.extra.parameters()], lr=1.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.scale * super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append({name: p.detach().clone() for name, p in self.named_parameters()})


class Quiet(Gradual):
    scale = 0.0


def thawed(folder: Path, kind: Any) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    module = kind()
    trainer = make_trainer(
        1,
        privacy=NOISY,
        default_root_dir=str(folder),
        callbacks=[Thaws()],
        max_steps=6,
        max_epochs=-1,
    )
    trainer.fit(module, marked_loader(1))
    return module.seen


def test_thawed_layers_join_clipping_and_noise_and_frozen_ones_leave(
    one_rank: Ranks, tmp_path: Path
) -> None:
    """No step moves anything by more than clip norm and noise allow: C times the number of examples
    over the expected batch, and some ten standard deviations."""
    (seen,) = one_rank.run(thawed, tmp_path, Gradual)
    most = 60 / BATCH + 10 / BATCH
    for before, after in pairwise(seen):
        for name in ("extra.weight", "head.hidden.weight"):
            assert (after[name] - before[name]).abs().max() < most
    assert torch.equal(seen[0]["extra.weight"], seen[1]["extra.weight"])
    assert not torch.equal(seen[1]["extra.weight"], seen[2]["extra.weight"])
    assert not torch.equal(seen[2]["head.hidden.weight"], seen[3]["head.hidden.weight"])
    assert torch.equal(seen[4]["head.hidden.weight"], seen[5]["head.hidden.weight"])


def test_noise_on_thawed_layers_has_its_variance(one_rank: Ranks, tmp_path: Path) -> None:
    """Four steps of 156 draws: the mean square has a standard error of 6%."""
    (seen,) = one_rank.run(thawed, tmp_path, Quiet)
    moves = [
        (after[name] - before[name]).flatten()
        for before, after in pairwise(seen[1:])
        for name in ("extra.weight", "extra.bias")
    ]
    draws = torch.cat(moves) * BATCH
    assert abs(float(draws.square().mean()) - 1) < 5 * math.sqrt(2 / draws.numel())


# ---- tables outside a step -----------------------------------------------------------------------


class TrainsInCallback(Callback):
    """A backward pass through the tables, outside any step."""

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, *args: Any
    ) -> None:
        before = snapshot(module)
        output = module.ebc(batch.sparse_features).values()
        assert not output.requires_grad
        after = snapshot(module)
        for one, two in zip(before["pieces"], after["pieces"]):
            assert torch.equal(one[3], two[3])


def in_callback(folder: Path) -> dict[str, Any]:
    return fit(Plain, folder, callbacks=[TrainsInCallback()])


def test_no_gradient_reaches_tables_outside_a_step(one_rank: Ranks, tmp_path: Path) -> None:
    assert one_rank.run(in_callback, tmp_path)[0]["error"] is None


class Evaluates(Gradual):
    """Tables in evaluation mode are tables all the same."""

    def on_train_start(self) -> None:
        self.ebc.eval()
        self.first = snapshot(self)

    def on_train_batch_end(self, *args: Any) -> None:
        self.last = snapshot(self)


def evaluating(folder: Path) -> float:
    torch.manual_seed(0)
    module = Evaluates()
    trainer = make_trainer(1, privacy=NOISY, default_root_dir=str(folder), max_steps=1)
    trainer.fit(module, marked_loader(1))
    pieces = zip(module.first["pieces"], module.last["pieces"])
    return max(float((two[3] - one[3]).abs().max()) for one, two in pieces)


def test_tables_in_evaluation_mode_are_clipped_and_noised(one_rank: Ranks, tmp_path: Path) -> None:
    """Raw gradients are a million times as large; the fused learning rate is 0.1."""
    (moved,) = one_rank.run(evaluating, tmp_path)
    assert 0 < moved < 0.1 * (60 + 10) / BATCH


class LooksAtWeights(Callback):
    """After every step, at a whole table."""

    def __init__(self) -> None:
        self.moved: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        weights = [parameter.detach().clone() for parameter in module.ebc.parameters()]
        if hasattr(self, "before"):
            moved = [(a != b).any(1).float().mean() for a, b in zip(weights, self.before)]
            self.moved.append(float(min(moved)))
        self.before = weights


def looked_at(folder: Path) -> list[float]:
    callback = LooksAtWeights()
    plan = PrivacyPlan(mechanism=LazyDP(), **PLAIN, **ASSUMED)
    fit(Plain, folder, plan, callbacks=[callback])
    return callback.moved


def test_who_looks_at_lazy_weights_finds_them_paid(one_rank: Ranks, tmp_path: Path) -> None:
    """Every row has moved since the last look, whether anybody read it or not."""
    (moved,) = one_rank.run(looked_at, tmp_path)
    assert moved == [1.0] * 5

"""Settings that were once ignored in silence: each is refused, or does what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from lightning_dpsparse import DPSGD, PrivacyPlan
from tests.support.private_runs import marked_loader
from tests.support.probe_models import Model
from tests.support.ranks import Ranks
from tests.support.tiny_model import NUM_COUNTS, make_trainer

NOISY = PrivacyPlan(mechanism=DPSGD(), noise_multiplier=1.0, delta=1e-3)


class Changed(Model):
    """The small model with one thing changed by `build`, and `around` its hidden layer."""

    def configure_model(self) -> None:
        is_new = self.ebc is None
        super().configure_model()
        if is_new:
            self.build()

    def build(self) -> None: ...

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss_n(batch, lambda hidden: self.around(hidden, batch))

    def around(self, hidden: Tensor, batch: Any) -> Tensor:
        return hidden


class FrozenTables(Changed):
    def build(self) -> None:
        self.ebc.requires_grad_(False)


class OneFrozenTable(Changed):
    def build(self) -> None:
        self.ebc.embedding_bags["t1"].weight.requires_grad_(False)


class OptimizerInBackward(Changed):
    def build(self) -> None:
        apply_optimizer_in_backward(torch.optim.Adagrad, self.ebc.parameters(), {"lr": 0.5})


class TiedTables(Changed):
    def build(self) -> None:
        bags = self.ebc.embedding_bags
        bags["t0"].weight = nn.Parameter(torch.zeros_like(bags["t1"].weight))
        bags["t1"].weight = bags["t0"].weight


class TiedHead(Changed):
    def build(self) -> None:
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.ebc.embedding_bags["t0"].weight


class MaxNorm(Changed):
    def build(self) -> None:
        self.kinds = nn.Embedding(8, 12, max_norm=1.0)

    def around(self, hidden: Tensor, batch: Any) -> Tensor:
        return hidden + self.kinds(batch.labels.long())


class MaxNormOfBags(MaxNorm):
    def build(self) -> None:
        self.kinds = nn.EmbeddingBag(8, 12, max_norm=1.0)

    def around(self, hidden: Tensor, batch: Any) -> Tensor:
        return hidden + self.kinds(batch.labels.long()[:, None])


class MaxNormByFunction(Changed):
    def build(self) -> None:
        self.kinds = nn.Parameter(torch.randn(8, 12))

    def around(self, hidden: Tensor, batch: Any) -> Tensor:
        return hidden + F.embedding(batch.labels.long(), self.kinds, max_norm=1.0)


class ScaledByFrequency(MaxNorm):
    def build(self) -> None:
        self.kinds = nn.Embedding(8, 12, scale_grad_by_freq=True)


class WritesInputs(Changed):
    """After the layer saw them, which autograd would have minded."""

    def build(self) -> None:
        self.extra = nn.Linear(12, 12)

    def around(self, hidden: Tensor, batch: Any) -> Tensor:
        value = hidden * 1.0
        out = self.extra(value)
        value.mul_(0.1)
        return out + value


REFUSED = {
    FrozenTables: "requires_grad=False",
    OneFrozenTable: "requires_grad=False for 'embedding_bags.t1.weight'",
    OptimizerInBackward: "apply_optimizer_in_backward",
    TiedTables: "is tied to",
    TiedHead: "is tied to",
    MaxNorm: "Expected no max_norm in Embedding",
    MaxNormOfBags: "Expected no max_norm in EmbeddingBag",
    MaxNormByFunction: "without max_norm",
    ScaledByFrequency: "scale_grad_by_freq=False",
    WritesInputs: "written to in place",
}


def fit(
    module: Any, folder: Path, plan: PrivacyPlan = NOISY, steps: int = 4, loader: Any = None
) -> Any:
    trainer = make_trainer(
        1, privacy=plan, max_steps=steps, max_epochs=-1, default_root_dir=str(folder)
    )
    torch.manual_seed(3)
    trainer.fit(module, marked_loader(1) if loader is None else loader)
    run = trainer.strategy.private_run  # type: ignore[attr-defined]
    return run.facts()["guarantee"], getattr(module, "seen", None)


@pytest.mark.parametrize(
    ("kind", "message"), REFUSED.items(), ids=lambda x: getattr(x, "__name__", "")
)
def test_it_is_refused(one_rank: Ranks, tmp_path: Path, kind: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        one_rank.run(fit, kind(), tmp_path)


# ---- what does what it says ---------------------------------------------------------------------


class Padded(Changed):
    """A row of padding stays as it is, noise or not, as torch has it."""

    def build(self) -> None:
        self.kinds = nn.Embedding(8, 12, padding_idx=1)
        self.bags = nn.EmbeddingBag(8, 12, padding_idx=2, mode="sum")

    def around(self, hidden: Tensor, batch: Any) -> Tensor:
        labels = batch.labels.long()
        return hidden + self.kinds(labels) + self.bags(labels[:, None] + 1)

    def on_train_end(self) -> None:
        self.seen = [self.kinds.weight.detach().clone(), self.bags.weight.detach().clone()]


def test_rows_of_padding_keep_still(one_rank: Ranks, tmp_path: Path) -> None:
    guarantee, (kinds, bags) = one_rank.run(fit, Padded(), tmp_path)[0]
    assert guarantee["is_private"]
    assert (kinds[1] == 0).all()
    assert (bags[2] == 0).all()
    assert (kinds[0] != 0).all()


class Autocast(Changed):
    """Half precision inside: clipping must still hold exactly."""

    def build(self) -> None:
        self.extra = nn.Linear(NUM_COUNTS, 12)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = self.extra(batch.dense_features)
        return 100.0 * out.float().square().sum(1) + 0.0 * super().training_step(batch, batch_idx)


class Extreme(Changed):
    """Features of 1e18 and gradients of 1e-23: their squares leave float32, their products do
    not."""

    def build(self) -> None:
        self.extra = nn.Linear(NUM_COUNTS, 12, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.extra(1e18 * (1 + batch.dense_features))
        return 1e-23 * out.sum(1) + 0.0 * super().training_step(batch, batch_idx)


class Watched(Changed):
    def on_after_backward(self) -> None:
        norms = [p.grad.double().norm() for p in self.parameters() if p.grad is not None]
        self.seen = max(getattr(self, "seen", 0.0), float(torch.stack(norms).norm()))


class WatchedAutocast(Watched, Autocast): ...


class WatchedExtreme(Watched, Extreme): ...


@pytest.mark.parametrize(("kind", "clip_norm"), [(WatchedAutocast, 0.01), (WatchedExtreme, 1e-7)])
def test_clipping_holds_in_half_precision_and_out_of_range(
    one_rank: Ranks, tmp_path: Path, kind: Any, clip_norm: float
) -> None:
    """An example alone moves the dense layers by at most C, and by more than nothing."""
    plan = PrivacyPlan(
        noise_multiplier=0.0,
        delta=1e-3,
        clip_norm=clip_norm,
        sampling="unamplified",
        expected_batch_size=1,
    )
    ones = marked_loader(1, batch_size=1, shuffle=False)
    _, largest = one_rank.run(fit, kind(), tmp_path, plan, 30, ones)[0]
    assert 0 < largest <= clip_norm * (1 + 1e-6)

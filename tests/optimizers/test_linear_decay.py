"""Learning rates that fall to zero at the last step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from lightning_dpsparse import DPSparseStrategy, FusedOptimizer, LazyDP, LinearDecay, PrivacyPlan
from lightning_dpsparse.data.synthetic import SyntheticData
from lightning_dpsparse.models import DLRMModule
from lightning_dpsparse.refused import Refused
from tests.support.ranks import Ranks


def rates(scheduler: LinearDecay, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return found


def decay(lr: float = 8.0, steps: int | None = 4) -> LinearDecay:
    return LinearDecay(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr), steps)


def test_rates_fall_to_zero_and_stay_there() -> None:
    assert rates(decay(), 6) == [8.0, 6.0, 4.0, 2.0, 0.0, 0.0]


def test_a_run_that_goes_on_with_another_number_of_steps_follows_the_new_plan() -> None:
    before, after = decay(), decay(steps=8)
    rates(before, 4)
    after.optimizer.load_state_dict(before.optimizer.state_dict())  # with a rate of zero
    after.load_state_dict(before.state_dict())
    assert after.get_last_lr() == [4.0]
    assert rates(after, 3) == [8.0 * (1 - t / 8) for t in (4, 5, 6)]
    assert after.total_steps == 8


def test_rates_that_are_tensors_stay_tensors() -> None:
    before, after = decay(), decay(steps=8)
    rates(before, 2)
    group = after.optimizer.param_groups[0]
    group["lr"] = rate = torch.tensor(8.0)
    after.load_state_dict(before.state_dict())
    assert group["lr"] is rate
    assert float(rate) == 6.0


@pytest.mark.parametrize("steps", [0, -1, 2.5, True, "4"])
def test_what_is_no_number_of_steps_is_refused(steps: Any) -> None:
    with pytest.raises(Refused, match="total_steps"):
        decay(steps=steps)


def test_training_without_end_is_refused() -> None:
    with pytest.raises(Refused, match="without end"):
        decay(steps=None).set_total_steps(math.inf)


def test_it_must_know_the_number_of_steps() -> None:
    with pytest.raises(Refused, match="nobody said"):
        rates(decay(steps=None), 2)


class Watch(Callback):
    """Notes the learning rate of every step."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def train(folder: Path, privacy: PrivacyPlan | None, module: Any = None) -> list[float]:
    """Runs inside a rank: six steps in two epochs."""
    watch = Watch()
    data = SyntheticData(batch_size=8, num_rows=[5, 7], examples_per_day=24, val_days=0)
    module = module or DLRMModule(
        [5, 7],
        4,
        [4],
        [4, 1],
        optimizer=lambda p: torch.optim.SGD(p, lr=0.5),
        lr_scheduler=LinearDecay,
    )
    trainer = Trainer(
        strategy=DPSparseStrategy(
            privacy=privacy, fused_optimizer=FusedOptimizer(kind="sgd", learning_rate=2.0)
        ),
        max_epochs=2,
        callbacks=[watch],
        default_root_dir=folder,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data.train_dataloader())
    return watch.rates


@pytest.mark.parametrize(
    "privacy",
    [None, PrivacyPlan(mechanism=LazyDP(), noise_multiplier=1.0, delta=1e-3)],
    ids=["plain", "lazydp"],
)
def test_a_model_fills_in_the_steps_of_the_trainer(
    one_rank: Ranks, tmp_path: Path, privacy: PrivacyPlan | None
) -> None:
    (found,) = one_rank.run(train, tmp_path, privacy)
    assert found == pytest.approx([0.5 * (1 - t / 6) for t in range(6)])


class Own(DLRMModule):
    """A user's own module, which gives its schedule as most tutorials do: for every epoch."""

    def __init__(self, steps: int | None, interval: str | None) -> None:
        super().__init__([5, 7], 4, [4], [4, 1])
        self.steps, self.interval = steps, interval

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        scheduler: Any = LinearDecay(optimizer, self.steps)
        if self.interval is not None:
            scheduler = {"scheduler": scheduler, "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


@pytest.mark.parametrize(
    ("steps", "interval", "words"),
    [
        (6, None, "stepped after every epoch: the rate would hardly fall"),
        (6, "epoch", "stepped after every epoch: the rate would hardly fall"),
        (None, "step", "nobody said"),
    ],
)
def test_a_rate_that_would_not_fall_is_refused_before_the_first_step(
    one_rank: Ranks, tmp_path: Path, steps: int | None, interval: str | None, words: str
) -> None:
    with pytest.raises(Refused, match=words):
        one_rank.run(train, tmp_path, None, Own(steps, interval))


def test_epochs_may_be_what_is_counted(one_rank: Ranks, tmp_path: Path) -> None:
    (found,) = one_rank.run(train, tmp_path, None, Own(2, "epoch"))
    assert found == pytest.approx([0.5] * 3 + [0.25] * 3)

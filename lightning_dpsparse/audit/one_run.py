"""One-run audit: coins put canaries into the data, and an attacker guesses the coins.

A model is trained once. A fair coin decides for each of many canaries whether it is in the data,
and the attacker guesses the coins from the trained model. Too many right guesses disprove the
claimed epsilon (`bound.py`; Steinke, Nasr, Jagielski 2023).

White box: the whole gradient of a canary is one row of a table that only canaries read. It is
clipped to C like every gradient, so the released row says all that can be said about the canary,
and no canary could be stronger. Black box: canaries are random examples, and the attacker sees only
the loss of the model on them.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from numpy.typing import NDArray
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from typing_extensions import override

from lightning_dpsparse.audit.bound import CONFIDENCE, Measured, measure
from lightning_dpsparse.audit.canaries import (
    CANARY,
    MOST_CANARIES,
    auditable,
    insert_canaries,
    mark_as_audited,
)
from lightning_dpsparse.audit.example_losses import losses_on_examples
from lightning_dpsparse.checks import check_flag, check_number, check_whole
from lightning_dpsparse.data.batch import ClickData, Clicks
from lightning_dpsparse.plan import PrivacyPlan
from lightning_dpsparse.plugin.callbacks import private_run
from lightning_dpsparse.plugin.probe.repeatable import silenced
from lightning_dpsparse.plugin.strategy import DPSparseStrategy
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.process_group import from_rank_zero
from lightning_dpsparse.sharded.shards import whole_table

Scores = dict[str, NDArray[np.float64]]

_WIDTH = 4  # the smallest width of a table that FBGEMM takes

# B examples, M canaries, D width


@dataclass(frozen=True)
class OneRunResult:
    """The epsilon that a run claimed, and the lower bound that an attack measured."""

    claimed_epsilon: float | None
    """The epsilon of the privacy report; None if the run claims no privacy."""
    delta: float
    measured: Measured
    confidence: float
    num_canaries: int
    is_white_box: bool

    @property
    def passed(self) -> bool:
        return self.claimed_epsilon is None or self.measured.epsilon <= self.claimed_epsilon

    def for_report(self) -> dict[str, Any]:
        """The result as the privacy report stores it."""
        box = "white box" if self.is_white_box else "black box"
        return {
            "name": f"one run, {box}, {self.num_canaries:,} canaries",
            "claimed_epsilon": self.claimed_epsilon,
            "measured_epsilon": self.measured.epsilon,
            "confidence": self.confidence,
            "passed": self.passed,
        }

    def __str__(self) -> str:
        claim = "nothing claimed"
        if self.claimed_epsilon is not None:
            claim = f"claimed ε ≤ {self.claimed_epsilon:.4g}"
        found = self.measured
        return (
            f"{claim}, measured ε ≥ {found.epsilon:.4g} at δ {self.delta:.3g} with confidence "
            f"{self.confidence:g} ({found.num_right:,} of {found.num_guesses:,} guesses right, "
            f"attack: {found.attack})"
        )


class CanaryModule(LightningModule):
    """A model beside a table with one row for each canary.

    The loss of a canary is a steep function of its own row and of nothing else.

    Args:
        inner: The model. It trains on all other examples as it would without canaries.
        num_canaries: Rows of the table.
        steepness: Slope of a canary's loss. It is at least the clip norm, so that the gradient of a
            canary is always clipped to it.
    """

    def __init__(self, inner: LightningModule, num_canaries: int, steepness: float) -> None:
        super().__init__()
        self.inner, self.num_canaries, self.steepness = inner, num_canaries, steepness
        self.canaries: EmbeddingBagCollection | None = None

    @override
    def configure_model(self) -> None:
        self.inner.configure_model()
        if self.canaries is None:
            config = EmbeddingBagConfig(
                name="canaries",
                num_embeddings=self.num_canaries,
                embedding_dim=_WIDTH,
                feature_names=[CANARY],
                init_fn=nn.init.zeros_,
            )
            self.canaries = EmbeddingBagCollection(tables=[config])

    @override
    def configure_optimizers(self) -> Any:
        return self.inner.configure_optimizers()

    @override
    def on_train_epoch_start(self) -> None:
        with silenced(self.inner):  # only the outermost module may log
            self.inner.on_train_epoch_start()

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        assert self.canaries is not None
        features = batch.sparse_features
        others, number = features.split([len(features.keys()) - 1, 1])
        with silenced(self.inner):
            loss_B = self.inner.training_step(replace(batch, sparse_features=others), batch_idx)
        row_BD = self.canaries(number).values()
        assert isinstance(loss_B, Tensor)
        return torch.where(number.lengths() > 0, self.steepness * row_BD.sum(1), loss_B)

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        with silenced(self.inner):
            self.inner.validation_step(batch, batch_idx)


class _PutIn(Callback):
    """Puts the canaries that the coins chose into the training data, at the recipe's own rate."""

    is_included_M: NDArray[np.bool_]
    canaries: Clicks

    def __init__(self, num_canaries: int, seed: int | None, *, is_white_box: bool) -> None:
        self._num_canaries, self._seed, self._is_white_box = num_canaries, seed, is_white_box

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        data = auditable(trainer.datamodule)  # type: ignore[attr-defined]
        # Every rank must toss the same coins.
        seed = from_rank_zero(lambda: secrets.randbits(62) if self._seed is None else self._seed)
        draws = np.random.default_rng(seed)
        self.is_included_M = draws.random(self._num_canaries) < 0.5
        self.canaries = data.train_set.random_examples(
            self._num_canaries, int(draws.integers(1 << 62))
        )
        strategy = _strategy(trainer)
        plan = strategy.privacy
        assert plan is not None
        before = _num_units(data, plan)
        which = np.flatnonzero(self.is_included_M)
        insert_canaries(data, self.canaries, which, is_numbered=self._is_white_box)
        batch = plan.expected_batch_size or data.batch_size
        grown = max(1, round(batch * _num_units(data, plan) / before))
        strategy.amend_plan(expected_batch_size=grown)
        mark_as_audited(strategy)


def _num_units(data: ClickData, plan: PrivacyPlan) -> int:
    """Number of units that sampling draws: examples, or users with all their examples."""
    return len(np.unique(data.train_set.users) if plan.draws_whole_users else data.train_set)  # type: ignore[attr-defined]


def one_run_audit(
    trainer: Trainer,
    module: LightningModule,
    data: ClickData,
    *,
    num_canaries: int,
    is_white_box: bool = True,
    confidence: float = CONFIDENCE,
    seed: int | None = None,
) -> OneRunResult:
    """Train `module` with canaries, and measure what the trained model tells about them.

    The trained model is for study only. `seed` is for coins and canaries, never for noise.

    Guarantees: for a run that is as private as it claims, the measured epsilon is above the claim
    with probability at most 1 - confidence.
    """
    expected = "num_canaries of at least 2 and confidence between 0 and 1"
    check_whole("num_canaries", num_canaries, 2, MOST_CANARIES, expected=expected)
    check_number("confidence", confidence, above=0, below=1, expected=expected)
    check_flag("is_white_box", is_white_box)
    if seed is not None:
        check_whole("seed", seed, 0, remedy="Or leave it out.")
    plan = _strategy(trainer).privacy
    if plan is None:
        raise Refused(
            "Expected a recipe with a privacy plan, found none: there is no claim to audit. Set "
            "the strategy's privacy."
        )
    put_in = _PutIn(num_canaries, seed, is_white_box=is_white_box)
    trainer.callbacks.append(put_in)  # type: ignore[attr-defined]
    trainer.limit_val_batches = 0
    fitted: LightningModule = module
    if is_white_box:
        fitted = CanaryModule(module, num_canaries, steepness=10.0 * plan.clip_norm)
    trainer.fit(fitted, datamodule=data)
    run = private_run(trainer)
    if is_white_box:
        scores = attacks_on_rows(whole_table(fitted, "canaries"), trainer.world_size)
    else:
        device = trainer.strategy.root_device
        scores = {"low loss": -losses_on_examples(module, data, device, put_in.canaries)}
    delta = run.budget.run.delta
    return OneRunResult(
        run.facts()["guarantee"]["epsilon"],
        delta,
        measure(scores, put_in.is_included_M, delta, confidence),
        confidence,
        num_canaries,
        is_white_box,
    )


def attacks_on_rows(row_MD: Tensor, world_size: int) -> Scores:
    """Scores of how much each canary's row looks as if its canary had been in the data.

    All rows are zero before training.

    down    how far the row went in the direction in which the gradient of its canary sends it
    moved   how far the row went at all; rows that no example reads must move as well
    pairs   the difference to the row at the same place on another rank; noise that two ranks
            wrongly drew alike cancels in it
    """
    down_M = -row_MD.double().sum(1).cpu().numpy()
    scores = {"down": down_M, "moved": row_MD.double().norm(dim=1).cpu().numpy()}
    if world_size > 1:
        apart = -(-len(down_M) // world_size)
        scores["pairs"] = down_M - np.roll(down_M, apart)
    return scores


def _strategy(trainer: Trainer) -> DPSparseStrategy:
    if not isinstance(trainer.strategy, DPSparseStrategy):
        raise Refused(
            f"Expected DPSparseStrategy, found {type(trainer.strategy).__name__}. Audits are of "
            "runs that it trains."
        )
    return trainer.strategy

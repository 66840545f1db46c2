"""Whole private runs: who is drawn, what is charged, where it ends, and how it goes on."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_dpsparse import DPSGD, EANA, PrivacyPlan, PrivacyReport, Users
from lightning_dpsparse.accounting.ledger import Ledger, read_ledger
from lightning_dpsparse.plugin.private_run import CHECKPOINT_KEY
from lightning_dpsparse.report import read as read_report
from tests.ranks import Ranks
from tests.small import Bags, SmallModule, assemble, collate, make_trainer, snapshot

SIZE, BATCH = 60, 12  # a rate of 0.2, epochs of five steps
TARGET = PrivacyPlan(epsilon=3.0, delta=1e-3)
NOISY = PrivacyPlan(noise_multiplier=1.0, delta=1e-3)
REPLAYED = PrivacyPlan(noise_multiplier=1.0, delta=1e-3, fixed_key=4)


class Marked(Bags):
    """Says who is who by the first dense feature; `users` has three examples each."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(size)
        for i, (counts, _, _) in enumerate(self.examples):
            counts[0] = float(i)
        self.users = np.arange(size) // 3
        self.day_starts = [0, size // 2]


class Watching(SmallModule):
    """Keeps what each step drew, and can fail or die in one of them."""

    def __init__(self, fail_at: int | None = None, die_at: int | None = None) -> None:
        super().__init__(lr=0.01)
        self.fail_at, self.die_at = fail_at, die_at
        self.drawn: list[list[int]] = []
        self.epsilons: list[float] = []
        self.unit_sizes: list[list[int] | None] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        step = len(self.drawn)
        self.drawn.append(batch.dense_features[:, 0].long().tolist())
        run = self.trainer.strategy.private_run  # type: ignore[attr-defined]
        self.unit_sizes.append(run.steps._unit_sizes if run else None)
        if step == self.fail_at:
            raise RuntimeError("this step fails")
        if step == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        shown = self.trainer.callback_metrics.get("epsilon")
        self.epsilons.append(float("nan") if shown is None else float(shown))


def strict_collate(examples: list[Any]) -> Any:
    """Like most: no idea of nobody."""
    if not examples:
        raise IndexError("cannot collate nobody")
    return collate(examples)


def marked_loader(world: int, **kwargs: Any) -> DataLoader[Any]:
    settings = {"batch_size": BATCH // world, "collate_fn": strict_collate, "shuffle": True}
    return DataLoader(Marked(), **(settings | kwargs))


def fit(
    world: int,
    privacy: PrivacyPlan | None,
    folder: Path,
    *,
    resume: Path | None = None,
    module: Watching | None = None,
    loader: Any = None,
    save_every: int | None = None,
    weights_only: bool = False,
    with_facts: bool = False,
    **trainer: Any,
) -> dict[str, Any]:
    """Runs inside a rank."""
    torch.manual_seed(0)
    module = module or Watching()
    callbacks: list[Any] = trainer.pop("callbacks", [])
    if save_every:
        name = "weights-{step}" if weights_only else "{step}"
        saver = ModelCheckpoint(
            folder,
            filename=name,
            every_n_train_steps=save_every,
            save_top_k=-1,
            save_weights_only=weights_only,
        )
        callbacks = [*callbacks, saver]
        trainer["enable_checkpointing"] = True
    maker = make_trainer(
        world, privacy=privacy, callbacks=callbacks, default_root_dir=str(folder), **trainer
    )
    maker.fit(module, marked_loader(world) if loader is None else loader, ckpt_path=resume)
    run = maker.strategy.private_run  # type: ignore[attr-defined]
    return {
        "drawn": module.drawn,
        "epsilons": module.epsilons,
        "unit_sizes": module.unit_sizes,
        "ledger": run.budget.ledger.to_data() if run else None,
        "noise": run.budget.run.noise_multiplier if run else None,
        "state": snapshot(module),
        "steps": maker.global_step,
        "facts": run.facts() if run and with_facts else None,
    }


def ledger_of(result: dict[str, Any]) -> Ledger:
    return Ledger.from_data(result["ledger"])


def saved_ledger(path: Path) -> Ledger:
    meta = torch.load(path / "meta.pt", weights_only=True)
    return Ledger.from_data(meta[CHECKPOINT_KEY]["ledger"])


@pytest.mark.parametrize("world", [1, 2])
def test_a_target_is_met_and_shown(
    world: int, one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    ranks = one_rank if world == 1 else two_ranks
    results = ranks.run(fit, world, TARGET, tmp_path, max_epochs=2)
    for result in results:
        assert result["steps"] == 10
        assert ledger_of(result).steps == 10
        assert result["epsilons"] == sorted(result["epsilons"])
        assert result["epsilons"][-1] <= 3.0
        assert result["noise"] == results[0]["noise"]
    exact = ledger_of(results[0]).epsilon(1e-3)
    assert 2.98 < exact <= 3.0
    assert exact <= results[0]["epsilons"][-1] + 1e-6


def test_batches_are_poisson_samples_of_all_examples(two_ranks: Ranks, tmp_path: Path) -> None:
    """Ranks hold fixed halves; sizes vary; nobody twice in a batch; nobody at all is fine too."""
    results = two_ranks.run(
        fit, 2, PrivacyPlan(noise_multiplier=1.0, delta=1e-3, expected_batch_size=3), tmp_path
    )
    first, second = (result["drawn"] for result in results)
    assert len(first) == len(second) == 20  # 60 / 3
    for mine, theirs in zip(first, second):
        assert len({*mine, *theirs}) == len(mine) + len(theirs)
        assert max(mine, default=0) < 30 <= min(theirs, default=30)
    sizes = [len(mine) + len(theirs) for mine, theirs in zip(first, second)]
    assert len(set(sizes)) > 2
    assert any(not mine for mine in first)


def test_the_users_seed_has_no_say(one_rank: Ranks, tmp_path: Path) -> None:
    first, second = (one_rank.run(seeded, tmp_path)[0] for _ in range(2))
    assert first != second


def seeded(folder: Path) -> list[list[int]]:
    pl.seed_everything(1, verbose=False)
    drawn: list[list[int]] = fit(1, NOISY, folder)["drawn"]
    os.environ.pop("PL_GLOBAL_SEED")  # the rank lives on
    return drawn


@pytest.mark.parametrize("world", [1, 2])
def test_min_epochs_cannot_overspend(
    world: int, one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    plan = PrivacyPlan(epsilon=3.0, delta=1e-3, noise_multiplier=1.0)
    ranks = one_rank if world == 1 else two_ranks
    result = ranks.run(fit, world, plan, tmp_path, min_epochs=30, max_epochs=30, save_every=1000)[0]
    ledger = ledger_of(result)
    assert 5 < ledger.steps < 150
    assert result["steps"] == len(result["drawn"]) == ledger.steps
    assert ledger.epsilon(1e-3) <= 3.0
    more = ledger.copy()
    more.charge(ledger.entries[0].event)
    assert more.epsilon(1e-3) > 3.0
    checkpoint = next(tmp_path.glob("budget-spent*.ckpt"))
    assert saved_ledger(checkpoint) == ledger
    assert read_report(checkpoint)["ran"]["steps"] == ledger.steps


def overspend(folder: Path) -> None:
    """Whoever lifts the trainer's limit meets the engine's."""

    class Greedy(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            trainer.fit_loop.epoch_loop.max_steps = 1000

    plan = PrivacyPlan(epsilon=3.0, delta=1e-3, noise_multiplier=1.0)
    fit(1, plan, folder, max_epochs=30, callbacks=[Greedy()])


def test_the_engine_refuses_the_step_that_would_overspend(one_rank: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="found the budget spent after"):
        one_rank.run(overspend, tmp_path)


def test_a_spent_run_takes_no_further_step(one_rank: Ranks, tmp_path: Path) -> None:
    one_rank.run(fit, 1, TARGET, tmp_path, max_epochs=2, save_every=10)
    again = one_rank.run(fit, 1, TARGET, tmp_path, max_epochs=2, resume=tmp_path / "step=10.ckpt")[
        0
    ]
    assert again["drawn"] == []


def test_a_failed_step_is_charged(one_rank: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="this step fails"):
        one_rank.run(fit, 1, NOISY, tmp_path, module=Watching(fail_at=3))
    (path,) = (tmp_path / "privacy").glob("*.json")
    ledger = read_ledger(path)
    assert ledger is not None
    assert ledger.steps == 4


@pytest.mark.parametrize("weights_only", [False, True])
def test_every_checkpoint_has_its_ledger_and_report(
    one_rank: Ranks, tmp_path: Path, weights_only: bool
) -> None:
    one_rank.run(fit, 1, NOISY, tmp_path, save_every=2, weights_only=weights_only)
    name = "weights-step=4.ckpt" if weights_only else "step=4.ckpt"
    assert saved_ledger(tmp_path / name).steps == 4
    facts = read_report(tmp_path / name)
    assert facts["ran"]["steps"] == 4
    assert facts["guarantee"]["epsilon"] == pytest.approx(
        saved_ledger(tmp_path / name).epsilon(1e-3)
    )


def test_no_secret_is_in_a_checkpoint(one_rank: Ranks, tmp_path: Path) -> None:
    one_rank.run(fit, 1, REPLAYED, tmp_path, save_every=2)
    secret = (4).to_bytes(16, "big")
    for path in (tmp_path / "step=2.ckpt").rglob("*"):
        if path.is_file():
            assert secret not in path.read_bytes()


def test_a_resumed_run_spends_on(one_rank: Ranks, tmp_path: Path) -> None:
    """Fresh coins, the same noise level, one ledger."""
    plan = PrivacyPlan(epsilon=3.0, delta=1e-3)
    whole = one_rank.run(fit, 1, plan, tmp_path, save_every=4, max_epochs=2)[0]
    resumed = one_rank.run(
        fit, 1, plan, tmp_path / "more", resume=tmp_path / "step=4.ckpt", max_epochs=2
    )[0]
    ledger = ledger_of(resumed)
    assert ledger.run == ledger_of(whole).run
    # The first run went on to step 10: those six steps are spent, and nothing is left.
    assert (ledger.steps, ledger.lost) == (10, 6)
    assert resumed["drawn"] == []
    assert ledger.epsilon(1e-3) == ledger_of(whole).epsilon(1e-3)


def test_a_resumed_run_draws_fresh_coins(one_rank: Ranks, tmp_path: Path) -> None:
    whole = one_rank.run(fit, 1, NOISY, tmp_path, save_every=4, max_epochs=2)[0]
    resumed = one_rank.run(
        fit, 1, NOISY, tmp_path / "more", resume=tmp_path / "step=4.ckpt", max_epochs=2
    )[0]
    assert len(resumed["drawn"]) == 6
    assert resumed["drawn"] != whole["drawn"][4:]
    ledger = ledger_of(resumed)
    assert (ledger.steps, ledger.lost) == (16, 6)
    assert ledger.epsilon(1e-3) > ledger_of(whole).epsilon(1e-3)


@pytest.mark.parametrize("world", [1, 2])
def test_with_a_fixed_key_resumed_is_uninterrupted(
    world: int, one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    """A step draws the same batch and the same noise again: bit for bit, and called not private."""
    ranks = one_rank if world == 1 else two_ranks
    whole = ranks.run(fit, world, REPLAYED, tmp_path, with_facts=True, save_every=3, max_epochs=2)
    resumed = ranks.run(
        fit, world, REPLAYED, tmp_path, resume=tmp_path / "step=3.ckpt", max_epochs=2
    )
    assert resumed[0]["drawn"] == whole[0]["drawn"][3:]
    expected, found = (assemble([r["state"] for r in results]) for results in (whole, resumed))
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert whole[0]["facts"]["guarantee"]["epsilon"] is None
    assert whole[0]["facts"]["guarantee"]["faults"] == ["Fixed noise key: not private."]


@pytest.mark.parametrize("world", [1, 2])
def test_steps_of_a_killed_run_stay_charged(world: int, tmp_path: Path) -> None:
    ranks = Ranks(world)
    try:
        with pytest.raises(RuntimeError, match=r"rank"):
            ranks.run(
                fit, world, NOISY, tmp_path, save_every=5, max_epochs=10, module=Watching(die_at=23)
            )
        checkpoint = tmp_path / "step=20.ckpt"
        before = saved_ledger(checkpoint)
        assert before.steps == 20
        result = ranks.run(
            fit, world, NOISY, tmp_path, resume=checkpoint, max_steps=22, max_epochs=10
        )[0]
    finally:
        ranks.stop()
    ledger = ledger_of(result)
    assert ledger.run == before.run
    assert len(result["drawn"]) == 2
    # Steps 20 to 23 had begun; the journal was at most 16 ahead.
    assert 4 <= ledger.lost <= 4 + 16
    assert ledger.steps == 22 + ledger.lost
    assert ledger.epsilon(1e-3) > before.epsilon(1e-3)


def test_a_lost_journal_is_a_taint(one_rank: Ranks, tmp_path: Path) -> None:
    one_rank.run(fit, 1, NOISY, tmp_path, save_every=4)
    for path in (tmp_path / "privacy").iterdir():
        path.unlink()
    result = one_rank.run(
        fit, 1, NOISY, tmp_path, resume=tmp_path / "step=4.ckpt", with_facts=True
    )[0]
    assert any("journal" in taint for taint in result["facts"]["taints"])
    assert ledger_of(result).steps == 5


def test_a_private_run_cannot_go_on_without_a_plan(one_rank: Ranks, tmp_path: Path) -> None:
    one_rank.run(fit, 1, NOISY, tmp_path, save_every=4)
    with pytest.raises(ValueError, match="Expected a privacy plan to go on with a private run"):
        one_rank.run(fit, 1, None, tmp_path, resume=tmp_path / "step=4.ckpt", max_epochs=2)


def test_other_noise_is_charged_as_it_is(one_rank: Ranks, tmp_path: Path) -> None:
    one_rank.run(fit, 1, NOISY, tmp_path, save_every=5)
    less = PrivacyPlan(noise_multiplier=0.7, delta=1e-3)
    checkpoint = tmp_path / "step=5.ckpt"
    result = one_rank.run(
        warned, less, tmp_path, checkpoint, "goes on with other noise, batches or data"
    )[0]
    assert [entry.count for entry in ledger_of(result).entries] == [5, 5]


def warned(plan: PrivacyPlan, folder: Path, resume: Path, message: str) -> dict[str, Any]:
    with pytest.warns(UserWarning, match=message):
        return fit(1, plan, folder, resume=resume, max_epochs=2)


def test_training_on_goes_on_with_the_ledger(one_rank: Ranks, tmp_path: Path) -> None:
    """A second fit of the same module, by another trainer, is the same model."""
    ledger = Ledger.from_data(one_rank.run(fit_twice, tmp_path)[0])
    assert ledger.steps == 10


def fit_twice(folder: Path) -> dict[str, Any]:
    module = Watching()
    fit(1, NOISY, folder, module=module)
    data: dict[str, Any] = fit(1, NOISY, folder, module=module)["ledger"]
    return data


def test_whole_users_are_drawn_together(two_ranks: Ranks, tmp_path: Path) -> None:
    plan = PrivacyPlan(
        noise_multiplier=1.0,
        delta=1e-3,
        unit=Users(max_examples=2, drawn="users"),
        expected_batch_size=5,
    )
    results = two_ranks.run(fit, 2, plan, tmp_path, with_facts=True)
    drawn = [step for result in results for step in result["drawn"] if step]
    for step in drawn:
        users = [i // 3 for i in step]
        assert all(users.count(user) == 2 for user in users)  # two of three are kept
        assert all(i % 3 < 2 for i in step)
    for result in results:  # and the step is told whose they are
        users = [[2] * (len(step) // 2) for step in result["drawn"]]
        assert result["unit_sizes"] == users
    assert len(results[0]["drawn"]) == 4  # 20 users, five a step
    facts = results[0]["facts"]
    assert facts["guarantee"]["unit"] == "user"
    assert facts["ran"]["num_units"] == 20
    assert facts["ran"]["sampling_rate"] == 0.25


def test_examples_of_capped_users(one_rank: Ranks, tmp_path: Path) -> None:
    plan = PrivacyPlan(noise_multiplier=1.0, delta=1e-3, unit=Users(max_examples=2))
    result = one_rank.run(fit, 1, plan, tmp_path, with_facts=True)[0]
    assert all(i % 3 < 2 for step in result["drawn"] for i in step)
    assert "up to 2 of them of one user" in result["facts"]["ledger"][0]["event"]


def test_days_one_after_the_other(one_rank: Ranks, tmp_path: Path) -> None:
    plan = PrivacyPlan(noise_multiplier=1.0, delta=1e-3, by_day=True)
    result = one_rank.run(fit, 1, plan, tmp_path, with_facts=True, max_steps=8)[0]
    days = [{i // 30 for i in step} for step in result["drawn"]]
    assert all(day <= {0} for day in days[:4])
    assert all(day <= {1} for day in days[4:])
    assert len(days) == 8
    parts = [(entry["partition"], entry["steps"]) for entry in result["facts"]["ledger"]]
    assert parts == [("day 1", 4), ("day 2", 4)]


def test_fixed_order_is_charged_by_the_pass(two_ranks: Ranks, tmp_path: Path) -> None:
    plan = PrivacyPlan(noise_multiplier=1.0, delta=1e-3, sampling="fixed_order")
    results = two_ranks.run(fit, 2, plan, tmp_path, loader=marked_loader(2, shuffle=False))
    seen = sorted(i for result in results for step in result["drawn"] for i in step)
    assert seen == list(range(SIZE))
    (entry,) = ledger_of(results[0]).entries
    assert entry.count == 1
    assert ledger_of(results[0]).steps == 5


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Marked().examples)


def weighted() -> DataLoader[Any]:
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * SIZE, SIZE)
    return marked_loader(1, sampler=sampler, shuffle=None)


def test_days_take_one_epoch(one_rank: Ranks, tmp_path: Path) -> None:
    plan = PrivacyPlan(noise_multiplier=1.0, delta=1e-3, by_day=True)
    with pytest.raises(ValueError, match="Expected max_epochs=1 or max_steps with by_day"):
        one_rank.run(fit, 1, plan, tmp_path, max_epochs=2)


FIXED = PrivacyPlan(noise_multiplier=1.0, delta=1e-3, sampling="fixed_order")
BY_USER = PrivacyPlan(noise_multiplier=1.0, delta=1e-3, unit=Users(max_examples=1))


@pytest.mark.parametrize(
    ("plan", "loader", "message"),
    [
        (FIXED, weighted(), "for sampling='fixed_order', found one with a WeightedRandomSampler"),
        (NOISY, weighted(), "found one with a WeightedRandomSampler"),
        (
            NOISY,
            DataLoader(Stream(), batch_size=4, collate_fn=collate),
            "Expected a DataLoader over a map-style data set for sampling='poisson', found Stream",
        ),
        (
            BY_USER,
            DataLoader(Bags(9), batch_size=3, collate_fn=collate),
            "Expected Bags.users, which says whose each example is",
        ),
    ],
)
def test_loaders_that_the_accounting_does_not_fit_are_refused(
    one_rank: Ranks, tmp_path: Path, plan: PrivacyPlan, loader: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        one_rank.run(fit, 1, plan, tmp_path, loader=loader)


class Scheduled(Watching):
    """Asks in configure_optimizers how long training is: that loads the data early."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches == 5
        return super().configure_optimizers()


def test_data_that_is_loaded_early_is_drawn_by_the_plan_too(
    one_rank: Ranks, tmp_path: Path
) -> None:
    result = one_rank.run(fit, 1, REPLAYED, tmp_path, module=Scheduled())[0]
    plain = one_rank.run(fit, 1, REPLAYED, tmp_path)[0]
    assert result["drawn"] == plain["drawn"]
    assert len({len(step) for step in result["drawn"]}) > 1


def fit_two_loaders(folder: Path, second: int) -> None:
    loaders = [marked_loader(1), DataLoader(Bags(second), batch_size=3, collate_fn=collate)]
    fit(1, NOISY, folder, loader=loaders)


def test_one_loader_is_accounted_for(one_rank: Ranks, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Expected one training loader, the same in every epoch"):
        one_rank.run(fit_two_loaders, tmp_path, 9)


def test_taints_are_found(one_rank: Ranks, tmp_path: Path) -> None:
    facts = one_rank.run(tainted, tmp_path)[0]
    assert facts["taints"] == [
        "vocabulary counted on the data",
        "Training may have been stopped early by a metric of validation data.",
        "Logged without noise: train_loss.",
    ]
    written = read_report(tmp_path)
    assert written["taints"] == facts["taints"]
    assert (tmp_path / "privacy_report.html").stat().st_size > 1000
    json.dumps(facts, allow_nan=False)


class Telling(Watching):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss.detach().sum(), batch_size=1)
        return loss


def tainted(folder: Path) -> dict[str, Any]:
    stopper = pl.callbacks.EarlyStopping("train_loss", strict=False, check_on_train_epoch_end=True)
    plan = PrivacyPlan(noise_multiplier=1.0, delta=1e-3, taints=("vocabulary counted on the data",))
    callbacks = [stopper, PrivacyReport()]
    facts: dict[str, Any] = fit(
        1, plan, folder, module=Telling(), callbacks=callbacks, with_facts=True
    )["facts"]
    return facts


@pytest.mark.parametrize("mechanism", [DPSGD(), EANA()])
def test_the_monitor_marks_what_is_not_private(
    one_rank: Ranks, tmp_path: Path, mechanism: Any
) -> None:
    quiet, loud = (one_rank.run(monitored, tmp_path, mechanism, d)[0] for d in (False, True))
    assert set(quiet) - {"epsilon"} == {"noise_multiplier", "noise_stddev"}
    assert quiet["noise_stddev"] == pytest.approx(1.0 * 0.5 / BATCH)
    extra = {"nonprivate/units_clipped", "nonprivate/rows_read"}
    assert set(loud) - set(quiet) == extra
    assert loud["nonprivate/units_clipped"] == 1.0  # C is below every example's norm
    assert 0 < loud["nonprivate/rows_read"] < 1


def monitored(folder: Path, mechanism: Any, diagnostics: bool) -> dict[str, float]:
    from lightning_dpsparse import PrivacyMonitor

    plan = PrivacyPlan(mechanism=mechanism, noise_multiplier=1.0, delta=1e-3, clip_norm=0.5)
    trainer = make_trainer(
        1,
        privacy=plan,
        callbacks=[PrivacyMonitor(diagnostics=diagnostics)],
        default_root_dir=str(folder),
    )
    trainer.fit(Watching(), marked_loader(1))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_callbacks_need_a_plan(one_rank: Ranks, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Expected DPSparseStrategy with a privacy plan"):
        one_rank.run(fit, 1, None, tmp_path, callbacks=[PrivacyReport()])

"""Files hold the average, and training goes on from the weights beside it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_dpsparse import AverageWeights, FusedOptimizer, LazyDP, Placement
from lightning_dpsparse.sharded.checkpoint import consolidate
from tests.support.averaging_runs import Loaded, Weights, after, assert_near, by_hand, whole
from tests.support.checkpoint_runs import BATCH, ROWS, ROWWISE, SIZE, TABLES, assert_equal, predict
from tests.support.forged import signed
from tests.support.lazydp_runs import EAGER, LAZY, unmoved
from tests.support.naive_step import Batches, plan
from tests.support.plain_training import SGD
from tests.support.ranks import Ranks
from tests.support.tiny_model import Bags, SmallModule, collate, loader, make_trainer, snapshot

STEPS, SAVED = 12, 7
LAST, FADING = {"fraction": 0.75}, {"half_life": 4.0}


def fit(
    world: int,
    placement: Placement,
    optimizer: FusedOptimizer,
    averages: dict[str, float] | None,
    folder: Path | None = None,
    resume: Path | None = None,
    mechanism: Any = None,
    watches: bool = True,
    steps: int = STEPS,
    **settings: Any,
) -> dict[str, Any]:
    """Train up to `steps`, and save after `SAVED` of them; runs inside a rank."""
    torch.manual_seed(0 if resume is None else 99)
    module, weights = Loaded(schedule="cosine", lr=0.05), Weights()
    callbacks: list[Callback] = [weights] if watches else []
    if averages is not None:
        callbacks.append(AverageWeights(**averages))
    if folder is not None:
        saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED, save_top_k=-1)
        callbacks.append(saver)
    privacy = None
    data: Any = loader(SIZE, BATCH, world)
    if mechanism is not None:
        privacy = plan(noise=2.0, mechanism=mechanism, noise_source="row_keyed")
        rank = torch.distributed.get_rank() if world > 1 else None
        data = Batches([[2, 1], [0, 0], [1, 2]] * (STEPS // 3), rank)
    trainer = make_trainer(
        world,
        placement,
        optimizer,
        privacy=privacy,
        callbacks=callbacks,
        enable_checkpointing=folder is not None,
        max_epochs=-1,
        max_steps=steps,
        **settings,
    )
    with unmoved():
        trainer.fit(module, data, ckpt_path=resume)
    if folder is not None and resume is None:
        trainer.save_checkpoint(folder / "end")
    return {"end": snapshot(module), "after": weights.after, "loaded": module.loaded}


def saved_at(folder: Path, step: int = SAVED) -> Path:
    return folder / f"step={step}.ckpt"


@pytest.mark.parametrize("averages", [LAST, FADING], ids=["last", "fading"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_run_equals_an_uninterrupted_one(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path, world: int, averages: Any
) -> None:
    """Bit by bit: the weights that it goes on from, and the average in the end."""
    ranks = {1: one_rank, 2: two_ranks}[world]
    straight = ranks.run(fit, world, ROWS, ROWWISE, averages, tmp_path)
    resumed = ranks.run(fit, world, ROWS, ROWWISE, averages, resume=saved_at(tmp_path))
    assert_equal(whole(resumed, "loaded"), after(straight)[SAVED - 1])
    assert_equal(after(resumed)[-1], after(straight)[-1])
    assert_equal(whole(resumed), whole(straight))
    assert_near(whole(straight), by_hand(after(straight), **averages), 1e-6)


def test_another_world_size_goes_on_with_both(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    straight = two_ranks.run(fit, 2, ROWS, ROWWISE, LAST, tmp_path)
    resumed = one_rank.run(fit, 1, TABLES, ROWWISE, LAST, resume=saved_at(tmp_path))
    assert_equal(whole(resumed, "loaded"), after(straight)[SAVED - 1])
    weights = after(straight)[:SAVED] + after(resumed)
    assert_near(whole(resumed), by_hand(weights, **LAST), 1e-6)


def test_without_the_callback_training_goes_on_from_the_weights(
    one_rank: Ranks, tmp_path: Path
) -> None:
    straight = one_rank.run(fit, 1, TABLES, ROWWISE, LAST, tmp_path)
    resumed = one_rank.run(fit, 1, TABLES, ROWWISE, None, resume=saved_at(tmp_path))
    assert_equal(whole(resumed), after(straight)[-1])


@pytest.mark.parametrize("name", ["saved", "end"])
def test_whoever_evaluates_or_exports_reads_the_average(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path, name: str
) -> None:
    """`end` was saved by hand after `fit`, when the module held the average."""
    straight = two_ranks.run(fit, 2, ROWS, ROWWISE, LAST, tmp_path)
    path = tmp_path / "end" if name == "end" else saved_at(tmp_path)
    steps = STEPS if name == "end" else SAVED
    expected = by_hand(after(straight)[:steps], **LAST, planned=STEPS)
    whole_file = consolidate(path)
    assert_near(whole_file["state_dict"], expected, 1e-6)
    assert "current_model_state" not in whole_file
    plain = SmallModule.load_from_checkpoint(path)
    assert_near(dict(plain.state_dict()), expected, 1e-6)
    with torch.no_grad():
        by_plain = plain(collate(Bags(SIZE).examples))
    found = torch.cat(one_rank.run(predict, 1, path)[0])
    torch.testing.assert_close(found, by_plain, rtol=0, atol=1e-6)
    resumed = one_rank.run(fit, 1, TABLES, ROWWISE, LAST, resume=path, steps=STEPS + 1)
    assert_equal(whole(resumed, "loaded"), after(straight)[steps - 1])


def fit_weights_only(folder: Path) -> None:
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED, save_weights_only=True)
    trainer = make_trainer(
        1, ROWS, ROWWISE, callbacks=[saver, AverageWeights(half_life=3)], max_steps=SAVED,
        max_epochs=-1, enable_checkpointing=True,
    )  # fmt: skip
    trainer.fit(SmallModule(), loader(SIZE, BATCH, 1))


def test_weights_alone_are_the_average_alone(one_rank: Ranks, tmp_path: Path) -> None:
    one_rank.run(fit_weights_only, tmp_path)
    stored = torch.load(saved_at(tmp_path) / "meta.pt", weights_only=False)
    names = stored["dpsparse_shard_index"]["entries"]
    assert {name.partition(".")[0] for name in names} == {"model"}


# ---- private runs --------------------------------------------------------------------------------


def test_rows_that_owe_noise_go_on_as_those_of_eager_dp_sgd(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    """Saved on two ranks, resumed on one; a file that is not the last is read, too."""
    runs = {}
    for name, mechanism in (("eager", EAGER), ("lazy", LAZY)):
        folder = tmp_path / name
        settings: dict[str, Any] = {"mechanism": mechanism, "watches": name == "eager"}
        first = two_ranks.run(
            fit, 2, ROWS, SGD, LAST, folder, default_root_dir=str(folder), **settings
        )
        second = one_rank.run(
            fit, 1, TABLES, SGD, LAST, resume=saved_at(folder), default_root_dir=str(folder),
            **settings,
        )  # fmt: skip
        runs[name] = first, second, consolidate(saved_at(folder))["state_dict"]
    first, second, saved = runs["eager"]
    assert_near(saved, by_hand(after(first)[:SAVED], **LAST, planned=STEPS), 1e-6)
    for one, two in zip(runs["lazy"][:2], runs["eager"][:2]):
        assert_near(whole(one), whole(two), 1e-6)
    assert_near(runs["lazy"][2], saved, 1e-6)
    assert_near(whole(second), by_hand(after(first)[:SAVED] + after(second), **LAST), 1e-6)


class Saves(Callback):
    """Saves a checkpoint while validation runs on the average."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == SAVED:
            trainer.save_checkpoint(self.path)


def validate_and_save(folder: Path, mechanism: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module, weights = SmallModule(), Weights()
    averages = AverageWeights(half_life=3.0)
    trainer = make_trainer(
        1,
        callbacks=[weights, averages, Saves(folder / "saved")],
        privacy=None if mechanism is None else plan(noise=1.0, mechanism=mechanism),
        default_root_dir=str(folder),
        val_check_interval=SAVED,
    )
    validation = DataLoader(Bags(8, seed=3), batch_size=8, collate_fn=collate)
    trainer.fit(module, Batches([[2, 1]] * STEPS, None), validation)
    return weights.after[SAVED - 1], snapshot(module)


@pytest.mark.parametrize("mechanism", [None, LazyDP()], ids=["plain", "LazyDP"])
def test_a_file_that_is_saved_in_validation_has_both(
    one_rank: Ranks, tmp_path: Path, mechanism: Any
) -> None:
    [(weights, _)] = one_rank.run(validate_and_save, tmp_path, mechanism)
    found = torch.load(tmp_path / "saved" / "meta.pt", weights_only=False)
    assert found["averaging_state"]["total"] > 3
    average = consolidate(tmp_path / "saved")["state_dict"]
    name = "head.out.weight"
    assert (average[name] - weights["dense"][name]).abs().max() > 1e-3
    [loaded] = one_rank.run(load_again, tmp_path, mechanism)
    assert torch.equal(loaded["dense"][name], weights["dense"][name])


class SavesAfterStep(Callback):
    """Saves a checkpoint after a step, before callbacks that stand behind it hear of the step, or
    interrupts training there."""

    def __init__(self, path: Path, interrupts: bool) -> None:
        self.path, self.interrupts = path, interrupts

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == SAVED:
            if self.interrupts:
                raise KeyboardInterrupt
            trainer.save_checkpoint(self.path)


def save_first(folder: Path, mechanism: Any, interrupts: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    module, weights = SmallModule(), Weights()
    watches = [] if mechanism is LAZY else [weights]
    privacy = None
    if mechanism is not None:
        privacy = plan(noise=1.0, mechanism=mechanism, noise_source="row_keyed")
    trainer = make_trainer(
        1,
        callbacks=[
            *watches,
            SavesAfterStep(folder / "saved", interrupts),
            AverageWeights(half_life=3.0),
        ],
        privacy=privacy,
        default_root_dir=str(folder),
    )
    with unmoved(), pytest.raises(SystemExit) if interrupts else nullcontext():
        trainer.fit(module, Batches([[2, 1]] * STEPS, None))
    return {"end": snapshot(module), "after": weights.after}


@pytest.mark.parametrize("interrupts", [False, True], ids=["", "interrupted"])
@pytest.mark.parametrize("mechanism", [None, EAGER, LAZY], ids=["plain", "DPSGD", "LazyDP"])
def test_a_file_of_a_callback_that_comes_first_has_the_last_step_too(
    one_rank: Ranks, tmp_path: Path, mechanism: Any, interrupts: bool
) -> None:
    """And so has the module, if training is interrupted there."""
    results = one_rank.run(save_first, tmp_path, mechanism, interrupts)
    if mechanism is LAZY:  # with the same draws
        eager = one_rank.run(save_first, tmp_path / "eager", EAGER, interrupts)
    else:
        eager = results
    if not interrupts:
        saved = consolidate(tmp_path / "saved")["state_dict"]
        assert_near(saved, by_hand(after(eager)[:SAVED], half_life=3.0), 1e-6)
    assert_near(whole(results), by_hand(after(eager), half_life=3.0), 1e-6)


def load_again(folder: Path, mechanism: Any) -> Any:
    module = Loaded()
    trainer = make_trainer(
        1,
        callbacks=[AverageWeights(half_life=3.0)],
        privacy=None if mechanism is None else plan(noise=1.0, mechanism=mechanism),
        default_root_dir=str(folder),
    )
    trainer.fit(module, Batches([[2, 1]] * STEPS, None), ckpt_path=folder / "saved")
    return module.loaded


def fit_from_another(folder: Path) -> dict[str, Any]:
    """Averaged, and then on from a file without an average."""
    module = Loaded()
    trainer = make_trainer(1, TABLES, ROWWISE, callbacks=[AverageWeights(half_life=4.0)])
    trainer.fit(module, loader(SIZE, BATCH, 1))
    trainer.fit_loop.max_epochs = 5
    trainer.fit(module, loader(SIZE, BATCH, 1), ckpt_path=saved_at(folder))
    return {"loaded": module.loaded, "end": snapshot(module)}


def test_a_file_without_an_average_begins_a_new_one(one_rank: Ranks, tmp_path: Path) -> None:
    straight = one_rank.run(fit, 1, TABLES, ROWWISE, None, tmp_path)
    found = one_rank.run(fit_from_another, tmp_path)
    assert_equal(whole(found, "loaded"), after(straight)[SAVED - 1])


@pytest.mark.parametrize("total", [None, "many", 0.0, -1.0, float("nan"), float("inf"), True])
def test_an_average_of_nobody_knows_how_many_steps_is_refused(
    one_rank: Ranks, tmp_path: Path, total: Any
) -> None:
    one_rank.run(fit, 1, TABLES, ROWWISE, LAST, tmp_path)
    meta = torch.load(saved_at(tmp_path) / "meta.pt", weights_only=False)
    meta["averaging_state"]["total"] = total
    torch.save(meta, saved_at(tmp_path) / "meta.pt")
    signed(saved_at(tmp_path))
    with pytest.raises(ValueError, match="says how many steps its average is made of, found"):
        one_rank.run(fit, 1, TABLES, ROWWISE, LAST, resume=saved_at(tmp_path))

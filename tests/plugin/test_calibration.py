"""Runs that calibrate: what is read, charged, written, kept and refused."""

from __future__ import annotations

import os
import signal
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_dpsparse import AverageWeights, LazyDP, LogitCalibration, PrivacyReport, Users
from lightning_dpsparse import report as reports
from lightning_dpsparse.accounting import events
from lightning_dpsparse.accounting.calibration import epsilon_of
from lightning_dpsparse.plugin.batch_order import EveryExample
from lightning_dpsparse.plugin.private_run import CHECKPOINT_KEY
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sampling.units import AllExamples, CappedExamples, WholeUsers
from tests.support.calibration_runs import (
    BATCH,
    CHEAP,
    SIZE,
    Clicked,
    Clicking,
    calibrated,
    clicks_loader,
    line_for,
    plan,
)
from tests.support.journals import charged_in
from tests.support.private_runs import ledger_of
from tests.support.ranks import Ranks
from tests.support.tiny_model import loader, make_trainer, snapshot

QUERY, STEP = events.gaussian(2.0), events.poisson_gaussian(BATCH / SIZE, 1.0)
REPLAYED = {"fixed_key": 4}
BEFORE = plan(**REPLAYED, calibration=None)  # the same run, without the query


def charges(result: dict[str, Any]) -> list[tuple[Any, int]]:
    return [(e.event, e.count) for e in ledger_of(result).entries]


# ---- what is counted, and where it goes ----------------------------------------------------------

PLANS = {
    "examples": {},
    "users": {"unit": Users(max_examples=3, drawn="users")},
    "examples of users": {"unit": Users(max_examples=3, drawn="examples")},
    "in order": {"sampling": "fixed_order"},
    "lazy": {"mechanism": LazyDP()},
    "days": {"by_day": True},
}


@pytest.mark.parametrize("name", PLANS)
def test_one_rank_writes_the_line_of_all_its_data(
    one_rank: Ranks, tmp_path: Path, name: str
) -> None:
    _check_line(one_rank, tmp_path, PLANS[name], None)


def test_data_in_many_batches_is_counted_once(one_rank: Ranks, tmp_path: Path) -> None:
    """Of 64, the last of which has 56 examples."""
    _check_line(one_rank, tmp_path, {}, 64)


@pytest.mark.parametrize("name", ["examples", "lazy"])
def test_where_weights_are_averaged_the_average_is_calibrated(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path, name: str
) -> None:
    """All but the last step count, in the last place where somebody may look at the average."""
    for ranks in (one_rank, two_ranks):
        _check_line(ranks, tmp_path, PLANS[name], None, callbacks=[AverageWeights(fraction=0.8)])


def test_training_goes_on_from_weights_that_are_not_calibrated(
    one_rank: Ranks, tmp_path: Path
) -> None:
    """Where weights are averaged, the query reads and writes the average alone."""
    settings: dict[str, Any] = {"save_every": 5, "callbacks": [AverageWeights(fraction=0.8)]}
    begun, ended = [], []
    for name, one in (("without", BEFORE), ("with", plan(**REPLAYED))):
        found = one_rank.run(calibrated, 1, one, tmp_path / name, **settings)[0]
        ended.append(found["state"]["dense"]["head.out.weight"])
        more = {"resume": tmp_path / name / "step=5.ckpt", "max_epochs": 2, "module": Begins()}
        found = one_rank.run(calibrated, 1, one, tmp_path / name, **settings | more)[0]
        begun.append(found["validated"][0])
    assert not torch.equal(*ended)
    assert torch.equal(*begun)


class Begins(Clicking):
    """Notes its weights when training begins."""

    def on_train_start(self) -> None:
        self.validated.append(self.head.out.weight.detach().clone())


@pytest.mark.parametrize(
    ("name", "parts"), [("examples", 96), ("examples of users", None), ("users", None)]
)
def test_two_ranks_write_the_line_of_all_their_data(
    two_ranks: Ranks, tmp_path: Path, name: str, parts: int | None
) -> None:
    _check_line(two_ranks, tmp_path, PLANS[name], parts)


def _check_line(
    ranks: Ranks, folder: Path, changes: Any, parts: int | None, **settings: Any
) -> None:
    world = ranks.world_size
    more = settings | ({} if parts is None else {"max_physical_batch": parts})
    users = isinstance(changes.get("unit"), Users)
    before_plan, after_plan = replace(BEFORE, **changes), plan(**REPLAYED, **changes)
    befores = ranks.run(calibrated, world, before_plan, folder, **more)
    afters = ranks.run(calibrated, world, after_plan, folder, **more)
    before, after = befores[0], afters[0]
    assert before["found"] is None
    expected = line_for(before["logits"], after_plan, after["steps"], 3 if users else 1)
    assert 1.02 < expected.slope < 1.5
    assert -1.5 < expected.bias < -0.5
    found = after["found"]
    assert found["slope"] == pytest.approx(expected.slope, rel=1e-9)
    assert found["bias"] == pytest.approx(expected.bias, rel=1e-9)
    old, new = before["state"]["dense"], after["state"]["dense"]
    weight, bias = old.pop("head.out.weight"), old.pop("head.out.bias")
    torch.testing.assert_close(new.pop("head.out.weight"), weight * expected.slope)
    torch.testing.assert_close(new.pop("head.out.bias"), bias * expected.slope + expected.bias)
    assert all(torch.equal(old[name], new[name]) for name in old)  # nothing else moved
    for mine, theirs in zip(before["state"]["pieces"], after["state"]["pieces"]):
        assert torch.equal(mine[3], theirs[3])
    labels = torch.cat([label for _, _, label in Clicked().examples])
    assert torch.sigmoid(before["logits"]).sum() / labels.sum() > 1.2
    assert torch.sigmoid(after["logits"]).sum() / labels.sum() == pytest.approx(1.0, abs=0.05)
    for other in afters[1:]:
        assert other["found"] == found
        assert all(
            torch.equal(value, afters[0]["state"]["dense"][name])
            for name, value in other["state"]["dense"].items()
            if name in afters[0]["state"]["dense"]
        )


def test_another_key_finds_another_line(one_rank: Ranks, tmp_path: Path) -> None:
    """Steps move next to nothing: the counts are the same, and are never seen without noise."""
    found = [
        one_rank.run(calibrated, 1, plan(fixed_key=key, clip_norm=1e-12), tmp_path)[0]["found"]
        for key in (4, 5)
    ]
    assert found[0]["slope"] != found[1]["slope"]
    assert found[0]["bias"] != found[1]["bias"]


class Odd(Clicked):
    """One example more for the second rank, which has one batch more for it."""

    def __init__(self) -> None:
        super().__init__(SIZE + 1)


def test_ranks_with_unequal_shares_read_together(two_ranks: Ranks, tmp_path: Path) -> None:
    more: dict[str, Any] = {"data": Odd, "max_physical_batch": SIZE // 2}
    before = two_ranks.run(calibrated, 2, BEFORE, tmp_path, **more)[0]
    after = two_ranks.run(calibrated, 2, plan(**REPLAYED), tmp_path, **more)
    step = after[0]["steps"]
    expected = line_for(before["logits"], plan(**REPLAYED), step, data=Odd())
    for result in after:
        assert result["found"]["slope"] == pytest.approx(expected.slope, rel=1e-9)
        assert result["found"]["bias"] == pytest.approx(expected.bias, rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.integers(1, 9), st.integers(1, 4))
def test_every_example_comes_once_in_batches_of_one_size(
    users: list[int], size: int, world: int
) -> None:
    cap = 3
    kept = sorted(i for i, user in enumerate(users) if users[:i].count(user) < cap)
    for units in (AllExamples(len(users)), CappedExamples(users, cap), WholeUsers(users, cap)):
        shares = [EveryExample(units, size, rank, world) for rank in range(world)]
        most = max(share.num_batches for share in shares)
        seen: list[int] = []
        for share in shares:
            share.num_batches = most
            batches = list(share)
            assert len(batches) == len(share) == most
            given_ = [i for batch in batches for i in batch][: share.num_examples]
            whole = share.num_examples // size
            assert all(len(batch) == size for batch in batches[:whole])
            seen += given_
        assert sorted(seen) == (list(range(len(users))) if units.count == len(users) else kept)


# ---- when ----------------------------------------------------------------------------------------


def test_validation_and_checkpoints_after_the_last_step_see_the_calibrated_model(
    one_rank: Ranks, tmp_path: Path
) -> None:
    result = one_rank.run(_validated, tmp_path)[0]
    weight = result["state"]["dense"]["head.out.weight"]
    assert len(result["validated"]) == 2  # after each epoch
    assert not torch.equal(result["validated"][0], weight)
    assert torch.equal(result["validated"][1], weight)
    meta = torch.load(tmp_path / "step=10.ckpt" / "meta.pt", weights_only=True)[CHECKPOINT_KEY]
    assert meta["calibration"] == result["found"]
    assert meta["calibration"]["step"] == 10
    earlier = torch.load(tmp_path / "step=5.ckpt" / "meta.pt", weights_only=True)[CHECKPOINT_KEY]
    assert earlier["calibration"] is None
    # What the last checkpoint holds is what the run ended with.
    again = one_rank.run(_loaded, tmp_path / "step=10.ckpt")[0]
    assert torch.equal(again, weight)


def _validated(folder: Path) -> dict[str, Any]:
    module = Clicking()
    loaders = {"train_dataloaders": clicks_loader(1), "val_dataloaders": loader(8, 8, 1)}
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    trainer = make_trainer(
        1,
        privacy=plan(),
        callbacks=[saver],
        enable_checkpointing=True,
        max_epochs=2,
        num_sanity_val_steps=0,
        default_root_dir=str(folder),
    )
    trainer.fit(module, **loaders)
    run = trainer.strategy.private_run  # type: ignore[attr-defined]
    found = run.calibration.kept()
    return {"state": snapshot(module), "validated": module.validated, "found": found}


def _loaded(path: Path) -> Any:
    module = Clicking()
    make_trainer(1).test(module, loader(8, 8, 1), ckpt_path=path, verbose=False)
    return module.head.out.weight.detach().clone()


class StopsAt(Callback):
    """Ends training after some steps, as a time limit would."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.should_stop = trainer.global_step >= self.steps


def test_a_run_that_is_stopped_calibrates_and_says_so_in_its_report(
    one_rank: Ranks, tmp_path: Path
) -> None:
    callbacks = [StopsAt(3), PrivacyReport(str(tmp_path / "report"))]
    result = one_rank.run(
        calibrated, 1, plan(), tmp_path, callbacks=callbacks, max_epochs=4, save_every=1
    )[0]
    assert result["steps"] == 3
    assert result["found"]["step"] == 3
    assert charges(result) == [(STEP, 3), (QUERY, 1)]
    facts = reports.read(tmp_path / "report")
    assert facts["guarantee"]["epsilon"] == epsilon_of([(STEP, 3), (QUERY, 1)], 1e-5)
    (saved,) = tmp_path.rglob("calibrated-step=3.ckpt")
    meta = torch.load(saved / "meta.pt", weights_only=True)[CHECKPOINT_KEY]
    assert meta["calibration"] == result["found"]


def test_a_run_that_spends_its_budget_calibrates_within_it(one_rank: Ranks, tmp_path: Path) -> None:
    target = epsilon_of([(STEP, 6), (QUERY, 1)], 1e-5) + 1e-6
    result = one_rank.run(calibrated, 1, plan(epsilon=target), tmp_path, max_epochs=4)[0]
    assert charges(result) == [(STEP, 6), (QUERY, 1)]
    assert result["found"]["step"] == 6
    assert result["epsilons"][-1] <= target + 1e-6


# ---- charged -------------------------------------------------------------------------------------


def test_the_query_is_charged_once_beside_the_steps(one_rank: Ranks, tmp_path: Path) -> None:
    result = one_rank.run(calibrated, 1, plan(), tmp_path, with_facts=True)[0]
    assert charges(result) == [(STEP, 5), (QUERY, 1)]
    expected = epsilon_of([(STEP, 5), (QUERY, 1)], 1e-5)
    assert ledger_of(result).epsilon(1e-5) == expected
    assert result["facts"]["guarantee"]["epsilon"] == expected
    assert result["facts"]["ran"]["calibration_settings"]["noise_multiplier"] == 2.0
    said = [entry["event"] for entry in result["facts"]["ledger"]]
    assert "noise multiplier 2, without amplification; once, beside the steps" in said[1]
    assert result["epsilons"][-1] >= expected - 1e-6  # the progress bar is a bound throughout
    assert [e.count for e in charged_in(tmp_path / "privacy").entries] == [5, 1]


class Guarded(Clicked):
    """Notes what the journal says when all data is read, and may fail or die then."""

    def __init__(self, folder: Path, *, broken: bool = False, deadly: bool = False) -> None:
        super().__init__()
        self.folder, self.broken, self.deadly = folder, broken, deadly
        self.journals: list[list[Any]] = []

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if len(indices) == SIZE:
            ledger = charged_in(self.folder / "privacy")
            self.journals.append([(e.event, e.count) for e in ledger.entries])
            if self.deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.broken:
                raise RuntimeError("the data is broken")
        return [self.examples[i] for i in indices]


def _watched(folder: Path, **settings: Any) -> tuple[dict[str, Any], list[Any]]:
    data = Guarded(folder, **settings)
    result = calibrated(1, plan(), folder, data=data, save_every=5)
    return result, data.journals


def test_the_journal_has_the_charge_before_the_data_is_read(
    one_rank: Ranks, tmp_path: Path
) -> None:
    _, journals = one_rank.run(_watched, tmp_path)[0]
    assert len(journals) == 1
    assert (QUERY, 1) in journals[0]


def test_a_process_that_is_killed_in_the_query_has_paid_for_it(
    one_rank: Ranks, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="died"):
        one_rank.run(_watched, tmp_path, deadly=True)
    found = [(e.event, e.count) for e in charged_in(tmp_path / "privacy").entries]
    assert (QUERY, 1) in found


def test_a_query_that_breaks_off_is_charged_and_leaves_the_model(
    one_rank: Ranks, tmp_path: Path
) -> None:
    result, said = one_rank.run(_broken, tmp_path)[0]
    assert any("was not calibrated: RuntimeError" in words for words in said)
    assert not any("the data is broken" in words for words in said)  # it may be about somebody
    assert charges(result) == [(STEP, 5), (QUERY, 1)]
    assert result["found"] == {"step": 5}
    assert (tmp_path / "step=5.ckpt").is_dir()


def _broken(folder: Path) -> tuple[dict[str, Any], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result, _ = _watched(folder, broken=True)
    return result, [str(w.message) for w in caught]


class BrokenForOne(Clicked):
    """Cannot be read to its end on the second rank."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if len(indices) == 96 and indices[-1] > SIZE * 0.8:
            raise RuntimeError("the data is broken")
        return [self.examples[i] for i in indices]


def test_ranks_give_up_together(two_ranks: Ranks, tmp_path: Path) -> None:
    """Otherwise the first would wait for the second."""
    found = two_ranks.run(calibrated, 2, plan(), tmp_path, data=BrokenForOne, max_physical_batch=96)
    for result in found:
        assert result["found"] == {"step": 5}
        assert charges(result) == [(STEP, 5), (QUERY, 1)]


# ---- gone on with --------------------------------------------------------------------------------


def test_going_on_from_a_checkpoint_pays_for_another_query(one_rank: Ranks, tmp_path: Path) -> None:
    first = one_rank.run(calibrated, 1, plan(), tmp_path, save_every=1)[0]
    again = one_rank.run(calibrated, 1, plan(), tmp_path, resume=tmp_path / "step=3.ckpt")[0]
    assert again["found"] != first["found"]
    assert charges(again) == [(STEP, 5), (QUERY, 1), (STEP, 2), (QUERY, 1)]
    assert again["steps"] == 5


def test_going_on_from_the_calibrated_end_does_nothing(one_rank: Ranks, tmp_path: Path) -> None:
    first = one_rank.run(calibrated, 1, plan(), tmp_path, save_every=5)[0]
    one_rank.run(_nothing_left, tmp_path / "step=5.ckpt", tmp_path)
    ledger = charged_in(tmp_path / "privacy")
    assert [(e.event, e.count) for e in ledger.entries] == charges(first)


def _nothing_left(path: Path, folder: Path) -> None:
    module = Clicking()
    trainer = make_trainer(1, privacy=plan(), default_root_dir=str(folder))
    trainer.fit(module, clicks_loader(1), ckpt_path=path)
    assert module.drawn == []


def test_a_calibrated_module_that_takes_no_step_is_not_calibrated_again(
    one_rank: Ranks, tmp_path: Path
) -> None:
    """Training begins, and ends before its first step: the target covers a query, but no step."""
    target = epsilon_of([(STEP, 5), (QUERY, 1), (QUERY, 1)], 1e-5) + 1e-6
    first, second = one_rank.run(_twice, tmp_path, target)[0]
    assert charges(first) == charges(second) == [(STEP, 5), (QUERY, 1)]
    assert first["found"] == second["found"]
    for name, value in first["state"]["dense"].items():
        assert torch.equal(value, second["state"]["dense"][name])


def _twice(folder: Path, target: float) -> list[dict[str, Any]]:
    module = Clicking()
    privacy = plan(epsilon=target)
    return [calibrated(1, privacy, folder, module=module, max_epochs=n) for n in (1, 2)]


# ---- refused -------------------------------------------------------------------------------------


class Without(Clicking):
    logits_and_labels = None  # type: ignore[assignment]


class Nowhere(Clicking):
    calibrated_layer = None  # type: ignore[assignment]


class Elsewhere(Clicking):
    calibrated_layer = "head.nothing"


class Wide(Clicking):
    calibrated_layer = "head.hidden"


class Shared(Clicking):
    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "twin"):
            self.twin = nn.Linear(12, 1)
            self.twin.weight = self.head.out.weight


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Without, "without logits_and_labels"),
        (Nowhere, "found neither"),
        (Elsewhere, "found no such layer"),
        (Wide, "with one output and a bias at 'head.hidden'"),
        (Shared, "shares weights"),
    ],
)
def test_a_module_that_cannot_be_calibrated_is_refused_before_anything_is_charged(
    one_rank: Ranks, tmp_path: Path, kind: type[Clicking], words: str
) -> None:
    with pytest.raises(Refused, match=words):
        one_rank.run(calibrated, 1, plan(), tmp_path, module=kind())
    assert not list(tmp_path.rglob("*.journal"))


def test_plans_without_an_honest_query_are_refused() -> None:
    with pytest.raises(Refused, match="sampling='unamplified'"):
        plan(sampling="unamplified")
    with pytest.raises(Refused, match="Expected noise in the calibration"):
        plan(epsilon=1.0, calibration=LogitCalibration(noise_multiplier=0.0))
    with pytest.raises(Refused, match="noise of less than"):
        plan(
            unit=Users(max_examples=2000),
            calibration=LogitCalibration(noise_multiplier=1000.0),
        )
    assert plan(calibration=LogitCalibration(noise_multiplier=0.0)).faults()


class Mixing(Clicking):
    """Logits that depend on the other examples of a batch."""

    def logits_and_labels(self, batch: Any) -> Any:
        logits = self(batch)
        return logits - logits[: len(logits) // 2].mean(), batch.labels


class Doubling(Clicking):
    """Every example twice."""

    def logits_and_labels(self, batch: Any) -> Any:
        return self(batch).repeat(2), batch.labels.repeat(2)


class Touching(Clicking):
    """Puts what it sees into a buffer, where it would stay without noise."""

    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "seen"):
            self.register_buffer("seen", torch.zeros(1))

    def logits_and_labels(self, batch: Any) -> Any:
        self.seen.add_(batch.labels.sum())
        return super().logits_and_labels(batch)


class Itself(Clicking):
    """Puts slope and bias into a place of its own."""

    calibrated_layer = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "line"):
            self.register_buffer("line", torch.tensor([1.0, 0.0]))

    def forward(self, batch: Any) -> Any:
        return self.line[0] * super().forward(batch) + self.line[1]

    def apply_calibration(self, slope: float, bias: float) -> None:
        self.line.mul_(slope)
        self.line[1] += bias


@pytest.mark.parametrize("kind", [Mixing, Doubling])
def test_examples_that_count_for_others_are_not_calibrated_by(
    one_rank: Ranks, tmp_path: Path, kind: type[Clicking]
) -> None:
    result = one_rank.run(calibrated, 1, plan(), tmp_path, module=kind())[0]
    assert result["found"] == {"step": 5}
    assert charges(result) == [(STEP, 5), (QUERY, 1)]


def test_what_the_pass_writes_is_refused(one_rank: Ranks, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="'seen' changed in the calibration's pass"):
        one_rank.run(calibrated, 1, plan(), tmp_path, module=Touching())


def test_a_module_may_apply_the_line_itself(one_rank: Ranks, tmp_path: Path) -> None:
    own = one_rank.run(calibrated, 1, plan(**REPLAYED), tmp_path, module=Itself(), save_every=5)[0]
    folded = one_rank.run(calibrated, 1, plan(**REPLAYED), tmp_path)[0]
    assert own["found"] == folded["found"]
    torch.testing.assert_close(own["logits"], folded["logits"])


def test_too_much_noise_changes_nothing(one_rank: Ranks, tmp_path: Path) -> None:
    loud = plan(**REPLAYED, calibration=replace(CHEAP, noise_multiplier=500.0))
    before = one_rank.run(calibrated, 1, BEFORE, tmp_path)[0]
    after = one_rank.run(calibrated, 1, loud, tmp_path)[0]
    assert after["found"]["slope"] == 1.0
    assert after["found"]["bias"] == 0.0
    for name, value in before["state"]["dense"].items():
        assert torch.equal(value, after["state"]["dense"][name])

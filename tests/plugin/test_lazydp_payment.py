"""All that is owed is paid before anything leaves: files, exports, the end, however it comes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_dpsparse import LazyDP, Placement
from lightning_dpsparse.mechanisms.lazydp.debts import Debts
from lightning_dpsparse.mechanisms.lazydp.weight_grid import largest_of
from lightning_dpsparse.sharded.checkpoint import consolidate
from lightning_dpsparse.sharded.cut import PrivateLookup
from tests.support.lazydp_runs import EAGER, LAZY
from tests.support.naive_step import Batches, plan
from tests.support.payment_runs import Breaking, fit, fit_and_save
from tests.support.plain_training import PLACEMENTS, SGD, assert_close
from tests.support.ranks import Ranks
from tests.support.tiny_model import (
    BAGS_OR_SEQUENCES,
    Bags,
    Recording,
    assemble,
    collate,
    make_trainer,
    snapshot,
)


@pytest.mark.parametrize("name", ["row_wise", "column_wise"])
def test_a_checkpoint_on_disk_is_fully_paid(two_ranks: Ranks, name: str, tmp_path: Path) -> None:
    """Read from the files, by a process that took no part in training."""
    for kind, mechanism in (("eager", EAGER), ("lazy", LAZY)):
        two_ranks.run(fit_and_save, 2, PLACEMENTS[name], mechanism, tmp_path / kind)
    for step in (5, 10):
        eager, lazy = (
            consolidate(tmp_path / kind / f"step={step}.ckpt")["state_dict"]
            for kind in ("eager", "lazy")
        )
        assert sum("embedding_bags" in key for key in eager) == 4
        assert_close(lazy, eager, 1e-6)


def test_a_run_goes_on_with_other_ranks_and_another_placement(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    expected = one_rank.run(fit, 1, Placement(), EAGER, max_epochs=2)
    two_ranks.run(fit_and_save, 2, PLACEMENTS["row_wise"], LAZY, tmp_path)
    found = one_rank.run(
        fit,
        1,
        Placement(),
        LAZY,
        max_epochs=2,
        resume=tmp_path / "step=10.ckpt",
        default_root_dir=str(tmp_path),
    )
    assert_close(assemble(found), assemble(expected), 1e-6)


def broken_off(mechanism: Any, *, unpaid: bool, go_on: bool, module: Breaking | None = None) -> Any:
    """A fit that fails in its seventh step, then perhaps another fit of the same module."""
    module = module or Breaking()
    module.fail_at = 6
    pay_chunk = Debts.pay_chunk
    if unpaid:  # as if the process had had no time to pay
        Debts.pay_chunk = lambda *_: (_ for _ in ()).throw(MemoryError())  # type: ignore
    try:
        with pytest.raises((ArithmeticError, MemoryError)):
            fit(1, Placement(), mechanism, module)
    finally:
        Debts.pay_chunk = pay_chunk  # type: ignore[method-assign]
    if go_on:
        module.fail_at = None
        fit(1, Placement(), mechanism, module)
    return snapshot(module) if go_on or not unpaid else None  # which would make all pay


@pytest.mark.parametrize("go_on", [False, True])
def test_a_run_that_failed_has_paid(one_rank: Ranks, go_on: bool) -> None:
    eager = one_rank.run(broken_off, EAGER, unpaid=False, go_on=go_on)
    lazy = one_rank.run(broken_off, LAZY, unpaid=False, go_on=go_on)
    assert_close(assemble(lazy), assemble(eager), 1e-6)


def test_debts_of_a_run_that_could_not_pay_are_not_forgotten(one_rank: Ranks) -> None:
    eager = one_rank.run(broken_off, EAGER, unpaid=False, go_on=True)
    lazy = one_rank.run(broken_off, LAZY, unpaid=True, go_on=True)
    assert_close(assemble(lazy), assemble(eager), 1e-6)


def look_after_a_failure(mechanism: Any, sequences: tuple[str, ...], *, unpaid: bool) -> Any:
    """What test and predict read from a module whose rows still owe."""
    module = Breaking(sequences=sequences)
    broken_off(mechanism, unpaid=unpaid, go_on=False, module=module)
    examples = DataLoader(Bags(8, seed=3), batch_size=8, collate_fn=collate)
    trainer = make_trainer(1, Placement(), SGD)
    [tested] = trainer.test(module, examples, verbose=False)
    [predicted] = trainer.predict(module, examples)
    return torch.tensor(tested["val"]), predicted


@BAGS_OR_SEQUENCES
def test_test_and_predict_read_rows_that_have_paid(
    one_rank: Ranks, sequences: tuple[str, ...]
) -> None:
    [eager] = one_rank.run(look_after_a_failure, EAGER, sequences, unpaid=False)
    [lazy] = one_rank.run(look_after_a_failure, LAZY, sequences, unpaid=True)
    for one, two in zip(lazy, eager, strict=True):
        assert (one - two).abs().max() <= 1e-5  # sums of eight logits


class Interrupting(Callback):
    """Asks for all payments at the end, and stops them half-way, twice."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        def until_the_fourth(work: Sequence[Any]) -> Iterator[Any]:
            yield from work[:3]
            raise KeyboardInterrupt

        steps = trainer.strategy.private_run.stepper
        with pytest.raises(KeyboardInterrupt):
            steps.before_release(until_the_fourth)
        pay_chunk, calls = Debts.pay_chunk, iter(range(100))

        def failing(self: Any, *chunk: int) -> None:
            if next(calls) == 4:
                raise MemoryError
            pay_chunk(self, *chunk)

        Debts.pay_chunk = failing  # type: ignore[method-assign]
        try:
            with pytest.raises(MemoryError):
                module.state_dict()
        finally:
            Debts.pay_chunk = pay_chunk  # type: ignore[method-assign]


def interrupted() -> Any:
    return fit(1, Placement(), LAZY, callbacks=[Interrupting()])


def test_an_interrupted_payment_goes_on_and_nobody_pays_twice(one_rank: Ranks) -> None:
    [eager] = one_rank.run(fit, 1, Placement(), EAGER)
    [lazy] = one_rank.run(interrupted)
    assert_close(assemble([lazy]), assemble([eager]), 1e-6)


class Bar:
    """Counts what a progress bar would show."""

    def __init__(self) -> None:
        self.shown = 0

    def __call__(self, work: Sequence[Any]) -> Iterable[Any]:
        for piece in work:
            self.shown += 1
            yield piece


class Watching(Callback):
    def on_train_end(self, trainer: Any, module: Any) -> None:
        steps, first, second = trainer.strategy.private_run.stepper, Bar(), Bar()
        steps.before_release(first)
        steps.before_release(second)
        module.shown = (first.shown, second.shown)


def shown_chunks() -> tuple[int, int]:
    module = Breaking()
    fit(1, Placement(), LAZY, module, callbacks=[Watching()])
    return module.shown  # type: ignore[return-value]


def test_payment_shows_its_chunks_and_is_not_done_twice(one_rank: Ranks) -> None:
    """Tables of 40, 30, 21 and 40 rows; the last two are one stack: 3 + 2 + 4 chunks of 16."""
    assert one_rank.run(shown_chunks) == [(9, 0)]


def outgrown() -> list[tuple[float, float, bool]]:
    """Tables that something made 100 times as large between two full payments."""
    module = Recording()
    settings = {"max_epochs": -1, "max_steps": 3}
    trainer = make_trainer(1, None, SGD, privacy=plan(noise=1.0, mechanism=LazyDP()), **settings)
    trainer.fit(module, Batches([[4, 4]] * 3, None))
    (collection,) = [m for m in module.modules() if isinstance(m, PrivateLookup)]
    seen = []
    for factor in (1.0, 2.0**12):
        for debts in collection.states.values():
            for weight in debts._weights:
                weight.mul_(factor)
            debts.note_work_done()
            assert debts.grid is not None
            largest = largest_of(debts._weights)
            grid = debts.grid
            is_on = all(torch.equal(w, (w / grid).round() * grid) for w in debts._weights)
            seen.append((grid, largest, is_on))
    return seen


def test_weights_that_outgrow_their_grid_get_a_coarser_one(one_rank: Ranks) -> None:
    seen = one_rank.run(outgrown)[0]
    before, after = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    for (small, _, _), (large, largest, is_on) in zip(before, after, strict=True):
        assert large > small
        assert is_on
        assert 2 * largest <= large * 2**24

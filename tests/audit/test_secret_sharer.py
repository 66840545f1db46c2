"""The secret sharer: what it puts in, what it finds, and where it says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.broken import data, model
from lightning_dpsparse import DPSGD, FusedOptimizer, PrivacyPlan, PrivacyReport
from lightning_dpsparse.audit.secret_sharer import (
    Exposure,
    SecretSharer,
    plot_exposures,
    write_exposures,
)
from lightning_dpsparse.data import SyntheticMovieLens
from lightning_dpsparse.models import DLRMModule, TwoTowerModule
from tests.support.ranks import Ranks
from tests.support.tiny_model import make_trainer

ITEMS = 300


def remembered(
    folder: str, what: str, world_size: int, noise: float | None, learning_rate: float
) -> list[Exposure]:
    sharer = SecretSharer([1, 30], canaries_per_repeat=8, references=1000)
    plan = None
    if noise is not None:
        plan = PrivacyPlan(mechanism=DPSGD(), noise_multiplier=noise, clip_norm=1.0, delta=1e-5)
    trainer = make_trainer(
        world_size,
        optimizer=FusedOptimizer(kind="sgd", learning_rate=learning_rate),
        privacy=plan,
        max_epochs=3,
        limit_val_batches=0,
        callbacks=[sharer, *([] if plan is None else [PrivacyReport()])],
        default_root_dir=folder,
    )
    if what == "items":
        module: Any = TwoTowerModule(
            num_items=ITEMS, embedding_dim=16, context_layers=[16], num_negatives=20
        )
        watches = SyntheticMovieLens(
            num_users=40, num_items=ITEMS, watches_per_user=20, batch_size=32
        )
        trainer.fit(module, datamodule=watches)
    else:
        module = DLRMModule(
            num_rows=[5000, 5000], embedding_dim=8, dense_arch=[16, 8], over_arch=[16, 1]
        )
        clicks = data(600)
        clicks.num_rows, clicks.batch_size = [5000, 5000], 20
        trainer.fit(module, datamodule=clicks)
    return sharer.found


@pytest.mark.parametrize(("what", "learning_rate"), [("items", 20.0), ("clicks", 20.0)])
def test_what_was_often_in_the_data_stands_out(
    one_rank: Ranks, tmp_path: Path, what: str, learning_rate: float
) -> None:
    """Thirty times in the data against once, without privacy; log2(1001) = 10 is the most."""
    (found,) = one_rank.run(remembered, str(tmp_path), what, 1, None, learning_rate)
    once, often = found
    assert (once.repeats, often.repeats, once.canaries) == (1, 30, 8)
    assert often.interpolation > once.interpolation + 2.0
    assert often.extrapolation > once.extrapolation + 1.0
    saved = json.loads((tmp_path / "secret_sharer.json").read_text())
    assert saved[1]["interpolation"] == often.interpolation
    assert (tmp_path / "secret_sharer.png").stat().st_size > 1000


def test_noise_makes_it_forget(one_rank: Ranks, tmp_path: Path) -> None:
    (clear,) = one_rank.run(remembered, str(tmp_path / "sgd"), "items", 1, None, 20.0)
    (noisy,) = one_rank.run(remembered, str(tmp_path / "dp"), "items", 1, 2.0, 20.0)
    assert noisy[1].interpolation < clear[1].interpolation - 2.0
    # Eight canaries of a deviation of 1.44 bits around 1.44: four sigma.
    assert noisy[1].interpolation < 1.44 + 4 * 1.44 / 8**0.5
    page = (tmp_path / "dp" / "privacy_report.html").read_text()
    facts = json.loads((tmp_path / "dp" / "privacy_report.json").read_text())
    assert facts["exposures"][1]["interpolation"] == noisy[1].interpolation
    assert any("canaries" in taint for taint in facts["taints"])
    assert 'data-fact="/exposures/1/extrapolation"' in page


def test_two_ranks_find_the_same(two_ranks: Ranks, tmp_path: Path) -> None:
    one, two = two_ranks.run(remembered, str(tmp_path), "items", 2, None, 20.0)
    assert one == two
    assert one[1].interpolation > one[0].interpolation + 2.0


def test_canaries_and_references_are_different_examples(tmp_path: Path) -> None:
    sharer = SecretSharer([2, 1], canaries_per_repeat=3, references=50)
    trainer = make_trainer(1, callbacks=[sharer])
    clicks = data(40)
    clicks.setup("fit")
    trainer.datamodule = clicks  # type: ignore[attr-defined]
    sharer.setup(trainer, model(), "fit")
    assert sharer.repeats_C.tolist() == [1, 1, 1, 2, 2, 2]
    assert len(clicks.train_set) == 40 + 3 + 6
    assert sharer._examples is not None
    canaries, references = sharer._examples
    assert (len(canaries.labels_B), len(references.labels_B)) == (6, 50)
    assert not (canaries.counts_BC[:, None] == references.counts_BC[None]).all(2).any()
    extra = clicks.train_set.__getitems__(range(40, 49))
    copies = [0, 1, 2, 3, 3, 4, 4, 5, 5]
    assert np.array_equal(extra.counts_BC, canaries.counts_BC[copies])


def test_several_runs_in_one_plot(tmp_path: Path) -> None:
    found = [Exposure(1, 5, 1.0, 1.1, 0.5, 1.5), Exposure(10, 5, 4.0, 4.2, 3.0, 5.0)]
    plot_exposures({"SGD": found, "EANA": found}, tmp_path / "both.png")
    assert (tmp_path / "both.png").stat().st_size > 1000
    write_exposures(found, tmp_path / "new")  # no report there to join
    assert not (tmp_path / "new" / "privacy_report.json").exists()


@pytest.mark.parametrize("settings", [{"repeats": [0]}, {"references": 1}])
def test_settings_of_no_use_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"at least|>= 2"):
        SecretSharer(**settings)

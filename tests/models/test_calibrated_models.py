"""Click models that begin with a public base rate, and that a calibration moves."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dpsparse import LazyDP, LogitCalibration, PrivacyPlan
from lightning_dpsparse.data import SyntheticData
from lightning_dpsparse.mechanisms.logit_calibration.platt import LogitMap
from lightning_dpsparse.models import DLRMDCNModule, DLRMModule, PCTRModule
from lightning_dpsparse.models.click import ClickModule
from lightning_dpsparse.plugin.calibrated_module import CalibratedModule
from lightning_dpsparse.refused import Refused
from tests.support.ranks import Ranks
from tests.support.tiny_model import make_trainer

ROWS = [40, 30, 3]
MODELS: dict[str, Any] = {
    "DLRM": partial(DLRMModule, ROWS, 8, [16, 8], [16, 1]),
    "DLRM-DCN": partial(DLRMDCNModule, ROWS, 8, [16, 8], [16, 1], cross_layers=1, cross_rank=4),
    "pCTR": partial(PCTRModule, ROWS, [16, 16]),
}


def batch(size: int = 500, most: int = 1) -> Any:
    data = SyntheticData(
        num_rows=ROWS, batch_size=size, examples_per_day=size, train_days=1, max_ids_per_bag=most
    )
    data.setup("fit")
    return next(iter(data.train_dataloader()))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rate", [0.01, 0.2, 0.9])
def test_predictions_begin_near_the_base_rate(name: str, rate: float) -> None:
    """Without the rate they begin near one half. Layers as torch makes them move a logit by some
    tenths, and so the rate by a third at most."""
    torch.manual_seed(1)
    model: ClickModule = MODELS[name](base_rate=rate)
    model.configure_model()
    with torch.no_grad():
        mean = float(torch.sigmoid(model(batch())).mean())
    assert 0.66 * rate < mean < 1.5 * rate
    assert f"base rate {rate:g}" in model.declared_public[0]
    torch.manual_seed(1)
    plain: ClickModule = MODELS[name]()
    plain.configure_model()
    with torch.no_grad():
        assert 0.3 < float(torch.sigmoid(plain(batch())).mean()) < 0.7
    assert plain.declared_public == ()


@pytest.mark.parametrize("name", MODELS)
def test_a_line_goes_into_the_last_layer(name: str) -> None:
    model: ClickModule = MODELS[name]()
    model.configure_model()
    data = batch()
    with torch.no_grad():
        before = model(data)
        CalibratedModule(model).apply(LogitMap(1.5, -0.7))
        torch.testing.assert_close(model(data), 1.5 * before - 0.7)
    assert set(model.state_dict()) == set(_built(name).state_dict())  # nothing to carry along


def _built(name: str) -> ClickModule:
    model: ClickModule = MODELS[name]()
    model.configure_model()
    return model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("most", [1, 3])
def test_slices_add_their_bias_twice_over(name: str, most: int) -> None:
    """A second calibration multiplies the biases of the first. Bags without one id are a slice."""
    model: ClickModule = MODELS[name](slice_feature="cat_2")
    model.configure_model()
    data = batch(most=most)
    slices = model.calibration_slices(data)
    ids = data.sparse_features["cat_2"].to_dense()
    assert slices.tolist() == [int(bag[0]) if len(bag) == 1 else 3 for bag in ids]
    first, second = [0.1, 0.2, 0.3, 0.4], [1.0, -1.0, 0.5, 0.0]
    with torch.no_grad():
        before = model(data)
        module = CalibratedModule(model)
        assert module.num_slices == 4
        module.apply(LogitMap(1.5, -0.7, tuple(first)))
        once = 1.5 * before - 0.7 + torch.tensor(first)[slices]
        torch.testing.assert_close(model(data), once)
        module.apply(LogitMap(0.5, 0.1, tuple(second)))
        torch.testing.assert_close(model(data), 0.5 * once + 0.1 + torch.tensor(second)[slices])


@pytest.mark.parametrize("feature", ["cat_9", "table_0"])
def test_slices_of_no_feature_are_refused(feature: str) -> None:
    with pytest.raises(Refused, match=f"found '{feature}' with 0"):
        DLRMModule(ROWS, 8, [16, 8], [16, 1], slice_feature=feature).configure_model()
    with pytest.raises(Refused, match="of at most 1,000 rows"):
        DLRMModule([2000], 8, [16, 8], [16, 1], slice_feature="cat_0").configure_model()


# ---- whole runs ----------------------------------------------------------------------------------


def train(world: int, folder: Path, *, is_calibrated: bool) -> dict[str, Any]:
    """Runs inside a rank: a run without amplification of errors, on few clicks of three slices."""
    torch.manual_seed(2)
    size = 20_000
    data = SyntheticData(
        num_rows=ROWS,
        batch_size=2000 // world,
        examples_per_day=size,
        train_days=1,
        click_rate=0.1,
    )
    calibration = LogitCalibration(noise_multiplier=3.0) if is_calibrated else None
    plan = PrivacyPlan(
        mechanism=LazyDP(),
        clip_norm=0.3,
        noise_multiplier=1.0,
        fixed_key=8,
        calibration=calibration,
    )
    model = DLRMModule(ROWS, 8, [16, 8], [16, 1], base_rate=0.02, slice_feature="cat_2")
    trainer = make_trainer(world, privacy=plan, default_root_dir=str(folder))
    trainer.fit(model, data.train_dataloader() if data.setup("fit") is None else None)
    found = trainer.strategy.private_run.calibration.kept()  # type: ignore[attr-defined]
    model.eval()
    everything = data.train_dataloader().dataset.__getitems__(list(range(size)))  # type: ignore
    everything = data.train_dataloader().collate_fn(everything)
    with torch.no_grad():
        chance = torch.sigmoid(model(everything)).double()
    slices = model.calibration_slices(everything)
    return {
        "found": found,
        "calibration": _ratio(chance, everything.labels),
        "of_slices": [
            _ratio(chance[slices == s], everything.labels[slices == s]) for s in range(ROWS[2])
        ],
        "slice_bias": model.slice_bias.clone(),
        "bias": model.net.over_arch.model[1].bias.detach().clone(),  # type: ignore
        "public": trainer.strategy.private_run.facts()["not_covered"],  # type: ignore
    }


def _ratio(chance: Tensor, labels: Tensor) -> float:
    return float(chance.sum() / labels.double().sum())


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_calibrates_the_whole_and_every_slice(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path, world: int
) -> None:
    ranks = one_rank if world == 1 else two_ranks
    before = ranks.run(train, world, tmp_path, is_calibrated=False)[0]
    after = ranks.run(train, world, tmp_path, is_calibrated=True)
    assert before["calibration"] < 0.6
    for result in after:
        assert result["calibration"] == pytest.approx(1.0, abs=0.02)
        assert result["of_slices"] == pytest.approx([1.0] * 3, abs=0.05)
        assert result["found"] == after[0]["found"]
        assert torch.equal(result["slice_bias"], after[0]["slice_bias"])
        assert torch.equal(result["bias"], after[0]["bias"])
        assert any("base rate 0.02" in words for words in result["public"])
    assert float(after[0]["slice_bias"].abs().max()) > 0
    assert not before["slice_bias"].any()

"""Runs that calibrate a model of several tasks: counted, charged, written, kept and refused."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor, nn

from lightning_dpsparse import AverageWeights, LogitCalibration, Users
from lightning_dpsparse.accounting.calibration import epsilon_of
from lightning_dpsparse.mechanisms.logit_calibration.platt import LogitMap
from lightning_dpsparse.plugin import run_calibration
from lightning_dpsparse.plugin.calibrated_module import CalibratedModule
from lightning_dpsparse.plugin.private_run import CHECKPOINT_KEY
from lightning_dpsparse.refused import Refused
from tests.support.calibration_runs import (
    BEFORE,
    CHEAP,
    QUERY,
    REPLAYED,
    STEP,
    calibrated,
    charges,
    plan,
)
from tests.support.ranks import Ranks
from tests.support.task_runs import (
    ClickedAndBought,
    Itself,
    Listed,
    Wide,
    counts_of,
    labels_of,
    lines_for,
)

LAST = {Listed: ("head.click", "head.buy"), Wide: ("head.wide",)}


def two_tasks(world: int, privacy: Any, folder: Path, kind: Any, **settings: Any) -> dict[str, Any]:
    """Runs inside a rank."""
    data = settings.pop("data", ClickedAndBought)
    return calibrated(world, privacy, folder, module=kind(), data=data, **settings)


# ---- what is counted, and where it goes ----------------------------------------------------------


@pytest.mark.parametrize("kind", [Listed, Wide])
def test_one_rank_writes_the_line_of_every_task(
    one_rank: Ranks, tmp_path: Path, kind: type[Listed]
) -> None:
    _check_lines(one_rank, tmp_path, kind)


@pytest.mark.parametrize("kind", [Listed, Wide])
def test_two_ranks_write_the_lines_of_all_their_data(
    two_ranks: Ranks, tmp_path: Path, kind: type[Listed]
) -> None:
    """In batches of 96 examples, the last of which is filled up."""
    _check_lines(two_ranks, tmp_path, kind, max_physical_batch=96)


def test_users_of_k_examples_have_k_times_the_noise(one_rank: Ranks, tmp_path: Path) -> None:
    _check_lines(one_rank, tmp_path, Wide, Users(max_examples=3, drawn="users"))


def test_where_weights_are_averaged_the_average_gets_the_lines(
    one_rank: Ranks, tmp_path: Path
) -> None:
    _check_lines(one_rank, tmp_path, Listed, callbacks=[AverageWeights(fraction=0.8)])


def _check_lines(
    ranks: Ranks, folder: Path, kind: type[Listed], unit: Any = None, **settings: Any
) -> None:
    world = ranks.world_size
    changes = {} if unit is None else {"unit": unit}
    privacy = plan(**REPLAYED, **changes)
    before = ranks.run(two_tasks, world, replace(BEFORE, **changes), folder, kind, **settings)[0]
    afters = ranks.run(two_tasks, world, privacy, folder, kind, **settings)
    after, labels_NT = afters[0], labels_of(ClickedAndBought())
    k = 1 if unit is None else unit.max_examples
    expected = lines_for(before["logits"], labels_NT, privacy, after["steps"], k)
    assert all(not line.is_identity for line in expected)
    assert expected[0] != expected[1]
    found = after["found"]
    assert set(found) == {"step", "slopes", "biases"}
    assert found["slopes"] == pytest.approx([line.slope for line in expected], rel=1e-9)
    assert found["biases"] == pytest.approx([line.bias for line in expected], rel=1e-9)
    old, new = before["state"]["dense"], after["state"]["dense"]
    slopes = torch.tensor([line.slope for line in expected])
    biases = torch.tensor([line.bias for line in expected])
    weight, bias = last(old, kind)
    torch.testing.assert_close(last(new, kind)[0], weight * slopes[:, None])
    torch.testing.assert_close(last(new, kind)[1], bias * slopes + biases)
    moved = {name for name in old if not torch.equal(old[name], new[name])}
    assert moved == {f"{path}.{name}" for path in LAST[kind] for name in ("weight", "bias")}
    has_label_NT = labels_NT.isfinite()
    for task in range(2):  # of 2,000 labels and more: standard errors of some percent
        real = labels_NT[has_label_NT[:, task], task].sum()
        chance = torch.sigmoid(after["logits"])[has_label_NT[:, task], task].sum()
        assert float(chance / real) == pytest.approx(1.0, abs=0.05)
    for other in afters[1:]:
        assert other["found"] == found
        assert all(torch.equal(value, new[name]) for name, value in other["state"]["dense"].items())


def last(dense: dict[str, Tensor], kind: type[Listed]) -> tuple[Tensor, Tensor]:
    """Weights and biases of the two logits."""
    weight = torch.cat([dense[f"{path}.weight"] for path in LAST[kind]])
    return weight, torch.cat([dense[f"{path}.bias"] for path in LAST[kind]])


def test_a_module_may_apply_its_lines_itself(one_rank: Ranks, tmp_path: Path) -> None:
    own = one_rank.run(two_tasks, 1, plan(**REPLAYED), tmp_path, Itself)[0]
    written = one_rank.run(two_tasks, 1, plan(**REPLAYED), tmp_path, Listed)[0]
    assert own["found"] == written["found"]
    torch.testing.assert_close(own["logits"], written["logits"])


@pytest.mark.parametrize("k", [1, 3])
def test_noise_on_every_count_grows_by_the_root_of_the_tasks(
    one_rank: Ranks, tmp_path: Path, k: int
) -> None:
    """4 x 4,096 counts: the law of their squares' sum, missed once in a million. The bounds are
    5.5% from the middle; without the root of two, the sum is half of it."""
    many = replace(CHEAP, bins=4096)
    unit = {} if k == 1 else {"unit": Users(max_examples=k, drawn="users")}
    before = one_rank.run(two_tasks, 1, replace(BEFORE, **unit), tmp_path, Wide)[0]
    privacy = plan(**REPLAYED, **unit, calibration=many)
    noisy = one_rank.run(_noisy_counts_of, privacy, tmp_path)[0]
    noise = noisy - counts_of(before["logits"], labels_of(ClickedAndBought()), privacy).double()
    variance = (2.0 * k * math.sqrt(2)) ** 2
    for part in (noise, noise[0], noise[1]):
        low, high = chi2.ppf([5e-7, 1 - 5e-7], part.numel()) * variance
        assert low < float(part.square().sum()) < high


def _noisy_counts_of(privacy: Any, folder: Path) -> Tensor:
    """What a run fits its lines to. Runs inside a rank."""
    seen, fit_tasks = [], run_calibration.fit_tasks

    def watching(noisy: Any, *args: Any, **settings: Any) -> Any:
        seen.append(torch.tensor(noisy))
        return fit_tasks(noisy, *args, **settings)

    try:
        run_calibration.fit_tasks = watching
        two_tasks(1, privacy, folder, Wide)
    finally:
        run_calibration.fit_tasks = fit_tasks
    (noisy,) = seen
    return noisy


class Unlabelled(ClickedAndBought):
    """Nobody has a label of the second task."""

    def __init__(self) -> None:
        super().__init__()
        for _, _, label in self.examples:
            label[0, 1] = math.nan


def test_a_task_without_labels_stays_as_it_is(one_rank: Ranks, tmp_path: Path) -> None:
    result, said = one_rank.run(_heard, tmp_path, Wide, data=Unlabelled)[0]
    assert result["found"]["slopes"][0] != 1.0
    assert result["found"]["slopes"][1] == 1.0
    assert result["found"]["biases"][1] == 0.0
    assert any("changed nothing of task 1:" in words for words in said)


def _heard(folder: Path, kind: Any, **settings: Any) -> tuple[dict[str, Any], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = two_tasks(1, plan(**REPLAYED), folder, kind, **settings)
    return result, [str(w.message) for w in caught]


# ---- charged and kept ----------------------------------------------------------------------------


def test_all_tasks_are_charged_as_one_query(two_ranks: Ranks, tmp_path: Path) -> None:
    for result in two_ranks.run(two_tasks, 2, plan(), tmp_path, Listed, with_facts=True):
        assert charges(result) == [(STEP, 5), (QUERY, 1)]
        expected = epsilon_of([(STEP, 5), (QUERY, 1)], 1e-5)
        assert result["facts"]["guarantee"]["epsilon"] == expected
        assert result["facts"]["ran"]["calibrated_tasks"] == 2


def test_checkpoints_keep_the_lines_and_runs_go_on_from_them(
    one_rank: Ranks, tmp_path: Path
) -> None:
    first = one_rank.run(two_tasks, 1, plan(), tmp_path, Wide, save_every=5)[0]
    path = tmp_path / "step=5.ckpt"
    meta = torch.load(path / "meta.pt", weights_only=True)[CHECKPOINT_KEY]
    assert meta["calibration"] == first["found"]
    assert meta["calibration"]["step"] == 5
    again = one_rank.run(two_tasks, 1, plan(), tmp_path, Wide, resume=path, max_epochs=2)[0]
    assert again["found"]["step"] == 10
    assert charges(again) == [(STEP, 5), (QUERY, 1), (STEP, 5), (QUERY, 1)]


# ---- refused -------------------------------------------------------------------------------------


class TooFew(Listed):
    calibrated_layers = ("head.click",)


class Twice(Listed):
    calibrated_layers = ("head.click", "head.click")


class NoList(Listed):
    calibrated_layers = "head.click"


class Nowhere(Listed):
    calibrated_layers = None


class NoSuch(Listed):
    calibrated_layers = ("head.click", "head.nothing")


class Narrow(Listed):
    calibrated_layer, calibrated_layers = "head.click", None


class Untold(Wide):
    num_calibration_tasks = 1


class UntoldList(Listed):
    num_calibration_tasks = 1


class Tied(Listed):
    def configure_model(self) -> None:
        super().configure_model()
        self.head.buy.weight = self.head.click.weight


class Sliced(Listed):
    num_calibration_slices = 3


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (TooFew, "num_calibration_tasks=2 of them, found 1 paths"),
        (Twice, "found 2 paths, some of them twice"),
        (NoList, "calibrated_layers to be a list of texts, found 'head.click'"),
        (Nowhere, "calibrated_layers, a list of 2 such paths"),
        (NoSuch, "at 'head.nothing', found no such layer"),
        (Narrow, "2 outputs, one for a task, and a bias at 'head.click', found one with 1 outputs"),
        (Untold, "with one output and a bias at 'head.wide', found one with 2 outputs"),
        (UntoldList, "num_calibration_tasks=1 of them, found 2 paths"),
        (Tied, "shares weights"),
        (Sliced, "num_calibration_tasks=2 and num_calibration_slices=3. Leave out one"),
    ],
)
def test_a_module_whose_tasks_have_no_place_is_refused_before_anything_is_charged(
    one_rank: Ranks, tmp_path: Path, kind: type[Listed], words: str
) -> None:
    with pytest.raises(Refused, match=words):
        one_rank.run(two_tasks, 1, plan(), tmp_path, kind)
    assert not list(tmp_path.rglob("*.journal"))


def test_noise_that_counts_do_not_share_a_grid_with_is_refused_at_the_start(
    one_rank: Ranks, tmp_path: Path
) -> None:
    """Noise of 800,000 for one task is allowed, and two have the root of two times that."""
    loud = LogitCalibration(noise_multiplier=1e4)
    privacy = plan(unit=Users(max_examples=80, drawn="users"), calibration=loud)
    with pytest.raises(Refused, match="noise of less than 1,048,576 on counts, found 1,131,371"):
        one_rank.run(two_tasks, 1, privacy, tmp_path, Wide)
    assert not list(tmp_path.rglob("*.journal"))


class Three(Wide):
    """Has a logit more than it says."""

    def logits_and_labels(self, batch: Any) -> tuple[Tensor, Tensor]:
        logits, labels = super().logits_and_labels(batch)
        return torch.cat([logits, logits[:, :1]], dim=1), labels


def test_logits_of_another_number_of_tasks_are_not_counted(one_rank: Ranks, tmp_path: Path) -> None:
    result, said = one_rank.run(_heard, tmp_path, Three)[0]
    assert result["found"] == {"step": 5}
    (words,) = [words for words in said if "was not calibrated" in words]
    assert "each of 2 tasks" in words
    assert "found logits of shape (4096, 3)" in words
    assert "set the module's num_calibration_tasks" in words


class Plain(nn.Module):
    """As much of a module as is read."""

    device = torch.device("cpu")

    def __init__(self, logits: Any, labels: Any, tasks: Any = 2) -> None:
        super().__init__()
        self.logits, self.labels, self.num_calibration_tasks = logits, labels, tasks
        self.given: list[Any] = []

    def logits_and_labels(self, batch: Any) -> Any:
        return self.logits, self.labels

    def apply_calibration(self, slope: Any, bias: Any) -> None:
        self.given += [slope, bias]


@pytest.mark.parametrize(
    ("logits", "labels", "words"),
    [
        (torch.zeros(4), torch.zeros(4, 2), r"found logits of shape \(4,\)"),
        (torch.zeros(4, 2), torch.zeros(4), r"found labels of shape \(4,\)"),
        (torch.zeros(2, 4), torch.zeros(4, 2), r"logits of shape \(another number, 4\)"),
        (torch.zeros(4, 2), torch.zeros(4, 1), r"found labels of shape \(4, 1\)"),
        ([torch.zeros(4)] * 2, torch.zeros(4, 2), "found logits that are no tensor but list"),
    ],
)
def test_other_shapes_are_refused(logits: Any, labels: Any, words: str) -> None:
    module: Any = Plain(logits, labels)
    with pytest.raises(Refused, match=words):
        CalibratedModule(module).read(None, 4)


@pytest.mark.parametrize("shape", [(4, 1), (4, 2)])
def test_one_task_has_no_column_for_it(shape: tuple[int, int]) -> None:
    module: Any = Plain(torch.zeros(shape), torch.zeros(shape), 1)
    with pytest.raises(Refused, match="set the module's num_calibration_tasks"):
        CalibratedModule(module).read(None, 4)


@pytest.mark.parametrize("tasks", [0, -1, 2.0, True, "2", None, 1001])
def test_a_number_of_tasks_is_a_whole_number_of_at_least_one(tasks: Any) -> None:
    module: Any = Plain(None, None, tasks)
    with pytest.raises(Refused, match=r"Expected num_calibration_tasks .*, found .*Set it to the"):
        CalibratedModule(module)


def test_a_method_of_one_task_gets_numbers_and_one_of_several_gets_tensors() -> None:
    one: Any = Plain(None, None, 1)
    CalibratedModule(one).apply(LogitMap(1.5, -0.5))
    assert one.given == [1.5, -0.5]
    assert all(isinstance(value, float) for value in one.given)
    several: Any = Plain(None, None, 2)
    CalibratedModule(several).apply(LogitMap(1.5, -0.5), LogitMap(0.5, 0.25))
    slopes, biases = several.given
    assert torch.equal(slopes, torch.tensor([1.5, 0.5]))
    assert torch.equal(biases, torch.tensor([-0.5, 0.25]))

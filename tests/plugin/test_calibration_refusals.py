"""Modules, plans and data that no honest calibration can be made of."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import is_parametrized

from lightning_dpsparse import LogitCalibration, Users
from lightning_dpsparse.refused import Refused
from tests.support.calibration_runs import (
    BEFORE,
    CHEAP,
    QUERY,
    REPLAYED,
    SIZE,
    STEP,
    Clicked,
    Clicking,
    calibrated,
    charges,
    plan,
)
from tests.support.ranks import Ranks


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


class Parametrized(Clicking):
    """Its last weight is computed from two others."""

    def configure_model(self) -> None:
        super().configure_model()
        if not is_parametrized(self.head.out):
            weight_norm(self.head.out)


class NoSlices(Clicking):
    num_calibration_slices = 0


class Unsliced(Clicking):
    num_calibration_slices = 3


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Without, "without logits_and_labels"),
        (Nowhere, "found neither"),
        (Elsewhere, "found no such layer"),
        (Wide, "with one output and a bias at 'head.hidden'"),
        (Shared, "shares weights"),
        (Parametrized, "found some that are computed from others"),
        (NoSlices, "Expected num_calibration_slices >= 1, found 0"),
        (Unsliced, "Expected a method calibration_slices of Unsliced"),
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


class Relabelled(Clicking):
    """Labels that compare an example with the one before it."""

    def logits_and_labels(self, batch: Any) -> Any:
        first, rest = batch.labels[:1], batch.labels[1:] * (1 - batch.labels[:-1])
        return self(batch), torch.cat([first, rest])


class FirstIsNone(Clicking):
    """No logit for whoever comes first."""

    def logits_and_labels(self, batch: Any) -> Any:
        logits = self(batch).clone()
        logits[0] = torch.nan
        return logits, batch.labels


class Resliced(Clicking):
    """Slices that alternate from place to place."""

    num_calibration_slices: Any = 2

    def calibration_slices(self, batch: Any) -> Any:
        return torch.arange(len(batch.labels)) % 2

    def apply_slice_biases(self, slope: float, biases: list[float]) -> None:
        raise AssertionError("there are none")


@pytest.mark.parametrize("kind", [Relabelled, FirstIsNone, Resliced])
def test_nor_by_what_else_depends_on_others_or_on_places(
    one_rank: Ranks, tmp_path: Path, kind: type[Clicking]
) -> None:
    result = one_rank.run(calibrated, 1, plan(), tmp_path, module=kind())[0]
    assert result["found"] == {"step": 5}
    assert charges(result) == [(STEP, 5), (QUERY, 1)]


class ForgetsSome(Clicked):
    """Leaves out some of those who are asked for, where many are."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        kept = indices[: SIZE - 2] if len(indices) == SIZE else indices
        return [self.examples[i] for i in kept]


def test_a_batch_that_lacks_examples_is_not_filled_up_with_copies_that_count(
    one_rank: Ranks, tmp_path: Path
) -> None:
    result = one_rank.run(calibrated, 1, plan(), tmp_path, data=ForgetsSome)[0]
    assert result["found"] == {"step": 5}
    assert charges(result) == [(STEP, 5), (QUERY, 1)]


class OneRankShort(Clicking):
    """The second rank returns a logit too few."""

    def logits_and_labels(self, batch: Any) -> Any:
        return self(batch)[self.trainer.global_rank :], batch.labels


def test_ranks_give_up_together_after_the_model_has_run(two_ranks: Ranks, tmp_path: Path) -> None:
    """In its last batch, after which the first rank would add up counts for ever."""
    found = two_ranks.run(calibrated, 2, plan(), tmp_path, module=OneRankShort(), save_every=5)
    for result in found:
        assert result["found"] == {"step": 5}
        assert charges(result) == [(STEP, 5), (QUERY, 1)]


def test_how_many_examples_have_a_label_is_not_said(one_rank: Ranks, tmp_path: Path) -> None:
    (said,) = one_rank.run(_heard, tmp_path)
    (words,) = [words for words in said if "was not calibrated" in words]
    assert "found labels of shape (another number,)" in words
    numbers = {int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*\d", words)}
    assert numbers == {4096}


class Filtering(Clicking):
    """Labels of clicks alone."""

    def logits_and_labels(self, batch: Any) -> Any:
        return self(batch), batch.labels[batch.labels > 0]


def _heard(folder: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calibrated(1, plan(), folder, module=Filtering())
    return [str(w.message) for w in caught]

"""What a private run says when it starts: what batches count, and whether it can learn."""

from __future__ import annotations

import warnings
from pathlib import Path
from unittest import mock

import pytest

from lightning_dpsparse import PrivacyPlan, Users
from tests.support.private_runs import fit
from tests.support.ranks import Ranks

LEARNS = 1e-3  # 12 sqrt(5) / 0.001 = 27,000: far above the line


def start(world: int, plan: PrivacyPlan, folder: Path) -> tuple[list[str], list[str]]:
    """What is said and what is warned of. Runs inside a rank."""
    said: list[str] = []
    with (
        mock.patch("lightning_dpsparse.plugin.private_run.rank_zero_info", said.append),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        fit(world, plan, folder)
    return said, [str(warning.message) for warning in caught]


def plan_with(noise: float, unit: Users | None = None) -> PrivacyPlan:
    return PrivacyPlan(noise_multiplier=noise, delta=1e-3, unit=unit or "example")


def test_a_batch_of_users_is_announced(one_rank: Ranks, two_ranks: Ranks, tmp_path: Path) -> None:
    """By the public cap. How many examples the users really have is not said."""
    plan = plan_with(LEARNS, Users(max_examples=2))
    for ranks, world in ((one_rank, 1), (two_ranks, 2)):
        said, _ = ranks.run(start, world, plan, tmp_path)[0]
        (line,) = (text for text in said if "drawn with all their examples" in text)
        assert "about 12 users with up to 2 examples each, that is up to about 24" in line
        assert "The batch size counts users" in line


@pytest.mark.parametrize("unit", [None, Users(max_examples=2, drawn="examples")])
def test_a_batch_of_examples_needs_no_words(
    one_rank: Ranks, tmp_path: Path, unit: Users | None
) -> None:
    said, _ = one_rank.run(start, 1, plan_with(LEARNS, unit), tmp_path)[0]
    assert any(text.startswith("Privacy: DPSGD") for text in said)
    assert not any("counts users" in text for text in said)


def warnings_of_noise(warned: list[str]) -> list[str]:
    return [text for text in warned if "as much signal as noise" in text]


def test_a_run_that_cannot_learn_is_warned_of_once(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    for ranks, world in ((one_rank, 1), (two_ranks, 2)):
        results = ranks.run(start, world, plan_with(1.0), tmp_path)
        (warning,) = (text for _, warned in results for text in warnings_of_noise(warned))
        assert "found 27: with a noise multiplier of 1 on batches of 12 examples" in warning
        assert "in 5 steps" in warning


@pytest.mark.parametrize(
    "plan",
    [
        plan_with(LEARNS),
        plan_with(0.0),
        PrivacyPlan(noise_multiplier=1.0, delta=1e-3, fixed_key=3),  # claims nothing
    ],
    ids=["little_noise", "no_noise", "fixed_key"],
)
def test_a_run_that_can_learn_is_not(one_rank: Ranks, tmp_path: Path, plan: PrivacyPlan) -> None:
    _, warned = one_rank.run(start, 1, plan, tmp_path)[0]
    assert warnings_of_noise(warned) == []

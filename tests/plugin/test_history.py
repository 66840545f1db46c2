"""What a module knows of its weights goes wherever they go, and is no attribute of the module."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dpsparse import PrivacyPlan
from lightning_dpsparse.plugin.history import (
    Span,
    history_in,
    history_of,
    keep_history,
    keep_spent,
    spent_by,
)
from tests.support.private_runs import NOISY, Watching, fit
from tests.support.ranks import Ranks
from tests.support.tiny_model import SmallModule

HISTORY = (Span("data", 3), Span("data", 5, "run", "ledger"))
SPENT = {"ledger": {"run": "run"}, "journal": "folder", "taints": ["a taint"]}


def remembering() -> SmallModule:
    module = SmallModule()
    keep_history(module, HISTORY)
    keep_spent(module, SPENT)
    return module


def through_pickle(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


def through_a_file(module: Any) -> Any:
    path = Path(module.folder) / "module.pt"
    torch.save(module, path)
    return torch.load(path, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, through_pickle, through_a_file])
def test_copies_of_a_module_know_its_past(copied: Callable[[Any], Any], tmp_path: Path) -> None:
    module = remembering()
    module.folder = str(tmp_path)
    again = copied(module)
    assert again is not module
    assert history_of(again) == HISTORY
    assert spent_by(again) == SPENT
    assert history_in(again.state_dict()) == HISTORY


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle])
def test_weights_of_their_own_have_a_past_of_their_own(copied: Callable[[Any], Any]) -> None:
    module = remembering()
    again = copied(module)
    keep_history(again, (*HISTORY, Span("other", 1)))
    assert history_of(module) == HISTORY
    assert history_in(module.state_dict()) == HISTORY


def test_shared_weights_share_their_past() -> None:
    module = remembering()
    again = copy.copy(module)
    keep_history(again, (*HISTORY, Span("other", 1)))
    assert history_of(module) == history_of(again)


def test_a_module_without_a_past_has_none() -> None:
    module = SmallModule()
    assert history_of(module) == ()
    assert spent_by(module) is None
    assert history_in(module.state_dict()) == ()


def test_remembering_twice_keeps_one_record() -> None:
    module = remembering()
    keep_history(module, HISTORY[:1])
    assert len(module._state_dict_hooks) == 1
    assert history_in(module.state_dict()) == HISTORY[:1]


def fitted(folder: Path, plan: PrivacyPlan | None) -> list[set[str]]:
    """Names of the module's attributes before and after."""
    module = Watching()
    module.configure_model()
    before = set(vars(module))
    fit(1, plan, folder, module=module, save_every=2)
    return [before, set(vars(module))]


@pytest.mark.parametrize("plan", [NOISY, None])
def test_training_hangs_nothing_on_the_module(
    one_rank: Ranks, tmp_path: Path, plan: PrivacyPlan | None
) -> None:
    before, after = one_rank.run(fitted, tmp_path, plan)[0]
    assert after - before <= {"_hparams"}  # which Lightning itself adds when it saves

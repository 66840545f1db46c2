"""Weights carry their history: whatever training goes on from them charges, refuses or says so."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import ConcatDataset, DataLoader, Subset

from lightning_dpsparse import LazyDP, PrivacyPlan, PublicWeights
from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.plugin.datasets import digest, may_share
from lightning_dpsparse.plugin.history import history_in, history_of
from lightning_dpsparse.sharded.checkpoint import consolidate
from tests.support.private_runs import (
    BATCH,
    NOISY,
    Marked,
    Watching,
    marked_loader,
    strict_collate,
)
from tests.support.ranks import Ranks
from tests.support.tiny_model import Bags, make_trainer

FIXED = PrivacyPlan(mechanism=LazyDP(), noise_multiplier=1.0, delta=1e-3)


class Loadable(Watching):
    """Whose tables are there from the start, as load_state_dict wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.configure_model()


def trained(
    module: Any,
    privacy: PrivacyPlan | None,
    steps: int,
    folder: Path,
    loader: Any = None,
    **more: Any,
) -> Trainer:
    trainer = make_trainer(
        1,
        privacy=privacy,
        max_steps=steps,
        max_epochs=-1,
        default_root_dir=str(folder),
        **{key: value for key, value in more.items() if key != "ckpt_path"},
    )
    loader = marked_loader(1) if loader is None else loader
    trainer.fit(module, loader, ckpt_path=more.get("ckpt_path"))
    return trainer


def facts_of(trainer: Trainer) -> dict[str, Any]:
    facts: dict[str, Any] = trainer.strategy.private_run.facts()  # type: ignore[attr-defined]
    return facts


def other_data() -> DataLoader[Any]:
    return DataLoader(Bags(48, seed=7), batch_size=BATCH, collate_fn=strict_collate)


# ---- plain training ----------------------------------------------------------------------------


def plain_then_private(folder: Path, data: str, through: str) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Loadable()
    first = {
        "same": marked_loader(1),
        "part": DataLoader(Subset(Marked(), range(24)), BATCH, collate_fn=strict_collate),
        "other": other_data(),
    }[data]
    if through == "another strategy":
        plain = Trainer(
            accelerator="cpu", max_steps=3, max_epochs=-1, logger=False,
            enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
            default_root_dir=str(folder),
        )  # fmt: skip
        module.scalar_loss = True
        plain.fit(module, first)
        module.scalar_loss = False
    else:
        plain = trained(module, None, 3, folder, first)
    if through == "checkpoint":
        plain.save_checkpoint(folder / "plain.ckpt")
        return facts_of(trained(Loadable(), NOISY, 5, folder, ckpt_path=folder / "plain.ckpt"))
    if through == "state dict":
        fresh = Loadable()
        fresh.load_state_dict(whole_state(plain, folder))
        module = fresh
    return facts_of(trained(module, NOISY, 2, folder))


def whole_state(trainer: Trainer, folder: Path) -> dict[str, Any]:
    trainer.save_checkpoint(folder / "whole.ckpt")
    state: dict[str, Any] = consolidate(folder / "whole.ckpt")["state_dict"]
    return state


@pytest.mark.parametrize("through", ["memory", "checkpoint", "state dict", "another strategy"])
def test_private_training_after_plain_training_on_the_same_data_is_not_private(
    one_rank: Ranks, tmp_path: Path, through: str
) -> None:
    facts = one_rank.run(plain_then_private, tmp_path, "same", through)[0]
    assert not facts["guarantee"]["is_private"]
    assert facts["guarantee"]["epsilon"] is None
    assert "without privacy for 3 steps" in facts["guarantee"]["faults"][0]
    assert any("without privacy for 3 steps" in taint for taint in facts["taints"])
    assert [span["run"] is None for span in facts["history"]] == [True, False]


def test_a_part_of_the_data_is_the_data(one_rank: Ranks, tmp_path: Path) -> None:
    facts = one_rank.run(plain_then_private, tmp_path, "part", "memory")[0]
    assert not facts["guarantee"]["is_private"]


def test_plain_training_on_other_data_is_said(one_rank: Ranks, tmp_path: Path) -> None:
    facts = one_rank.run(plain_then_private, tmp_path, "other", "memory")[0]
    assert facts["guarantee"]["is_private"]
    assert not facts["taints"]
    assert any("for 3 steps" in line for line in facts["not_covered"])


def taint_stays(folder: Path) -> list[dict[str, Any]]:
    """Plain, private, and private again in memory and from the file."""
    module = Loadable()
    trained(module, None, 3, folder)
    private = trained(module, NOISY, 2, folder)
    private.save_checkpoint(folder / "after.ckpt")
    again = facts_of(trained(module, NOISY, 4, folder))
    resumed = facts_of(trained(Loadable(), NOISY, 6, folder, ckpt_path=folder / "after.ckpt"))
    return [again, resumed]


def test_the_taint_stays(one_rank: Ranks, tmp_path: Path) -> None:
    for facts in one_rank.run(taint_stays, tmp_path)[0]:
        assert not facts["guarantee"]["is_private"]
        assert any("without privacy for 3 steps" in taint for taint in facts["taints"])


def private_then_plain(folder: Path, through: str) -> str:
    module = Loadable()
    private = trained(module, NOISY, 2, folder)
    resume = None
    if through == "checkpoint":
        private.save_checkpoint(folder / "private.ckpt")
        module, resume = Loadable(), folder / "private.ckpt"
    if through == "state dict":
        module = Loadable()
        module.load_state_dict(whole_state(private, folder))
    with pytest.raises(ValueError, match="Expected") as refusal:
        trained(module, None, 4, folder, ckpt_path=resume)
    return str(refusal.value)


@pytest.mark.parametrize("through", ["memory", "checkpoint", "state dict"])
def test_plain_training_of_private_weights_is_refused(
    one_rank: Ranks, tmp_path: Path, through: str
) -> None:
    assert "priva" in one_rank.run(private_then_plain, tmp_path, through)[0]


# ---- private weights under another name --------------------------------------------------------


def as_public(folder: Path, layout: str, is_same: bool) -> Any:
    module = Loadable()
    loader = marked_loader(1) if is_same else other_data()
    trainer = trained(module, NOISY if is_same else FIXED, 2, folder, loader)
    path = folder / "weights.pt"
    trainer.save_checkpoint(folder / "private.ckpt")
    whole = consolidate(folder / "private.ckpt")
    torch.save(whole if layout == "file" else whole["state_dict"], path)
    if layout == "pickled":
        path.write_bytes(pickle.dumps(whole["state_dict"]))
        torch.save(pickle.loads(path.read_bytes()), path)
    return facts_of(
        trained(Loadable(), NOISY, 2, folder / "2", callbacks=[PublicWeights(str(path))])
    )


@pytest.mark.parametrize("layout", ["file", "state dict", "pickled"])
def test_private_weights_are_no_public_ones(one_rank: Ranks, tmp_path: Path, layout: str) -> None:
    with pytest.raises(ValueError, match=r"Expected public weights in 'weights\.pt'"):
        one_rank.run(as_public, tmp_path, layout, True)


def test_weights_of_other_data_are_public_if_the_user_says_so(
    one_rank: Ranks, tmp_path: Path
) -> None:
    facts = one_rank.run(as_public, tmp_path, "file", False)[0]
    assert facts["guarantee"]["is_private"]
    assert any("'weights.pt', taken to be public" in line for line in facts["not_covered"])
    assert any("Other private runs behind the weights" in line for line in facts["not_covered"])


def loaded(folder: Path, through: str) -> Any:
    """Private weights that reach another module past every checkpoint."""
    module = Loadable()
    trainer = trained(module, NOISY, 2, folder)
    state = whole_state(trainer, folder)
    if through == "load_from_checkpoint":
        torch.save(consolidate(folder / "whole.ckpt"), folder / "whole.pt")
        fresh = Loadable.load_from_checkpoint(folder / "whole.pt", weights_only=False)
    else:
        fresh = Loadable()
        fresh.load_state_dict(state)
    if through == "twice":
        state, fresh = fresh.state_dict(), Loadable()
        fresh.load_state_dict(state)
    if through == "copy":
        fresh = copy.deepcopy(fresh)
    if through == "pickle":
        fresh = pickle.loads(pickle.dumps(fresh))
    return facts_of(trained(fresh, NOISY, 2, folder / "2"))


@pytest.mark.parametrize("through", ["load_from_checkpoint", "state", "twice", "copy", "pickle"])
def test_weights_of_another_run_on_the_same_data_are_refused(
    one_rank: Ranks, tmp_path: Path, through: str
) -> None:
    with pytest.raises(ValueError, match="only this run has trained"):
        one_rank.run(loaded, tmp_path, through)


# ---- going on in memory, and forks --------------------------------------------------------------


def forked(folder: Path) -> list[int]:
    """Twelve steps, a checkpoint after six; then six more from the checkpoint."""
    module = Loadable()
    first = trained(module, NOISY, 6, folder)
    first.save_checkpoint(folder / "six.ckpt")
    second = trained(module, NOISY, 6, folder)  # goes on in memory
    fork = trained(Loadable(), NOISY, 12, folder, ckpt_path=folder / "six.ckpt")
    ledgers = [facts_of(trainer)["ran"]["steps"] for trainer in (second, fork)]
    third = facts_of(trained(module, NOISY, 6, folder))
    return [*ledgers, third["ran"]["steps"]]


def test_a_fork_after_going_on_in_memory_charges_all(one_rank: Ranks, tmp_path: Path) -> None:
    assert one_rank.run(forked, tmp_path)[0] == [12, 18, 24]


def every_carrier(folder: Path) -> Any:
    module = Loadable()
    trainer = trained(module, NOISY, 3, folder)
    trainer.save_checkpoint(folder / "three.ckpt")
    ledger = trainer.strategy.private_run.budget.ledger  # type: ignore[attr-defined]
    meta = torch.load(folder / "three.ckpt" / "meta.pt", weights_only=True)
    carriers = [
        history_of(module),
        history_in(module.state_dict()),
        history_in(meta),
        history_in(consolidate(folder / "three.ckpt")),
        history_in(consolidate(folder / "three.ckpt")["state_dict"]),
    ]
    return ledger.to_data(), carriers


def test_every_copy_of_the_weights_names_ledger_and_data(one_rank: Ranks, tmp_path: Path) -> None:
    from lightning_dpsparse.plugin.lineage import digest_of

    data, carriers = one_rank.run(every_carrier, tmp_path)[0]
    ledger = Ledger.from_data(data)
    for history in carriers:
        (span,) = history
        assert span.data == digest(Marked())
        assert (span.steps, span.run) == (3, ledger.run)
        assert span.ledger == digest_of(ledger)


# ---- names of data sets -------------------------------------------------------------------------


def test_names_of_data_sets() -> None:
    whole, other = Bags(40), Bags(30)
    assert digest(whole) == digest(Bags(40, seed=3))  # no example has a say in it
    assert digest(whole) != digest(other)
    assert may_share(digest(Subset(whole, [1, 2])), digest(whole))
    assert may_share(digest(ConcatDataset([whole, other])), digest(other))
    assert not may_share(digest(whole), digest(other))
    assert may_share(digest(whole), digest(None))
    named = Bags(40)
    named.privacy_id = "the clicks of May"  # type: ignore[attr-defined]
    assert not may_share(digest(named), digest(whole))
    many = ConcatDataset([Bags(n) for n in range(1, 30)])
    assert len(digest(many) or "") == 16

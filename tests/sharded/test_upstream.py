"""Private fields of TorchRec and FBGEMM are read in two files, and checked before any step."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

import lightning_dpsparse
from lightning_dpsparse import Placement
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded import kernel, upstream
from lightning_dpsparse.sharded.cut import PrivateLookup
from lightning_dpsparse.versions import installed_versions
from tests.support.plain_training import SGD
from tests.support.ranks import Ranks
from tests.support.tiny_model import SmallModule, loader, make_trainer

PACKAGE = Path(lightning_dpsparse.__file__).parent

# Names of private fields, and the one file that may write them.
HOMES = {
    "upstream.py": (
        "_lookups", "_emb_modules", "_input_dists", "_stagger", "_module_fqn", "_is_weighted",
        "_embedding_bag_configs", "_embedding_configs",
    ),
    "kernel.py": (
        "emb_module", "weights_host", "weights_dev", "iter_cpu", "weights_physical_offsets",
        "optimizer_args", "embedding_specs", "feature_table_map",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("home", "names"), HOMES.items())
def test_private_fields_are_touched_in_one_file(home: str, names: tuple[str, ...]) -> None:
    found = {
        (path.name, name)
        for path in PACKAGE.rglob("*.py")
        for name in names
        if re.search(rf"\.{name}\b|[\"']{name}[\"']", path.read_text())
    }
    assert {file for file, _ in found} == {home}
    assert {name for _, name in found} == set(names)


def test_a_missing_attribute_is_refused_with_the_versions() -> None:
    with pytest.raises(Refused) as refused:
        upstream.required(SimpleNamespace(), "_lookups")
    message = str(refused.value)
    assert "Expected an attribute '_lookups' of types.SimpleNamespace, found none in" in message
    for name, version in installed_versions().items():
        assert f"{name} {version}" in message
    assert "Install versions that are supported: torch 2." in message


class Renamed:
    """A kernel of FBGEMM's, in which one thing has another name."""

    def __init__(self, name: str) -> None:
        for attribute in kernel._ATTRIBUTES:
            if attribute != name:
                setattr(self, attribute, SimpleNamespace(weight_decay=0.0))


@pytest.mark.parametrize("name", kernel._ATTRIBUTES)
def test_a_renamed_field_of_a_kernel_is_refused(name: str) -> None:
    kernel.check_kernel(Renamed("nothing"))
    with pytest.raises(Refused, match=f"Expected an attribute '{name}' of"):
        kernel.check_kernel(Renamed(name))


def fit_with(patch: Any) -> str:
    """Runs inside a rank: how training ends if something upstream has another name."""
    torch.manual_seed(0)
    module = SmallModule()
    trainer = make_trainer(1, Placement(), SGD, max_steps=1)
    with patch():
        try:
            trainer.fit(module, loader(8, 8, 1))
        except Refused as refused:
            return f"after {trainer.global_step} steps: {refused}"
    return "trained"


def without_stagger() -> Any:
    def init(self: Any, pg: Any, splits: Any) -> None: ...

    return mock.patch.object(KJTAllToAll, "__init__", init)


def without_create_lookups() -> Any:
    """TorchRec would call its own method, and never ours."""
    return mock.patch.object(PrivateLookup, "_create_lookups", own_create_lookups)


def own_create_lookups(self: Any) -> None:
    ShardedEmbeddingBagCollection._create_lookups(self)


def without_weights_flag() -> Any:
    right = upstream.required

    def wrong(owner: Any, attribute: str) -> Any:
        renamed = attribute == "_is_weighted" and isinstance(owner, nn.Module)
        return right(owner, "_has_weights" if renamed else attribute)

    return mock.patch.object(upstream, "required", wrong)


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (without_stagger, "an argument 'stagger' of torchrec's KJTAllToAll"),
        (without_create_lookups, "a call of ShardedTables._create_lookups"),
        (without_weights_flag, "an attribute '_has_weights' of"),
    ],
)
def test_another_torchrec_is_refused_when_tables_are_sharded(
    one_rank: Ranks, patch: Any, message: str
) -> None:
    found = one_rank.run(fit_with, patch)[0]
    assert found.startswith("after 0 steps: Expected")
    assert message in found


def test_the_order_of_ranks_is_never_guessed() -> None:
    """A default in place of a missing field would give examples other examples' clip factors."""
    collection: Any = SimpleNamespace(
        _input_dists=[SimpleNamespace(_dist=SimpleNamespace())],
        _env=SimpleNamespace(process_group=None),
    )
    with pytest.raises(Refused, match="Expected an attribute '_stagger' of"):
        upstream.ranks_in_order(collection, 0)

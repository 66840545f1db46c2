"""Checkpoints, whole files and journals under random damage, by accident and by somebody else.

Whoever forges a file signs it as well, so digests are made to fit again in half of the cases.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import strategies as st

from lightning_dpsparse.accounting.journal import read_journal
from lightning_dpsparse.budget import WRITE_AHEAD
from lightning_dpsparse.durable.manifest import MANIFEST_NAME
from lightning_dpsparse.durable.record_log import RecordLog
from lightning_dpsparse.plugin.history import history_in
from lightning_dpsparse.sharded.checkpoint import consolidate
from lightning_dpsparse.sharded.plain_values import load_plain
from lightning_dpsparse.sharded.whole_files import read_whole, weights_in, write_whole
from tests.support.forged import signed
from tests.support.fuzzing import (
    changed_bytes,
    changed_json,
    fuzz_for_a_while,
    fuzz_quickly,
    obeys,
)
from tests.support.private_runs import NOISY, fit
from tests.support.ranks import Ranks

QUICK = 60
SHARD, META = "__0_0.distcp", "meta.pt"


class Saved(NamedTuple):
    """What one small run left."""

    checkpoint: Path
    journal: Path
    whole: Path
    tensors: Path


@pytest.fixture(scope="module")
def saved(one_rank: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    one_rank.run(fit, 1, NOISY, folder, save_every=3)
    checkpoint = folder / "step=3.ckpt"
    whole = consolidate(checkpoint)
    write_whole(whole, folder / "whole.pt")
    write_whole(whole, folder / "whole.safetensors")
    journal = next((folder / "privacy").glob("*.journal"))
    return Saved(checkpoint, journal, folder / "whole.pt", folder / "whole.safetensors")


# ---- laws ----------------------------------------------------------------------------------------


def bytes_of_checkpoint(saved: Saved, folder: Path, change: tuple[str, bytes, bool]) -> None:
    name, content, is_signed = change
    copy = folder / "copy.ckpt"
    shutil.copytree(saved.checkpoint, copy)
    (copy / name).write_bytes(content)
    if is_signed and name != MANIFEST_NAME:
        signed(copy)
    obeys(lambda: consolidate(copy))


def values_of_checkpoint(saved: Saved, folder: Path, meta: Any) -> None:
    copy = folder / "copy.ckpt"
    shutil.copytree(saved.checkpoint, copy)
    torch.save(meta, copy / META)
    signed(copy)
    obeys(lambda: consolidate(copy))


def bytes_of_whole(saved: Saved, folder: Path, change: tuple[str, bytes]) -> None:
    name, content = change
    (folder / name).write_bytes(content)
    obeys(lambda: taken_from_whole(folder / name))


def values_of_whole(saved: Saved, folder: Path, found: Any) -> None:
    torch.save(found, folder / "whole.pt")
    obeys(lambda: taken_from_whole(folder / "whole.pt"))


def taken_from_whole(path: Path) -> None:
    """What everybody does with such a file who loads it."""
    found = read_whole(path)
    history_in(found)
    weights_in(found, path)


def bytes_of_journal(saved: Saved, folder: Path, content: bytes) -> None:
    copy = folder / saved.journal.name
    copy.write_bytes(content)
    whole = read_journal(saved.journal)
    assert whole is not None

    def read() -> None:
        found = read_journal(copy)
        assert found is None or found.ledger.steps <= whole.ledger.steps + WRITE_AHEAD

    obeys(read)


def values_of_journal(saved: Saved, folder: Path, data: Any) -> None:
    if not isinstance(data, dict):
        return
    log = RecordLog(folder / saved.journal.name)
    log.append(data)
    log.close()
    obeys(lambda: read_journal(folder / saved.journal.name))


# ---- inputs --------------------------------------------------------------------------------------


def changed_files(saved: Saved) -> st.SearchStrategy[tuple[str, bytes, bool]]:
    return st.sampled_from([SHARD, META, ".metadata", MANIFEST_NAME]).flatmap(
        lambda name: st.tuples(
            st.just(name), changed_bytes((saved.checkpoint / name).read_bytes()), st.booleans()
        )
    )


def changed_whole(saved: Saved) -> st.SearchStrategy[tuple[str, bytes]]:
    return st.sampled_from([saved.whole, saved.tensors]).flatmap(
        lambda path: st.tuples(st.just(path.name), changed_bytes(path.read_bytes()))
    )


def changed_values(saved: Saved) -> st.SearchStrategy[Any]:
    return changed_json(load_plain(saved.whole))


def changed_meta(saved: Saved) -> st.SearchStrategy[Any]:
    return changed_json(load_plain(saved.checkpoint / META))


def changed_journal(saved: Saved) -> st.SearchStrategy[bytes]:
    return changed_bytes(saved.journal.read_bytes())


def changed_record(saved: Saved) -> st.SearchStrategy[Any]:
    log = RecordLog(saved.journal)
    assert log.newest is not None
    data = dict(log.newest.data)
    log.close()
    return changed_json(data)


FUZZERS: dict[str, tuple[Callable[..., None], Callable[[Saved], st.SearchStrategy[Any]]]] = {
    "bytes of a checkpoint": (bytes_of_checkpoint, changed_files),
    "values of a checkpoint": (values_of_checkpoint, changed_meta),
    "bytes of a whole file": (bytes_of_whole, changed_whole),
    "values of a whole file": (values_of_whole, changed_values),
    "bytes of a journal": (bytes_of_journal, changed_journal),
    "values of a journal": (values_of_journal, changed_record),
}


def law_and_inputs(name: str, saved: Saved) -> tuple[Callable[[Any], None], Any]:
    law, inputs = FUZZERS[name]

    def tried(value: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            law(saved, Path(folder), value)

    return tried, inputs(saved)


@pytest.mark.parametrize("name", FUZZERS)
def test_damage_ends_in_success_or_in_one_line(name: str, saved: Saved) -> None:
    fuzz_quickly(*law_and_inputs(name, saved), QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUZZERS)
def test_damage_ends_in_success_or_in_one_line_for_a_while(name: str, saved: Saved) -> None:
    print(f"{name}: {fuzz_for_a_while(*law_and_inputs(name, saved)):,} inputs")

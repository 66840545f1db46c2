"""Files from somebody else run no code of theirs, whatever kind of file it is."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dpsparse.cli import main
from lightning_dpsparse.durable.manifest import (
    MANIFEST_NAME,
    Manifest,
    read_manifest,
    write_manifest,
)
from lightning_dpsparse.plugin.history import history_in
from lightning_dpsparse.plugin.public_weights import PublicWeights
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.checkpoint import consolidate
from lightning_dpsparse.sharded.plain_values import load_plain
from lightning_dpsparse.sharded.whole_files import HISTORY_KEY, read_whole
from tests.support.forged import signed
from tests.support.private_runs import NOISY, fit, marked_loader
from tests.support.ranks import Ranks
from tests.support.tiny_model import SmallModule, make_trainer


class Payload:
    """Runs code when it is unpickled: it leaves a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


@pytest.fixture(scope="module")
def checkpoint(one_rank: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    one_rank.run(fit, 1, NOISY, folder, save_every=3)
    return folder / "step=3.ckpt"


# ---- forged checkpoints --------------------------------------------------------------------------


def in_meta(folder: Path, payload: Any) -> None:
    meta = load_plain(folder / "meta.pt")
    torch.save({**meta, "callbacks": {"x": payload}}, folder / "meta.pt")


def instead_of_meta(folder: Path, payload: Any) -> None:
    torch.save(payload, folder / "meta.pt")


def in_an_old_pickle(folder: Path, payload: Any) -> None:
    torch.save({"state_dict": payload}, folder / "meta.pt", _use_new_zipfile_serialization=False)


def in_dcp_metadata(folder: Path, payload: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(payload))


def in_objects(folder: Path, payload: Any) -> None:
    meta = load_plain(folder / "meta.pt")
    meta["dpsparse_objects"] = {"hyper_parameters.x": "their.Class"}
    torch.save(meta, folder / "meta.pt")
    torch.save({("hyper_parameters", "x"): payload}, folder / "objects.pt")


def in_a_shard(folder: Path, payload: Any) -> None:
    """An entry that is no tensor, which torch would unpickle."""
    meta = load_plain(folder / "meta.pt")
    index, shard = meta["dpsparse_shard_index"], folder / "__0_0.distcp"
    start = shard.stat().st_size
    with shard.open("ab") as file:
        torch.save(payload, file)
    size = shard.stat().st_size - start
    index["entries"]["model.extra"] = None
    index["paths"]["model.extra"] = ("model", "extra")
    index["pieces"].append(("model.extra", None, None, shard.name, start, size))
    torch.save(meta, folder / "meta.pt")


def instead_of_a_tensor(folder: Path, payload: Any) -> None:
    meta = load_plain(folder / "meta.pt")
    index, shard = meta["dpsparse_shard_index"], folder / "__0_0.distcp"
    start = shard.stat().st_size
    with shard.open("ab") as file:
        torch.save(payload, file)
    size = shard.stat().st_size - start
    index["pieces"] = [(*piece[:4], start, size) for piece in index["pieces"]]
    torch.save(meta, folder / "meta.pt")


FORGERIES = [
    in_meta,
    instead_of_meta,
    in_an_old_pickle,
    in_dcp_metadata,
    in_objects,
    in_a_shard,
    instead_of_a_tensor,
]


def validate(path: Path, *, ours: bool = True, trust: bool = False) -> None:
    module = SmallModule()
    if ours:
        trainer = make_trainer(1, trust_checkpoints=trust)
    else:
        from lightning.pytorch import Trainer

        trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    trainer.validate(module, marked_loader(1, shuffle=False), ckpt_path=path, verbose=False)


def go_on(path: Path) -> None:
    fit(1, NOISY, path.parent, resume=path, max_epochs=2)


def load_module(path: Path) -> None:
    SmallModule.load_from_checkpoint(path)


READERS: list[Callable[[Path], Any]] = [
    validate,
    go_on,
    consolidate,
    load_module,
    lambda path: validate(path, ours=False),
]


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda f: f.__name__)
def test_a_forged_checkpoint_runs_no_code(
    one_rank: Ranks, checkpoint: Path, tmp_path: Path, forge: Callable[[Path, Any], None]
) -> None:
    """Whether it is refused, or read without the part that nobody needs."""
    for number in range(len(READERS)):
        forged, trace = tmp_path / f"{number}.ckpt", tmp_path / f"trace-{number}"
        shutil.copytree(checkpoint, forged)
        forge(forged, Payload(trace))
        signed(forged)
        with suppress(Refused):
            one_rank.run(read_quietly, number, forged)
        assert not trace.exists()


def read_quietly(number: int, path: Path) -> None:
    """In the rank, where functions have no names to be sent by."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        READERS[number](path)


def test_the_payload_works_where_somebody_trusts_it(
    one_rank: Ranks, checkpoint: Path, tmp_path: Path
) -> None:
    """Otherwise the test above would show nothing."""
    forged, trace = tmp_path / "forged.ckpt", tmp_path / "trace"
    shutil.copytree(checkpoint, forged)
    in_objects(forged, Payload(trace))
    signed(forged)
    one_rank.run(validate, forged, trust=True)
    assert trace.exists()


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ("/etc/passwd", "names of other files"),
        ("../other.ckpt/__0_0.distcp", "names of other files"),
    ],
)
def test_an_index_cannot_lead_out_of_the_checkpoint(
    checkpoint: Path, tmp_path: Path, pieces: str, words: str
) -> None:
    forged = tmp_path / "forged.ckpt"
    shutil.copytree(checkpoint, forged)
    meta = load_plain(forged / "meta.pt")
    index = meta["dpsparse_shard_index"]
    index["pieces"] = [(*piece[:3], pieces, *piece[4:]) for piece in index["pieces"]]
    torch.save(meta, forged / "meta.pt")
    signed(forged)
    with pytest.raises(Refused, match=words):
        consolidate(forged)


def test_an_index_cannot_ask_for_more_memory_than_there_are_files(
    checkpoint: Path, tmp_path: Path
) -> None:
    forged = tmp_path / "forged.ckpt"
    shutil.copytree(checkpoint, forged)
    meta = load_plain(forged / "meta.pt")
    for entry in meta["dpsparse_shard_index"]["entries"].values():
        entry["size"] = (1 << 40, 1 << 20)
    torch.save(meta, forged / "meta.pt")
    signed(forged)
    with pytest.raises(Refused, match="more numbers than its files have room for"):
        consolidate(forged)


@pytest.mark.parametrize(
    "index", [None, 3, {}, {"entries": 3}, {"entries": {"a": {"dtype": "x"}}, "pieces": []}]
)
def test_an_index_of_another_kind_is_refused(
    checkpoint: Path, tmp_path: Path, index: object
) -> None:
    forged = tmp_path / "forged.ckpt"
    shutil.copytree(checkpoint, forged)
    torch.save(
        {**load_plain(forged / "meta.pt"), "dpsparse_shard_index": index}, forged / "meta.pt"
    )
    signed(forged)
    with pytest.raises(Refused, match="found a damaged one"):
        consolidate(forged)


def test_a_pipe_in_place_of_a_file_does_not_hang(checkpoint: Path, tmp_path: Path) -> None:
    forged = tmp_path / "forged.ckpt"
    shutil.copytree(checkpoint, forged)
    manifest = read_manifest(forged)
    (forged / ".metadata").unlink()
    os.mkfifo(forged / ".metadata")
    empty = hashlib.sha256().hexdigest()
    files = {**manifest.files, ".metadata": type(manifest.files["meta.pt"])(0, empty)}
    write_manifest(forged, Manifest(files, manifest.about))
    with pytest.raises(Refused, match=r"\.metadata is no file"):
        consolidate(forged)


# ---- files of weights ----------------------------------------------------------------------------


def test_files_of_weights_run_no_code(one_rank: Ranks, tmp_path: Path) -> None:
    path, trace = tmp_path / "weights.pt", tmp_path / "trace"
    torch.save({"state_dict": Payload(trace)}, path)
    with pytest.raises(Refused, match=r"Expected plain values in .* found something else"):
        PublicWeights(str(path))._read()
    with pytest.raises(Refused, match="Expected plain values"):
        one_rank.run(validate, path)
    assert not trace.exists()


def test_a_checkpoint_without_a_manifest_wants_trust(
    one_rank: Ranks, checkpoint: Path, tmp_path: Path
) -> None:
    """As other tools write it, or versions before manifests."""
    old = tmp_path / "old.ckpt"
    shutil.copytree(checkpoint, old)
    (old / MANIFEST_NAME).unlink()
    with pytest.raises(Refused, match=r"found no manifest\.json in it"):
        one_rank.run(validate, old)
    one_rank.run(validate, old, trust=True)
    assert consolidate(old, trust=True)["state_dict"]


# ---- the same, for those who have objects --------------------------------------------------------


class Config:
    """A user's own class, among the hyper-parameters."""

    def __init__(self, width: int = 3) -> None:
        self.width = width

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and other.width == self.width

    __hash__ = None  # type: ignore[assignment]


class WithConfig(SmallModule):
    def __init__(self, config: Config | None = None, rate: float = 0.1) -> None:
        super().__init__(lr=rate)
        self.save_hyperparameters()


def save_with_config(folder: Path) -> None:
    trainer = make_trainer(1, default_root_dir=str(folder))
    trainer.fit(WithConfig(Config(7), 0.3), marked_loader(1))
    with pytest.warns(UserWarning, match=r"hyper_parameters\.config \(.*Config\)"):
        trainer.save_checkpoint(folder / "saved.ckpt")


def test_objects_are_left_out_or_trusted(one_rank: Ranks, tmp_path: Path) -> None:
    one_rank.run(save_with_config, tmp_path)
    path = tmp_path / "saved.ckpt"
    one_rank.run(validate, path)  # nobody needs it there
    with pytest.warns(UserWarning, match="Left out of"):
        found = WithConfig.load_from_checkpoint(path, config=Config(9))
    assert (found.hparams.config, found.hparams.rate) == (Config(9), 0.3)
    trusted = WithConfig.load_from_checkpoint(path, weights_only=False)
    assert trusted.hparams.config == Config(7)
    with torch.serialization.safe_globals([Config]):
        one_rank.run(save_with_safe_config, tmp_path)
        safe = WithConfig.load_from_checkpoint(tmp_path / "safe.ckpt")
    assert safe.hparams.config == Config(7)


def save_with_safe_config(folder: Path) -> None:
    with torch.serialization.safe_globals([Config]):
        trainer = make_trainer(1, default_root_dir=str(folder))
        trainer.fit(WithConfig(Config(7), 0.3), marked_loader(1))
        trainer.save_checkpoint(folder / "safe.ckpt")


# ---- whole files ---------------------------------------------------------------------------------


def test_a_safetensors_file_holds_the_same_weights_and_their_history(
    one_rank: Ranks, checkpoint: Path, tmp_path: Path
) -> None:
    for name in ("whole.safetensors", "whole.ckpt"):
        main(["consolidate", str(checkpoint), str(tmp_path / name)])
    tensors, whole = (read_whole(tmp_path / n) for n in ("whole.safetensors", "whole.ckpt"))
    assert tensors["state_dict"].keys() == whole["state_dict"].keys()
    for name, value in whole["state_dict"].items():
        assert torch.equal(tensors["state_dict"][name], value), name
    assert history_in(tensors) == history_in(whole) != ()
    one_rank.run(validate, tmp_path / "whole.safetensors")
    (tmp_path / "damaged.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(Refused, match="found a damaged one"):
        read_whole(tmp_path / "damaged.safetensors")


def test_the_history_of_a_safetensors_file_counts(
    one_rank: Ranks, checkpoint: Path, tmp_path: Path
) -> None:
    """Private weights are no public ones, in whatever file they come."""
    path = tmp_path / "whole.safetensors"
    main(["consolidate", str(checkpoint), str(path)])
    with pytest.raises(Refused, match=r"Expected public weights in 'whole\.safetensors'"):
        one_rank.run(fit, 1, NOISY, tmp_path, callbacks=[PublicWeights(str(path))])


WRONG_WEIGHTS: dict[str, tuple[Any, str]] = {
    "a list": ([1, 2], "found list"),
    "a list of weights": ({"state_dict": [1]}, "found list without names"),
    "names that are numbers": ({"state_dict": {1: torch.ones(2)}}, "without names"),
    "texts for weights": ({"state_dict": {"a": "1", "b": 2}}, r"found a \(str\) and others"),
    "a history of texts": ({HISTORY_KEY: "abc"}, "found one that this package did not write"),
    "a history of fewer than no steps": (
        {HISTORY_KEY: [{"data": None, "steps": -3}]},
        "found one that this package did not write",
    ),
}


@pytest.mark.parametrize("name", WRONG_WEIGHTS)
def test_files_of_weights_that_hold_something_else(
    name: str, one_rank: Ranks, tmp_path: Path
) -> None:
    content, message = WRONG_WEIGHTS[name]
    path = tmp_path / "weights.pt"
    torch.save(content, path)
    with pytest.raises(Refused, match=message):
        one_rank.run(fit, 1, NOISY, tmp_path, callbacks=[PublicWeights(str(path))])


def test_public_weights_must_be_numbers(one_rank: Ranks, checkpoint: Path, tmp_path: Path) -> None:
    weights = {key: value.clone() for key, value in consolidate(checkpoint)["state_dict"].items()}
    spoiled = sorted(weights)[0]
    weights[spoiled].view(-1)[0] = float("nan")
    torch.save(weights, tmp_path / "weights.pt")
    with pytest.raises(Refused, match=f"infinite or no number: .'{spoiled}'."):
        one_rank.run(
            fit, 1, NOISY, tmp_path, callbacks=[PublicWeights(str(tmp_path / "weights.pt"))]
        )


def test_a_damaged_file_is_refused_although_it_is_trusted(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.ones(100)}, path)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(Refused, match="found one that cannot be read"):
        read_whole(path, trust=True)


def test_a_report_of_a_checkpoint_is_not_in_its_manifest(checkpoint: Path) -> None:
    """Audits add to it later."""
    files = json.loads((checkpoint / MANIFEST_NAME).read_text())["files"]
    assert "privacy_report.json" not in files
    assert (checkpoint / "privacy_report.json").is_file()

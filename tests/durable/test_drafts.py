"""Directories that appear whole under their name, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_dpsparse.durable import drafts
from lightning_dpsparse.durable.drafts import Draft, clean, remove
from lightning_dpsparse.durable.manifest import (
    Manifest,
    check_no_faults,
    digest_file,
    faults_of,
    read_manifest,
    write_manifest,
)
from lightning_dpsparse.refused import Refused


def fill(folder: Path, text: str, name: str = "last.ckpt") -> None:
    (folder / "weights").write_text(text)
    files = {"weights": digest_file(folder / "weights")}
    write_manifest(folder, Manifest(files, {drafts.NAME_KEY: name}))


def saved(path: Path, text: str) -> None:
    draft = Draft(path)
    fill(draft.folder, text, path.name)
    draft.commit()


def text_at(path: Path) -> str:
    check_no_faults(path, faults_of(path, read_manifest(path)))
    return (path / "weights").read_text()


@pytest.fixture(params=[True, False], ids=["exchange", "rename"])
def can_exchange(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the file system can exchange two names."""
    if not request.param:
        monkeypatch.setattr(drafts, "_exchange", lambda one, other: False)
    return bool(request.param)


def test_a_new_one_takes_the_place_of_an_old_one(tmp_path: Path, can_exchange: bool) -> None:
    path = tmp_path / "last.ckpt"
    for text in ("one", "two", "three"):
        saved(path, text)
        assert text_at(path) == text
        assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]
        assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "weights"]


def test_a_file_or_a_link_in_the_place_goes(tmp_path: Path, can_exchange: bool) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("file", "link"):
        saved(tmp_path / name, name)
        assert text_at(tmp_path / name) == name
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link"]


def test_a_process_that_stops_at_any_rename_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    path, rename = tmp_path / "last.ckpt", drafts.os.rename
    for stop_at in range(4):
        saved(path, "old")
        left = [stop_at]

        def rename_or_stop(*args: Path, left: list[int] = left) -> None:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            rename(*args)

        draft = Draft(path)
        fill(draft.folder, "new")
        with monkeypatch.context() as patch:
            patch.setattr(drafts.os, "rename", rename_or_stop)
            try:
                draft.commit()
            except KeyboardInterrupt:
                draft._release()  # as the end of the process would
        clean(tmp_path)
        assert text_at(path) in ("old", "new")
        assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_what_never_became_whole_is_cleaned_up_and_what_is_being_written_stays(
    tmp_path: Path,
) -> None:
    saved(tmp_path / "last.ckpt", "whole")
    orphan, working = Draft(tmp_path / "last.ckpt"), Draft(tmp_path / "step=3.ckpt")
    (orphan.folder / "weights").write_text("half")
    orphan._release()  # its process has ended
    (tmp_path / ".dpsparse-draft-0123456789abcdef").mkdir()
    clean(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["last.ckpt", working.folder.name])
    working.abandon()
    clean(tmp_path / "nowhere")


def test_a_whole_one_whose_name_is_free_gets_it(tmp_path: Path) -> None:
    """Its process ended between the last sync and the rename."""
    draft = Draft(tmp_path / "last.ckpt")
    fill(draft.folder, "whole")
    draft._release()
    clean(tmp_path)
    assert text_at(tmp_path / "last.ckpt") == "whole"


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "..", 7, None])
def test_a_manifest_cannot_send_it_elsewhere(tmp_path: Path, name: object) -> None:
    folder = tmp_path / "checkpoints"
    draft = Draft(folder / "last.ckpt")
    fill(draft.folder, "whole", name)  # type: ignore[arg-type]
    draft._release()
    clean(folder)
    assert [p.name for p in tmp_path.rglob("*")] == ["checkpoints"]


def test_what_is_removed_goes_at_once(tmp_path: Path) -> None:
    saved(tmp_path / "step=1.ckpt", "one")
    remove(tmp_path / "step=1.ckpt")
    remove(tmp_path / "step=1.ckpt")
    assert not list(tmp_path.iterdir())


# ---- manifests -----------------------------------------------------------------------------------


def test_every_fault_is_named(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    saved(path, "some weights")
    manifest = read_manifest(path)
    for damage, words in (
        (lambda file: file.write_text("some weight"), "weights has 11 bytes, and had 12"),
        (lambda file: file.write_text("some wEights"), "weights has other contents"),
        (lambda file: file.write_bytes(bytes(12)), "weights has other contents"),
        (lambda file: file.unlink(), "weights cannot be read"),
        (lambda file: file.mkdir(), "weights is no file"),
    ):
        damage(path / "weights")
        with pytest.raises(Refused, match=words):
            check_no_faults(path, faults_of(path, manifest))


def test_no_flipped_bit_of_a_manifest_passes(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    saved(path, "some weights")
    manifest, file = read_manifest(path), path / "manifest.json"
    whole = file.read_bytes()
    for byte in range(len(whole)):
        damaged = bytearray(whole)
        damaged[byte] ^= 1 << byte % 8
        file.write_bytes(damaged)
        try:
            assert read_manifest(path) == manifest  # white space
        except Refused:
            continue


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"sha256": 3}', "[" * 100_000])
def test_what_is_no_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(Refused, match=r"found that manifest\.json is damaged"):
        read_manifest(tmp_path)
    with pytest.raises(Refused, match="found no such directory"):
        read_manifest(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(Refused, match="found a file"):
        read_manifest(tmp_path / "file")

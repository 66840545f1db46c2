"""Folders and files for their owner alone, old or new and never in between."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from lightning_dpsparse.durable import files
from lightning_dpsparse.durable.files import make_folder, write_file, write_files


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_new_folders_and_files_are_for_their_owner(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    before = os.umask(0)
    try:
        folder = make_folder(tmp_path / "a" / "b")
        write_file(folder / "file", b"data")
    finally:
        os.umask(before)
    assert [mode(path) for path in (tmp_path, tmp_path / "a", folder, folder / "file")] == [
        0o755,  # it was there
        0o700,
        0o700,
        0o600,
    ]


def test_all_files_are_written_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, {"a": b"old", "b": b"old"})
    write_new = files._write_new

    def fail_at_b(path: Path, data: bytes) -> None:
        write_new(path, data)
        if ".b." in path.name:
            raise OSError("No space left on device")

    monkeypatch.setattr(files, "_write_new", fail_at_b)
    with pytest.raises(OSError, match="No space left"):
        write_files(tmp_path, {"a": b"new", "b": b"new"})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "a": b"old",
        "b": b"old",
    }

"""Locks end with the process that holds them, and with nobody else."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import pytest

from lightning_dpsparse.durable import locks
from lightning_dpsparse.durable.locks import close_locked, is_still_at, open_locked
from lightning_dpsparse.refused import Refused


def test_one_holds_it(tmp_path: Path) -> None:
    first = open_locked(tmp_path / "lock")
    assert first is not None
    assert open_locked(tmp_path / "lock") is None
    close_locked(first)
    second = open_locked(tmp_path / "lock")
    assert second is not None
    close_locked(second)


def test_a_forked_child_that_outlives_its_parent_does_not_hold_it(tmp_path: Path) -> None:
    """Loader workers live on for seconds when a trainer was killed."""
    path, children = tmp_path / "lock", tmp_path / "children"
    parent = os.fork()
    if not parent:
        assert open_locked(path) is not None
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        (tmp_path / "draft").write_text(str(child))
        (tmp_path / "draft").rename(children)
        time.sleep(60)
        os._exit(0)
    try:
        while not children.exists():
            time.sleep(0.01)
        assert open_locked(path) is None
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        descriptor = open_locked(path)
        assert descriptor is not None
        close_locked(descriptor)
    finally:
        os.kill(int(children.read_text()), signal.SIGKILL)


def test_a_file_that_took_the_place_is_another(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    descriptor = open_locked(path)
    assert descriptor is not None
    assert is_still_at(descriptor, path)
    path.unlink()
    assert not is_still_at(descriptor, path)
    path.touch()
    assert not is_still_at(descriptor, path)
    close_locked(descriptor)


def test_a_file_system_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locks.fcntl, "flock", no_locks)
    with pytest.raises(Refused, match="Expected a file system with locks"):
        open_locked(tmp_path / "a")

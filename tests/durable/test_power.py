"""The power is cut between any two changes of the disk: what was confirmed is there afterwards."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

from lightning_dpsparse.durable import record_log
from lightning_dpsparse.durable.drafts import Draft, clean, remove
from lightning_dpsparse.durable.files import make_folder, sync_file, write_file
from lightning_dpsparse.durable.manifest import (
    Manifest,
    check_no_faults,
    digest_file,
    faults_of,
    read_manifest,
    write_manifest,
)
from lightning_dpsparse.durable.record_log import RecordLog, read_log
from lightning_dpsparse.refused import Refused
from tests.support.lossy_disk import LossyDisk, why_no_fuse

pytestmark = pytest.mark.skipif(bool(why_no_fuse()), reason=f"no lossy disk: {why_no_fuse()}")
KEEPS: tuple[Literal["nothing", "some"], ...] = ("nothing", "some", "some")


@pytest.fixture(scope="module")
def disk() -> Iterator[LossyDisk]:
    with LossyDisk() as mounted:
        yield mounted


def cut_everywhere(
    disk: LossyDisk, work: Callable[[Path], Iterator[int]], check: Callable[[Path, int], None]
) -> int:
    """Cut the power after every number of changes, and look at what is left.

    `work` says how far it has come: what it has said is confirmed. Returns the number of cuts.
    """
    cuts = 0
    while True:
        folder, confirmed = make_folder(disk.path / f"{work.__name__}-{cuts}"), 0
        disk.cut(after=cuts // len(KEEPS))
        try:
            for done in work(folder):
                confirmed = done
        except (OSError, Refused):
            pass
        was_cut = disk.is_dead
        disk.cut()
        disk.reboot(keep=KEEPS[cuts % len(KEEPS)], seed=cuts)
        check(folder, confirmed)
        if not was_cut:
            return cuts
        cuts += 1


# ---- the log -------------------------------------------------------------------------------------


def log_of(folder: Path) -> Iterator[int]:
    log = RecordLog(folder / "new" / "a.journal")
    try:
        for count in range(1, 8):
            log.append({"count": count})
            yield count
    finally:
        log.close()


def newest_count(folder: Path, confirmed: int) -> None:
    found = read_log(folder / "new" / "a.journal").newest
    assert (0 if found is None else found.data["count"]) >= confirmed


def test_no_record_of_a_log_is_lost(disk: LossyDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times on the way the log is written anew."""
    monkeypatch.setattr(record_log, "LINES", 2)
    assert cut_everywhere(disk, log_of, newest_count) > 10


# ---- files and directories -----------------------------------------------------------------------


def file_of(folder: Path) -> Iterator[int]:
    for count in range(1, 4):
        write_file(folder / "report.json", b"%d" % count * 5_000)
        yield count


def whole_file(folder: Path, confirmed: int) -> None:
    path = folder / "report.json"
    data = path.read_bytes() if path.exists() else b"0" * 5_000
    assert len(data) == 5_000
    assert len(set(data)) == 1
    assert int(data[:1]) >= confirmed


def test_a_file_is_old_or_new(disk: LossyDisk) -> None:
    assert cut_everywhere(disk, file_of, whole_file) > 5


def directory_of(folder: Path) -> Iterator[int]:
    path = folder / "deep" / "last.ckpt"
    for count in range(1, 4):
        draft = Draft(path)
        (draft.folder / "weights").write_bytes(b"%d" % count * 9_000)
        sync_file(draft.folder / "weights")
        files = {"weights": digest_file(draft.folder / "weights")}
        write_manifest(draft.folder, Manifest(files, {"name": path.name}))
        draft.commit()
        yield count


def whole_directory(folder: Path, confirmed: int) -> None:
    path = folder / "deep" / "last.ckpt"
    if path.parent.exists():
        clean(path.parent)
    if not path.exists():
        assert confirmed == 0
        return
    check_no_faults(path, faults_of(path, read_manifest(path)))
    assert int((path / "weights").read_bytes()[:1]) >= confirmed
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_directory_is_old_or_new_and_whole(disk: LossyDisk) -> None:
    assert cut_everywhere(disk, directory_of, whole_directory) > 20


def test_what_is_removed_is_whole_or_gone(disk: LossyDisk) -> None:
    def removing(folder: Path) -> Iterator[int]:
        for done in directory_of(folder):
            if done == 1:
                break
        remove(folder / "deep" / "last.ckpt")
        yield 1

    def whole_or_gone(folder: Path, removed: int) -> None:
        path = folder / "deep" / "last.ckpt"
        if path.exists():
            assert not removed
            check_no_faults(path, faults_of(path, read_manifest(path)))

    assert cut_everywhere(disk, removing, whole_or_gone) > 5


def test_a_log_takes_no_record_after_a_sync_that_failed(disk: LossyDisk) -> None:
    """What a failed sync has written is unknown: it may be gone although a second one succeeds."""
    log = RecordLog(make_folder(disk.path / "failing") / "a.journal")
    log.append({"count": 1})
    disk.fail("fsync", errno.EIO)
    with pytest.raises(Refused, match="Nothing was updated"):
        log.append({"count": 2})
    disk.heal()
    with pytest.raises(Refused, match="Expected"):
        log.append({"count": 3})

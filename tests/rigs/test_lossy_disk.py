"""After a power cut the lossy disk holds what was synced, and of the rest nothing or anything."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from tests.support.kernel_mounts import sync_file_system
from tests.support.lossy_disk import LossyDisk, why_no_fuse
from tests.support.random_changes import RENAME_EXCHANGE, change, rename_with, sync_path, tree

pytestmark = pytest.mark.skipif(why_no_fuse() is not None, reason=str(why_no_fuse()))

OLD, NEW = b"old" * 1000, b"new!" * 3000


@pytest.fixture
def disk() -> Iterator[LossyDisk]:
    with LossyDisk() as disk:
        yield disk


def save(path: Path, data: bytes, *, sync_file: bool = True, sync_folder: bool = True) -> None:
    """The right sequence, or one that leaves out a sync."""
    part = path.with_name(path.name + ".part")
    with open(part, "wb", buffering=0) as file:
        file.write(data)
        if sync_file:
            os.fsync(file.fileno())
    os.replace(part, path)
    if sync_folder:
        sync_path(path.parent)


def found(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


# What was not synced is lost.


def test_nothing_survives_without_a_sync(disk: LossyDisk) -> None:
    (disk.path / "file").write_bytes(NEW)
    (disk.path / "folder").mkdir()
    disk.cut()
    disk.reboot()
    assert os.listdir(disk.path) == []


def test_a_rename_without_a_sync_of_the_file_leaves_it_empty(disk: LossyDisk) -> None:
    save(disk.path / "file", OLD)
    save(disk.path / "file", NEW, sync_file=False)
    disk.cut()
    disk.reboot()
    assert found(disk.path / "file") == b""


def test_a_rename_without_a_sync_of_the_folder_did_not_happen(disk: LossyDisk) -> None:
    save(disk.path / "file", OLD)
    save(disk.path / "file", NEW, sync_folder=False)
    disk.cut()
    disk.reboot()
    assert tree(disk.path) == {"file": ("-rw-r--r--", (OLD, 1, "file"))}


def test_a_synced_file_has_no_name_without_a_sync_of_the_folder(disk: LossyDisk) -> None:
    save(disk.path / "file", NEW, sync_folder=False)
    disk.reboot()
    assert os.listdir(disk.path) == []


def test_folders_in_new_folders_are_lost_without_a_sync_of_every_parent(disk: LossyDisk) -> None:
    folder = disk.path / "a" / "b" / "c"
    folder.mkdir(parents=True)
    save(folder / "file", NEW)
    disk.reboot()
    assert os.listdir(disk.path) == []
    folder.mkdir(parents=True)
    save(folder / "file", NEW)
    for parent in (folder.parent, disk.path):  # not of `a`, which holds the name `b`
        sync_path(parent)
    disk.reboot()
    assert list(tree(disk.path)) == ["a"]
    folder.mkdir(parents=True)
    save(folder / "file", NEW)
    for parent in (folder.parent, folder.parent.parent, disk.path):
        sync_path(parent)
    disk.reboot()
    assert found(folder / "file") == NEW


def test_a_removed_file_is_back_without_a_sync_of_its_folder(disk: LossyDisk) -> None:
    save(disk.path / "file", OLD)
    (disk.path / "file").unlink()
    disk.reboot()
    assert found(disk.path / "file") == OLD
    (disk.path / "file").unlink()
    sync_path(disk.path)
    disk.reboot()
    assert found(disk.path / "file") is None


def test_a_rename_between_folders_is_synced_in_each_by_itself(disk: LossyDisk) -> None:
    for synced, names in (("from", []), ("to", ["from/x", "to/x"])):
        for folder in ("from", "to"):
            (disk.path / folder).mkdir(exist_ok=True)
        sync_path(disk.path)
        save(disk.path / "from" / "x", OLD)
        os.replace(disk.path / "from" / "x", disk.path / "to" / "x")
        sync_path(disk.path / synced)
        disk.reboot()
        left = [name for name in ("from/x", "to/x") if (disk.path / name).exists()]
        assert left == names


def test_a_folder_with_two_names_on_the_disk_is_found_under_both(disk: LossyDisk) -> None:
    for folder in ("from", "to", "from/moved"):
        (disk.path / folder).mkdir()
        sync_path((disk.path / folder).parent)
    save(disk.path / "from/moved/file", OLD)
    os.replace(disk.path / "from/moved", disk.path / "to/moved")
    sync_path(disk.path / "to")
    disk.reboot()
    assert found(disk.path / "from/moved/file") == found(disk.path / "to/moved/file") == OLD
    (disk.path / "to/moved/new").touch()
    assert os.listdir(disk.path / "from/moved") == ["file"]


def test_a_hard_link_has_a_name_of_its_own_to_sync(disk: LossyDisk) -> None:
    (disk.path / "folder").mkdir()
    sync_path(disk.path)
    save(disk.path / "file", OLD)
    os.link(disk.path / "file", disk.path / "folder" / "same")
    with open(disk.path / "folder" / "same", "ab", buffering=0) as file:
        file.write(b"more")
        os.fsync(file.fileno())  # of the data, which both names have
    disk.reboot()
    assert found(disk.path / "file") == OLD + b"more"
    assert os.listdir(disk.path / "folder") == []


def test_an_exchange_of_names_in_one_folder_is_one_change(disk: LossyDisk) -> None:
    for seed in range(20):
        save(disk.path / "a", OLD)
        save(disk.path / "b", NEW)
        rename_with(RENAME_EXCHANGE, disk.path / "a", disk.path / "b")
        disk.reboot("some", seed)
        both = found(disk.path / "a"), found(disk.path / "b")
        assert both in [(OLD, NEW), (NEW, OLD)]


def test_a_mode_is_durable_by_a_sync_of_the_file_and_not_of_its_data(disk: LossyDisk) -> None:
    def mode_after(sync: Callable[[int], None]) -> int:
        save(disk.path / "file", OLD)
        with open(disk.path / "file", "rb") as file:
            os.fchmod(file.fileno(), 0o600)
            sync(file.fileno())
        disk.reboot()
        return stat.S_IMODE((disk.path / "file").stat().st_mode)

    assert mode_after(os.fdatasync) == 0o644
    assert mode_after(os.fsync) == 0o600


@pytest.mark.parametrize("sync", ["sync", "syncfs"])
def test_a_sync_of_everything_keeps_everything(disk: LossyDisk, sync: str) -> None:
    if not disk.hears_sync:
        pytest.skip("this kernel does not tell FUSE of syncs")
    rng = Random(0)
    for _ in range(3):
        for _ in range(100):
            change(disk.path, rng)
        os.sync() if sync == "sync" else sync_file_system(disk.path)
        kept = tree(disk.path)
        for _ in range(100):
            change(disk.path, rng)
        disk.cut()
        disk.reboot()
        assert tree(disk.path) == kept
    assert len(kept) > 3


def test_a_sync_of_a_stranger_keeps_nothing(disk: LossyDisk) -> None:
    """A process that the test did not start, or whose parent is gone."""
    (disk.path / "file").write_bytes(NEW)
    program = (
        "import os, time\nparent = os.getpid()\nif os.fork(): os._exit(0)\n"
        "while os.getppid() == parent: time.sleep(0.01)\n"
        "os.sync(); print('synced', flush=True)"
    )
    ended = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=False)
    assert ended.stdout == b"synced\n"
    disk.reboot()
    assert os.listdir(disk.path) == []


# What was synced is there.


@pytest.mark.parametrize("keep", ["nothing", "some"])
def test_the_right_sequence_never_loses_whatever_the_cut(disk: LossyDisk, keep: str) -> None:
    save(disk.path / "file", OLD)
    before = disk.changes
    save(disk.path / "file", OLD)
    steps = disk.changes - before
    seen = set()
    for seed in range(100):
        disk.cut(after=seed % (steps + 1))
        acknowledged = False
        try:
            save(disk.path / "file", NEW)
            acknowledged = True
        except OSError:
            assert disk.is_dead
        disk.reboot("some" if keep == "some" else "nothing", seed)
        left = found(disk.path / "file")
        assert left in ((NEW,) if acknowledged else (OLD, NEW))
        seen.add((acknowledged, left))
        save(disk.path / "file", OLD)
    assert len(seen) == (3 if keep == "some" else 2)


@pytest.mark.parametrize("left_out", ["sync_file", "sync_folder"])
def test_every_wrong_sequence_loses_by_some_cut(disk: LossyDisk, left_out: str) -> None:
    lost = 0
    for seed in range(40):
        save(disk.path / "file", OLD)
        save(disk.path / "file", NEW, **{left_out: False})
        disk.reboot("some", seed)
        lost += found(disk.path / "file") != NEW
    assert lost > 5


def test_synced_records_of_a_journal_survive_and_its_tail_is_torn(disk: LossyDisk) -> None:
    """Records that were synced are a prefix; the last one is whole, in part, zeros, or missing."""
    record = bytes(range(1, 201))
    tails = set()
    for seed in range(100):
        path = disk.path / f"journal-{seed}"
        with open(path, "ab", buffering=0) as journal:
            sync_path(disk.path)
            for _ in range(seed % 5):
                journal.write(record)
                os.fdatasync(journal.fileno())
            journal.write(record)
        disk.reboot("some", seed)
        left = path.read_bytes()
        assert left.startswith(record * (seed % 5))
        tail = left[len(record) * (seed % 5) :]
        assert len(tail) <= len(record)
        whole = record.startswith(tail)
        tails.add(("none" if not tail else "whole" if tail == record else "part", whole))
    assert tails >= {("none", True), ("whole", True), ("part", True), ("part", False)}


def test_a_long_append_may_come_in_part_and_in_order(disk: LossyDisk) -> None:
    """A file may also end inside of any of its writes, with all that was written before."""
    writes = [Random(number).randbytes(5000).replace(b"\0", b"1") for number in range(8)]
    data, ends = b"".join(writes), set()
    for seed in range(60):
        path = disk.path / str(seed)
        with open(path, "ab", buffering=0) as file:
            sync_path(disk.path)
            for part in writes:
                file.write(part)
        disk.reboot("some", seed)
        left = path.read_bytes()
        assert len(left) <= len(data)
        assert all(byte in (0, data[at]) for at, byte in enumerate(left))
        if data.startswith(left):
            ends.add(len(left))
    inside = [end for end in ends if end > 5000 and end % 5000 and end % 512]
    assert len(inside) > 5
    assert {0, len(data)} <= ends


def test_sectors_of_an_overwrite_come_one_by_one(disk: LossyDisk) -> None:
    """Old and new sectors mix, an earlier write may be the last one, and no sector is torn."""
    size, mixed, versions = 16 * 512, 0, set()
    for seed in range(40):
        save(disk.path / "file", b"0" * size)
        with open(disk.path / "file", "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), b"1" * size, 0)
            os.pwrite(file.fileno(), b"2" * size, 0)
        disk.reboot("some", seed)
        left = (disk.path / "file").read_bytes()
        sectors = [left[at : at + 512] for at in range(0, size, 512)]
        assert len(left) == size
        assert all(len(set(sector)) == 1 for sector in sectors)
        mixed += len(set(sectors)) > 1
        versions |= set(sectors)
    assert mixed > 10
    assert len(versions) == 3


def test_a_seed_gives_one_outcome(disk: LossyDisk) -> None:
    outcomes = []
    for seed in (1, 1, 2, 3, 4, 5):
        with LossyDisk() as other:
            rng = Random(0)
            for step in range(200):
                change(other.path, rng)
                if step == 100:
                    sync_file_system(other.path)
            other.reboot("some", seed)
            outcomes.append(tree(other.path))
    assert outcomes[0] == outcomes[1]
    assert any(outcome != outcomes[0] for outcome in outcomes)


def test_whatever_survives_a_cut_is_a_sound_file_system(disk: LossyDisk) -> None:
    """Random changes and syncs, then a random cut: what is left can be read, and removed."""
    for seed in range(40):
        rng = Random(seed)
        for _ in range(60):
            change(disk.path, rng)
            if rng.random() < 0.2:
                sync_path(Path(rng.choice([p for p, _, _ in os.walk(disk.path)])))
        disk.reboot("some", seed)
        left = tree(disk.path)
        disk.reboot()
        assert tree(disk.path) == left  # nothing is pending after a reboot
        for path in disk.path.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


# What the disk does when it fails.


def test_a_dead_disk_fails_every_operation_and_open_files_too(disk: LossyDisk) -> None:
    save(disk.path / "file", OLD)
    with open(disk.path / "file", "r+b", buffering=0) as file:
        disk.cut()
        assert disk.is_dead
        for attempt in (
            lambda: file.read(1),
            lambda: file.write(b"x"),
            lambda: os.fsync(file.fileno()),
            lambda: os.fstat(file.fileno()),
            lambda: os.listdir(disk.path),
            lambda: (disk.path / "file").stat(),
            lambda: (disk.path / "new").touch(),
            lambda: os.statvfs(disk.path),
        ):
            with pytest.raises(OSError, match="Input/output error"):
                attempt()
        disk.reboot()
        with pytest.raises(OSError, match="Input/output error"):
            file.write(b"x")  # it is a file of the disk before the reboot
    assert found(disk.path / "file") == OLD


def test_after_a_failed_sync_a_later_one_succeeds_without_the_data(disk: LossyDisk) -> None:
    save(disk.path / "journal", b"one.")
    disk.fail("fsync", errno.EIO, after=1)
    with open(disk.path / "journal", "ab", buffering=0) as journal:
        os.fsync(journal.fileno())
        journal.write(b"two.")
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output error"):
                os.fsync(journal.fileno())
        disk.heal()
        os.fsync(journal.fileno())
        assert found(disk.path / "journal") == b"one.two."
        journal.write(b"six.")
        os.fsync(journal.fileno())
    disk.reboot()
    assert found(disk.path / "journal") == b"one.\0\0\0\0six."


def test_a_failed_sync_of_a_folder_leaves_its_names_to_a_later_one(disk: LossyDisk) -> None:
    (disk.path / "a").touch()
    disk.fail("fsync", errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        sync_path(disk.path)
    disk.heal()
    sync_path(disk.path)
    disk.reboot()
    assert os.listdir(disk.path) == ["a"]

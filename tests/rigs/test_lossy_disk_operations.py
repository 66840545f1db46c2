"""To programs the lossy disk is an ordinary file system, until it fails as it was ordered to."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.support.lossy_disk import LossyDisk, why_no_fuse
from tests.support.random_changes import (
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    change,
    rename_with,
    sync_path,
    tree,
)

pytestmark = pytest.mark.skipif(why_no_fuse() is not None, reason=str(why_no_fuse()))


@pytest.fixture
def disk() -> Iterator[LossyDisk]:
    with LossyDisk() as disk:
        yield disk


@pytest.mark.parametrize("seed", range(4))
def test_programs_see_what_they_see_on_an_ordinary_file_system(disk: LossyDisk, seed: int) -> None:
    ours, theirs = Random(seed), Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        for step in range(300):
            assert change(disk.path, ours) == change(Path(folder), theirs), step
            if step % 50 == 49:
                assert tree(disk.path) == tree(Path(folder))


def test_files_show_the_mode_they_were_created_with(disk: LossyDisk) -> None:
    before = os.umask(0o027)
    try:
        os.close(os.open(disk.path / "file", os.O_CREAT | os.O_WRONLY, 0o666))
        (disk.path / "folder").mkdir()
    finally:
        os.umask(before)
    assert stat.S_IMODE((disk.path / "file").stat().st_mode) == 0o640
    assert stat.S_IMODE((disk.path / "folder").stat().st_mode) == 0o750


def test_permission_bits_bind_other_users(disk: LossyDisk) -> None:
    (disk.path / "secret").write_text("x")
    (disk.path / "secret").chmod(0o600)
    command = ["cat", disk.path / "secret"]
    ended = subprocess.run(command, user=65534, capture_output=True, text=True, check=False)
    assert "Permission denied" in ended.stderr


def test_rename_flags_reach_the_disk(disk: LossyDisk) -> None:
    a, b = disk.path / "a", disk.path / "b"
    a.write_text("a")
    b.mkdir()
    rename_with(RENAME_EXCHANGE, a, b)
    assert b.read_text() == "a"
    assert a.is_dir()
    with pytest.raises(FileExistsError):
        rename_with(RENAME_NOREPLACE, a, b)
    rename_with(RENAME_NOREPLACE, a, disk.path / "c")
    assert sorted(os.listdir(disk.path)) == ["b", "c"]


def test_times_can_be_set(disk: LossyDisk) -> None:
    (disk.path / "file").touch()
    os.utime(disk.path / "file", ns=(1_000_000_007, 2_000_000_009))
    status = (disk.path / "file").stat()
    assert (status.st_atime_ns, status.st_mtime_ns) == (1_000_000_007, 2_000_000_009)


def test_a_lock_is_seen_by_other_processes_and_by_other_names(disk: LossyDisk) -> None:
    (disk.path / "lock").touch()
    os.link(disk.path / "lock", disk.path / "same")
    program = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    with open(disk.path / "lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        command = [sys.executable, "-c", program, disk.path / "same"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "BlockingIOError" in ended.stderr
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.parametrize("access", [mmap.ACCESS_READ, mmap.ACCESS_COPY], ids=["shared", "private"])
def test_a_file_can_be_mapped_and_shows_later_writes(disk: LossyDisk, access: int) -> None:
    with open(disk.path / "file", "w+b") as file:
        file.write(b"x" * 10_000)
        file.flush()
        with mmap.mmap(file.fileno(), 0, access=access) as mapped:
            assert mapped[:] == b"x" * 10_000
            os.pwrite(file.fileno(), b"y" * 5000, 100)
            assert mapped[:] == b"x" * 100 + b"y" * 5000 + b"x" * 4900


def test_what_is_written_to_a_mapping_is_durable_by_its_flush(disk: LossyDisk) -> None:
    with open(disk.path / "file", "w+b") as file:
        file.truncate(10_000)
        with mmap.mmap(file.fileno(), 0) as mapped:
            mapped[5000:5003] = b"abc"
            mapped.flush()
            sync_path(disk.path)
            mapped[:3] = b"abc"
            disk.cut()
    disk.reboot()
    assert (disk.path / "file").read_bytes() == bytes(5000) + b"abc" + bytes(4997)


def test_a_file_without_a_name_lives_until_it_is_closed(disk: LossyDisk) -> None:
    with open(disk.path / "file", "w+b") as file:
        file.write(b"abc")
        file.flush()
        os.unlink(disk.path / "file")
        assert os.listdir(disk.path) == []
        assert os.fstat(file.fileno()).st_nlink == 0
        assert os.pread(file.fileno(), 3, 0) == b"abc"


def test_a_large_folder_lists_every_name_once(disk: LossyDisk) -> None:
    names = {f"file-{number:04}" for number in range(1000)}
    for name in names:
        (disk.path / name).touch()
    listed = os.listdir(disk.path)
    assert len(listed) == 1000
    assert set(listed) == names


def test_space_is_limited_and_reported() -> None:
    with LossyDisk(capacity=1 << 20) as disk:
        shown = os.statvfs(disk.path)
        assert (shown.f_blocks * shown.f_frsize, shown.f_bavail * shown.f_frsize) == (1 << 20,) * 2
        with open(disk.path / "large", "wb", buffering=0) as file:
            assert file.write(bytes(2 << 20)) == 1 << 20
            with pytest.raises(OSError, match="No space left") as full:
                file.write(b"x")
            assert full.value.errno == errno.ENOSPC
            os.pwrite(file.fileno(), b"in place", 0)  # needs no space
        with pytest.raises(OSError, match="No space left"):
            (disk.path / "more").touch()
        (disk.path / "large").unlink()
        assert os.statvfs(disk.path).f_bfree == shown.f_blocks
        disk.limit(1000)
        with pytest.raises(OSError, match="No space left"):
            (disk.path / "file").write_bytes(bytes(1001))
        assert (disk.path / "file").stat().st_size == 1000
        disk.limit(None)
        (disk.path / "file").write_bytes(bytes(1001))


def test_space_of_an_open_file_without_a_name_is_used() -> None:
    with LossyDisk(capacity=1 << 20) as disk:
        with open(disk.path / "file", "wb", buffering=0) as file:
            file.write(bytes(1 << 19))
            os.unlink(disk.path / "file")
            assert os.statvfs(disk.path).f_bfree == 1 << 10
        assert os.statvfs(disk.path).f_bfree == 1 << 11


def test_writes_fail_after_so_many_bytes(disk: LossyDisk) -> None:
    disk.fail("write", errno.ENOSPC, after=10)
    with open(disk.path / "file", "wb", buffering=0) as file:
        assert file.write(b"12345678") == 8
        assert file.write(b"12345678") == 2
        with pytest.raises(OSError, match="No space left"):
            file.write(b"1")
        disk.heal()
        assert file.write(b"1") == 1


@pytest.mark.parametrize("operation", ["create", "rename", "unlink", "read"])
def test_any_operation_can_be_made_to_fail(disk: LossyDisk, operation: str) -> None:
    def attempt(number: int) -> None:
        if operation == "create":
            (disk.path / f"new-{number}").touch()
        elif operation == "rename":
            os.replace(disk.path / f"old-{number}", disk.path / "renamed")
        elif operation == "unlink":
            (disk.path / f"old-{number}").unlink()
        else:
            with open(disk.path / f"old-{number}", "rb", buffering=0) as file:
                file.read(1)

    for number in range(4):
        (disk.path / f"old-{number}").touch()
    disk.fail(operation, errno.EDQUOT, after=2)
    attempt(0)
    attempt(1)
    for _ in range(2):
        with pytest.raises(OSError, match=os.strerror(errno.EDQUOT)):
            attempt(2)
    disk.heal()
    attempt(2)


def test_an_unknown_fault_is_refused(disk: LossyDisk) -> None:
    with pytest.raises(ValueError, match="Expected one of"):
        disk.fail("fsyncs", errno.EIO)


def test_a_read_only_disk_can_be_read_and_not_changed(disk: LossyDisk) -> None:
    with open(disk.path / "file", "wb", buffering=0) as file:
        file.write(b"abc")
        disk.read_only(True)
        for attempt in (
            lambda: file.write(b"d"),
            lambda: os.fsync(file.fileno()),
            lambda: (disk.path / "new").touch(),
            lambda: (disk.path / "file").unlink(),
            lambda: (disk.path / "file").chmod(0o600),
            lambda: os.open(disk.path / "file", os.O_WRONLY),
        ):
            with pytest.raises(OSError, match="Read-only file system"):
                attempt()
        assert (disk.path / "file").read_bytes() == b"abc"
        disk.read_only(False)
        file.write(b"d")
    assert (disk.path / "file").read_bytes() == b"abcd"


def test_large_files_cost_what_they_hold(disk: LossyDisk) -> None:
    """The ninth part of a file and its sync cost what the first cost, and not nine times that."""
    part = os.urandom(1 << 20) * 4
    took = []
    with open(disk.path / "file", "wb", buffering=0) as file:
        for _ in range(16):
            start = time.perf_counter()
            file.write(part)
            os.fsync(file.fileno())
            took.append(time.perf_counter() - start)
    assert (disk.path / "file").stat().st_size == 64 << 20
    # The quickest of each half, because the machine has other work, too.
    assert min(took[8:]) < 4 * min(took[:8])


def test_nothing_is_left_of_a_closed_disk() -> None:
    with LossyDisk() as disk:
        kept = os.open(disk.path / "file", os.O_CREAT | os.O_RDWR)
    os.close(kept)
    assert not disk.path.parent.exists()
    assert str(disk.path) not in Path("/proc/self/mountinfo").read_text()


def test_nothing_is_left_of_a_disk_whose_test_was_killed() -> None:
    program = (
        "import os, signal; from tests.support.lossy_disk import LossyDisk; "
        "print(LossyDisk().__enter__().path, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=False)
    path = Path(ended.stdout.strip())
    deadline = time.monotonic() + 20
    while path.parent.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not path.parent.exists()
    assert str(path) not in Path("/proc/self/mountinfo").read_text()

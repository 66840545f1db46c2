"""After a power cut a real file system holds what was synced, and not what was only written."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.support.cut_disk import CutDisk, FileSystem, why_no_loop
from tests.support.random_changes import change, sync_path, tree

NEW, OLD = b"new!" * 3000, b"old" * 1000


@pytest.fixture(params=["ext4", "xfs"])
def disk(request: pytest.FixtureRequest) -> Iterator[CutDisk]:
    file_system: FileSystem = request.param
    if reason := why_no_loop(file_system):
        pytest.skip(reason)
    with CutDisk(file_system) as disk:
        yield disk


def save(path: Path, data: bytes, steps: int = 9) -> None:
    """Replace a file safely; or only the first steps of it, and then cut the power."""
    part = path.with_name("part")
    with open(part, "wb", buffering=0) as file:
        file.write(data[: len(data) // 2]) if steps > 0 else None
        file.write(data[len(data) // 2 :]) if steps > 1 else None
        os.fsync(file.fileno()) if steps > 2 else None
    os.replace(part, path) if steps > 3 else None
    sync_path(path.parent) if steps > 4 else None


def test_what_was_not_synced_is_lost(disk: CutDisk) -> None:
    for _ in range(3):  # a `sync` of another process would save it, though not three times
        (disk.path / "file").write_bytes(NEW)
        (disk.path / "folder").mkdir(exist_ok=True)
        disk.cut()
        disk.reboot()
        left = os.listdir(disk.path)
        if not left:
            break
    assert left == []


def test_data_after_the_last_sync_is_lost(disk: CutDisk) -> None:
    for _ in range(3):
        save(disk.path / "file", OLD)
        with open(disk.path / "file", "ab", buffering=0) as file:
            file.write(b"synced")
            os.fdatasync(file.fileno())
            file.write(b"not synced")
        disk.reboot()
        left = (disk.path / "file").read_bytes()
        assert left.startswith(OLD + b"synced")
        if left == OLD + b"synced":
            break
    assert left == OLD + b"synced"


@pytest.mark.parametrize("seed", range(2))
def test_what_was_synced_is_there_whenever_the_power_is_cut(disk: CutDisk, seed: int) -> None:
    seen = set()
    for steps in Random(seed).choices(range(6), k=10):
        save(disk.path / "file", OLD)
        save(disk.path / "file", NEW, steps)
        disk.cut()
        disk.reboot()
        left = (disk.path / "file").read_bytes()
        assert left in ((NEW,) if steps == 5 else (OLD, NEW))
        seen.add(left)
    assert seen == {OLD, NEW}


def test_a_file_system_after_a_cut_is_sound_and_can_be_used(disk: CutDisk) -> None:
    rng = Random(0)
    for _ in range(4):
        for _ in range(100):
            change(disk.path, rng)
        sync_path(disk.path)
        names = set(tree(disk.path))
        disk.cut()
        disk.reboot()
        assert set(tree(disk.path)) == names


def test_programs_outlive_a_cut_and_their_files_stay_dead(disk: CutDisk) -> None:
    program = (
        "import os, sys; file = open(sys.argv[1], 'ab', buffering=0); print('open', flush=True)\n"
        "for line in sys.stdin:\n"
        "    try:\n        file.write(b'x'); os.fsync(file); print('ok', flush=True)\n"
        "    except OSError as error: print(error.errno, flush=True)"
    )
    command = [sys.executable, "-c", program, disk.path / "file"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask() -> str:
            process.stdin.write("\n")
            return process.stdout.readline().strip()

        assert process.stdout.readline() == "open\n"
        assert ask() == "ok"
        disk.cut()
        assert ask() == str(errno.EIO)
        disk.reboot()
        assert ask() == str(errno.EIO)
        assert (disk.path / "file").read_bytes() == b"x"
        (disk.path / "file").write_bytes(b"yy")
        process.kill()
    disk.reboot()


@pytest.mark.skipif(why_no_loop() is not None, reason=str(why_no_loop()))
def test_its_size_is_its_limit() -> None:
    with CutDisk(size=16 << 20) as disk:
        with pytest.raises(OSError, match="No space left"):
            (disk.path / "file").write_bytes(bytes(16 << 20))
        disk.reboot()
        (disk.path / "file").write_bytes(bytes(1 << 20))


@pytest.mark.skipif(why_no_loop() is not None, reason=str(why_no_loop()))
@pytest.mark.parametrize("killed", [False, True])
def test_nothing_is_left_of_a_closed_disk_also_if_its_test_was_killed(killed: bool) -> None:
    program = (
        "import sys; from tests.support.cut_disk import CutDisk\n"
        "with CutDisk() as disk:\n    print(disk.path, flush=True); sys.stdin.read()"
    )
    pipe, root = subprocess.PIPE, Path(__file__).parents[2]
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=root, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        assert path.is_mount()
        if killed:
            process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while path.parent.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not path.parent.exists()
    assert str(path) not in Path("/proc/self/mountinfo").read_text()

"""The append-only log: what was confirmed stays, and what is wrong with a copy of it shows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_dpsparse.durable import record_log
from lightning_dpsparse.durable.record_log import LINES, Record, RecordLog, read_log
from lightning_dpsparse.refused import Refused


def written(path: Path, count: int) -> list[Record]:
    log = RecordLog(path)
    records = [log.append({"value": i, "text": "ε" * (i % 7)}) for i in range(count)]
    log.close()
    return records


def test_records_are_numbered_and_the_newest_is_read(tmp_path: Path) -> None:
    records = written(tmp_path / "log", 5)
    assert [record.sequence for record in records] == [0, 1, 2, 3, 4]
    assert len({record.digest for record in records}) == 5
    found = read_log(tmp_path / "log")
    assert found.newest == records[-1]
    assert (found.damaged, found.is_torn, found.may_lack_a_record) == (0, False, False)


def test_another_process_goes_on_with_the_digests(tmp_path: Path) -> None:
    first = written(tmp_path / "log", 3)
    second = written(tmp_path / "log", 2)
    assert [record.sequence for record in second] == [3, 4]
    assert read_log(tmp_path / "log").newest == second[-1]
    other = written(tmp_path / "other", 5)
    assert other[2].digest == first[2].digest  # the same history has the same digests
    assert other[3].digest != second[0].digest


def test_a_write_that_was_cut_off_at_any_byte_is_seen_and_cut_off(tmp_path: Path) -> None:
    """A power cut during the last append leaves any part of its line."""
    path = tmp_path / "log"
    records = written(path, 3)
    whole = path.read_bytes()
    start = whole.rstrip(b"\n").rfind(b"\n") + 1
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        found = read_log(path)
        # Only the end of the line may be missing from a record that counts.
        assert found.newest == records[2 if end == len(whole) - 1 else 1]
        assert found.is_torn == (start < end < len(whole) - 1)
        RecordLog(path).close()
        written(path, 1)
        after = read_log(path)
        assert after.newest is not None
        assert not after.is_torn
        assert after.newest.sequence == (3 if end == len(whole) - 1 else 2)


def test_no_flipped_bit_makes_an_older_record_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "log"
    newest = written(path, 3)[-1]
    whole = path.read_bytes()
    refused = 0
    for byte in range(len(whole)):
        damaged = bytearray(whole)
        damaged[byte] ^= 1 << byte % 8
        path.write_bytes(damaged)
        try:
            found = read_log(path)
        except Refused:
            refused += 1
        else:
            assert found.newest == newest or found.may_lack_a_record
    assert refused > len(whole) / 4  # all bits of the last line but its end


def test_damage_before_the_newest_record_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "log"
    newest = written(path, 4)[-1]
    data = path.read_bytes().replace(b'"value":1', b'"value":7')
    path.write_bytes(data)
    found = read_log(path)
    assert (found.newest, found.damaged) == (newest, 1)


def test_a_line_that_was_taken_out_is_seen(tmp_path: Path) -> None:
    """Its digest is in that of the line behind it."""
    path = tmp_path / "log"
    newest = written(path, 4)[-1]
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], *lines[2:]]))
    found = read_log(path)
    assert (found.newest, found.damaged) == (newest, 1)
    path.write_bytes(b"".join([*lines[:2], lines[3]]))
    with pytest.raises(Refused, match="damaged"):
        read_log(path)


@pytest.mark.parametrize("zeros", [1, 100, 5_000])
def test_zeros_at_the_end_may_have_been_a_record(tmp_path: Path, zeros: int) -> None:
    """A block that never came, or one that was lost: there is no telling."""
    path = tmp_path / "log"
    records = written(path, 3)
    with path.open("ab") as file:
        file.write(bytes(zeros))
    found = read_log(path)
    assert found.newest == records[-1]
    assert found.is_torn
    assert found.may_lack_a_record
    assert written(path, 1)[0].sequence == 3
    assert not read_log(path).may_lack_a_record


def test_a_long_log_is_written_anew_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "log"
    records = written(path, 3 * LINES + 5)
    assert len(path.read_bytes().splitlines()) < LINES
    assert read_log(path).newest == records[-1]
    assert records[-1].sequence == 3 * LINES + 4
    assert [p.name for p in tmp_path.iterdir()] == ["log"]


def test_a_log_that_was_moved_or_replaced_takes_no_record(tmp_path: Path) -> None:
    for change in (
        lambda path: path.unlink(),
        lambda path: path.rename(tmp_path / "elsewhere"),
        lambda path: (path.unlink(), path.write_bytes(b"")),
    ):
        path = tmp_path / "log"
        log = RecordLog(path)
        log.append({"value": 1})
        change(path)
        with pytest.raises(Refused, match="found that it is gone"):
            log.append({"value": 2})
        log.close()
        path.unlink(missing_ok=True)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    log = RecordLog(tmp_path / "log")
    with pytest.raises(BlockingIOError):
        RecordLog(tmp_path / "log")
    log.append({"value": 1})
    (tmp_path / "log").rename(tmp_path / "kept")  # nobody can lock what is elsewhere
    log.close()
    RecordLog(tmp_path / "kept").close()


@pytest.mark.parametrize("lines", [1, LINES])
def test_a_full_disk_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: int
) -> None:
    path = tmp_path / "log"
    log = RecordLog(path)
    for i in range(lines):
        newest = log.append({"value": i})

    def fill_up(descriptor: int, data: bytes) -> None:
        os.write(descriptor, data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record_log, "_write_all", fill_up)
    with pytest.raises(Refused, match=r"No space left on device\. Nothing was updated"):
        log.append({"value": "more"})
    with pytest.raises(Refused, match="found that it is gone"):
        log.append({"value": "again"})
    monkeypatch.undo()
    assert read_log(path).newest == newest
    assert written(path, 1)[0].sequence == lines


def test_what_is_no_log_is_refused_and_nothing_is_nothing(tmp_path: Path) -> None:
    assert read_log(tmp_path / "none").newest is None
    (tmp_path / "text").write_text("hello\nworld\n")
    with pytest.raises(Refused, match="damaged"):
        read_log(tmp_path / "text")
    (tmp_path / "part").write_text("hel")
    assert read_log(tmp_path / "part").is_torn


def test_a_log_that_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    with pytest.raises(Refused, match="Expected a file that can be read"):
        read_log(tmp_path / "log")

"""Criteo's text files become arrays: nothing is guessed, nothing is kept silently."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from lightning_dpsparse.cli import main
from lightning_dpsparse.data import CriteoData, Part, collate
from lightning_dpsparse.data.criteo import PreparedCriteo
from lightning_dpsparse.data.prepare import prepare_criteo
from lightning_dpsparse.hashing import mix, salt
from lightning_dpsparse.refused import Refused

ROWS = [100] * 26


def line(
    label: str = "1", integers: list[str] | None = None, tokens: list[str] | None = None
) -> str:
    integers = integers or [str(i) for i in range(13)]
    tokens = tokens or [f"{i:08x}" for i in range(26)]
    return "\t".join([label, *integers, *tokens])


def prepare(tmp_path: Path, lines: list[str], name: str = "train.txt") -> Path:
    source = tmp_path / name
    text = "\n".join(lines) + "\n"
    source.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    prepare_criteo(source, tmp_path / "out", ROWS, progress=False)
    return tmp_path / "out"


def row_of(token: int, feature: int, rows: int = 100) -> int:
    word = mix(np.array([token], np.uint64) ^ salt(feature))
    return int(word[0] % np.uint64(rows - 1)) + 1


def test_a_line_becomes_an_example(tmp_path: Path) -> None:
    integers = ["", "-2", "5", "1382", *["0"] * 9]
    tokens = ["68fd1e64", "", "ABCDEF01", "5", *["0"] * 22]
    out = prepare(tmp_path, [line("1", integers, tokens), line("0")])
    clicks = PreparedCriteo([Part(path=str(out))]).__getitems__([0, 1])
    assert clicks.labels_B.tolist() == [1.0, 0.0]
    assert clicks.counts_BC[0, :4].tolist() == [0.0, -2.0, 5.0, 1382.0]
    ids = clicks.ids_L.reshape(26, 2)[:, 0]
    expected = [row_of(0x68FD1E64, 0), 0, row_of(0xABCDEF01, 2), row_of(5, 3), row_of(0, 4)]
    assert ids[:5].tolist() == expected


def test_one_line_of_rubbish_does_not_spoil_the_file(tmp_path: Path) -> None:
    source = tmp_path / "train.txt"
    rubbish = [b"\xff\xfe\x80", line().encode()[:-3] + b"\xe9\xe9\xe9", b"\x00" * 10]
    source.write_bytes(b"\n".join([line("1").encode(), *rubbish, line("0").encode()]))
    prepared = prepare_criteo(source, tmp_path / "out", ROWS, progress=False)
    assert prepared.examples == 2
    assert sum(prepared.malformed.values()) == 3


def test_the_hash_is_fixed_and_differs_between_features(tmp_path: Path) -> None:
    """These numbers may never change: prepared files and released models depend on them."""
    assert [row_of(0x68FD1E64, feature, 10_000) for feature in range(3)] == [2821, 5338, 6796]


def test_a_missing_token_has_row_zero_to_itself(tmp_path: Path) -> None:
    lines = [line(tokens=[f"{i * 7919 + f:x}" for f in range(26)]) for i in range(500)]
    out = prepare(tmp_path, lines)
    ids = PreparedCriteo([Part(path=str(out))]).__getitems__(range(500)).ids_L
    assert ids.min() == 1
    assert ids.max() == 99


@pytest.mark.parametrize("others", [0, 3])
def test_a_column_may_be_missing_altogether(tmp_path: Path, others: int) -> None:
    lines = [line(tokens=[""] * 26)] + [line("7", tokens=[""] * 26)] * others
    out = prepare(tmp_path, lines)
    ids = PreparedCriteo([Part(path=str(out))]).__getitems__([0]).ids_L
    assert ids.tolist() == [0] * 26


def test_malformed_lines_are_left_out_and_counted_by_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        line("1"),
        "1\t2\t3",
        line("2"),
        line(""),
        line(integers=["x"] * 13),
        line(integers=["1.5", *["0"] * 12]),
        line(tokens=["xyz", *["0"] * 25]),
        line(tokens=["123456789", *["0"] * 25]),
        line() + "\textra",
        "",
        line("0"),
    ]
    (tmp_path / "train.txt").write_text("\n".join(lines))
    main(
        [
            "prepare",
            "criteo",
            str(tmp_path / "train.txt"),
            "--output",
            str(tmp_path / "o"),
            "--num-rows",
            "50",
        ]
    )
    meta = json.loads((tmp_path / "o" / "train" / "meta.json").read_text())
    assert meta["examples"] == 2
    assert meta["malformed"] == {
        "with a wrong number of columns": 2,
        "with a bad label": 2,
        "with a bad integer": 2,
        "with a bad token": 2,
    }
    printed = capsys.readouterr().out
    assert "2 examples, click rate 0.5000" in printed
    assert "2 with a bad token" in printed


@pytest.mark.parametrize("name", ["day_0.gz", "day_0.txt"])
def test_compressed_files_are_read_as_they_are(tmp_path: Path, name: str) -> None:
    out = prepare(tmp_path, [line("1")] * 3, name)
    assert len(PreparedCriteo([Part(path=str(out))])) == 3


def fails(tmp_path: Path, content: bytes, message: str, name: str = "f.txt") -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit) as error:
        main(["prepare", "criteo", str(tmp_path / name), "--output", str(tmp_path / "o")])
    assert message in str(error.value)
    assert str(error.value).count("\n") == 0
    assert not list(tmp_path.glob("o/*/*"))  # nothing half-written is left behind


def test_an_empty_file_is_one_clear_error(tmp_path: Path) -> None:
    fails(tmp_path, b"", "found")


def test_a_file_of_blank_lines_is_one_clear_error(tmp_path: Path) -> None:
    fails(tmp_path, b"\n\n\n", "found")


def test_a_missing_label_column_is_one_clear_error(tmp_path: Path) -> None:
    content = "\n".join(line()[2:] for _ in range(5)).encode()
    fails(tmp_path, content, "5 lines without a label column")


def test_a_wrong_file_is_one_clear_error(tmp_path: Path) -> None:
    fails(tmp_path, b"user,item,rating\n1,2,3\n", "2 lines with a wrong number of columns")


def test_a_binary_file_is_one_clear_error(tmp_path: Path) -> None:
    fails(tmp_path, bytes(range(256)) * 50, "found")


def test_a_file_whose_ending_lies_is_one_clear_error(tmp_path: Path) -> None:
    fails(tmp_path, line().encode(), "does its ending name its compression?", "day.gz")


def test_a_file_that_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="Expected a Criteo file at"):
        main(["prepare", "criteo", str(tmp_path / "no"), "--output", str(tmp_path / "o")])


@pytest.mark.parametrize("rows", ["10,20", "1"])
def test_table_sizes_are_checked(tmp_path: Path, rows: str) -> None:
    (tmp_path / "f").write_text(line())
    with pytest.raises(SystemExit, match="Expected 26 table sizes of at least 2 rows"):
        main(
            [
                "prepare",
                "criteo",
                str(tmp_path / "f"),
                "--output",
                str(tmp_path),
                "--num-rows",
                rows,
            ]
        )


def numbered(tmp_path: Path, name: str, count: int, first: int) -> str:
    (tmp_path / f"{name}.txt").write_text(
        "\n".join(line(integers=[str(first + i)] * 13) for i in range(count))
    )
    prepare_criteo(tmp_path / f"{name}.txt", tmp_path / name, ROWS, progress=False)
    return str(tmp_path / name)


def test_parts_are_stretches_of_files_one_after_the_other(tmp_path: Path) -> None:
    a, b = numbered(tmp_path, "a", 10, 0), numbered(tmp_path, "b", 4, 100)
    data = PreparedCriteo([Part(path=a, start=0.5), Part(path=b, stop=0.5)])
    assert len(data) == 7
    clicks = data.__getitems__([6, 0, 5, 4])
    assert clicks.counts_BC[:, 0].tolist() == [101.0, 5.0, 100.0, 9.0]
    again = pickle.loads(pickle.dumps(data))  # as a loader's worker gets it
    assert np.array_equal(again.__getitems__([6, 0, 5, 4]).ids_L, clicks.ids_L)
    assert len(pickle.dumps(data)) < 5000
    assert collate(data.__getitems__([])).sparse_features.stride() == 0


def test_parts_of_other_table_sizes_are_refused(tmp_path: Path) -> None:
    a = numbered(tmp_path, "a", 3, 0)
    prepare_criteo(tmp_path / "a.txt", tmp_path / "b", [50] * 26, progress=False)
    with pytest.raises(ValueError, match="same --num-rows"):
        PreparedCriteo([Part(path=a), Part(path=str(tmp_path / "b"))])


def test_a_directory_that_was_not_prepared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="lightning-dpsparse prepare criteo"):
        PreparedCriteo([Part(path=str(tmp_path))])


def test_a_stretch_must_be_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Expected 0 <= start < stop <= 1"):
        PreparedCriteo([Part(path=numbered(tmp_path, "a", 3, 0), start=0.7, stop=0.2)])


def test_only_the_parts_of_a_stage_are_opened(tmp_path: Path) -> None:
    here = Part(path=numbered(tmp_path, "a", 3, 0))
    data = CriteoData(train=[Part(path="nowhere")], val=[here], test=[Part(path="nowhere")])
    data.setup("validate")
    assert len(data.val_set) == 3
    with pytest.raises(Refused):
        data.setup("fit")


@pytest.mark.parametrize(
    ("name", "examples", "clicks"),
    [
        ("criteo_kaggle_8k_raw.tsv.zst", 8000, 1728),
        ("criteo_kaggle_64k.tsv.zst", 64000, None),
        ("criteo_1tb_day0_10k.tsv.zst", 10000, 265),
    ],
)
def test_real_files_are_read_whole(
    real_data: Path, tmp_path: Path, name: str, examples: int, clicks: int | None
) -> None:
    prepared = prepare_criteo(real_data / name, tmp_path / "out", ROWS, progress=False)
    assert (prepared.examples, sum(prepared.malformed.values())) == (examples, 0)
    if clicks is not None:
        assert prepared.clicks == clicks


def test_a_damaged_directory_is_refused(tmp_path: Path) -> None:
    out = prepare(tmp_path, [line("1"), line("0")])
    whole = (out / "examples.npy").read_bytes()
    for name, damaged in (
        ("examples.npy", b""),
        ("examples.npy", whole[:200]),
        ("meta.json", b"{"),
        ("meta.json", b"[]"),
    ):
        kept = (out / name).read_bytes()
        (out / name).write_bytes(damaged)
        with pytest.raises(Refused, match=f"a prepared Criteo directory at .*{name}"):
            PreparedCriteo([Part(path=str(out))])
        (out / name).write_bytes(kept)
    (out / "examples.npy").unlink()
    with pytest.raises(Refused, match=r"found no examples\.npy that can be read in it"):
        PreparedCriteo([Part(path=str(out))])

"""Data files that are cut off, of another kind, or hold what no example can have."""

from __future__ import annotations

import bz2
import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lightning_dpsparse.data.ratings import read_ratings
from lightning_dpsparse.models import TwoTowerModule
from tests.support.bad_files import (
    HEADER,
    LINE,
    META,
    MOVIES,
    RATING,
    as_npy,
    as_npz,
    examples,
    read_frequencies,
    read_prepared,
)
from tests.support.bad_input import HUGE, INF, NAN, ends_in_one_line, refused, run_main

# ---- Criteo's text files -------------------------------------------------------------------------

MANY = LINE.encode() * 1000
GZIP, BZ2 = gzip.compress(MANY), bz2.compress(MANY)
ZSTD = pa.compress(MANY, codec="zstd", asbytes=True)
LZ4 = pa.compress(MANY, codec="lz4", asbytes=True)

TEXTS: dict[str, tuple[str, bytes, str]] = {
    "empty": ("a.txt", b"", "empty"),
    "newlines": ("a.txt", b"\n\n\n", "found"),
    "bytes": ("a.txt", bytes(range(256)) * 50, "found"),
    "zeros": ("a.txt", b"\0" * 1000, "found"),
    "words": ("a.txt", b"hello\n", "1 lines with a wrong number of columns"),
    "one long line": ("a.txt", b"x" * (20 << 20), "found"),
    "commas": ("a.txt", LINE.replace("\t", ",").encode(), "with a wrong number of columns"),
    "half a line": ("a.txt", LINE[:30].encode(), "with a wrong number of columns"),
    "no label": ("a.txt", LINE[2:].encode(), "without a label column"),
    "label 7": ("a.txt", b"7" + LINE[1:].encode(), "with a bad label"),
    "label nan": ("a.txt", b"nan" + LINE[1:].encode(), "with a bad label"),
    "counts of 3.7": ("a.txt", LINE.replace("\t3", "\t3.7").encode(), "with a bad integer"),
    "counts of 30 digits": ("a.txt", LINE.replace("\t3", "\t" + "9" * 30).encode(), "bad integer"),
    "tokens of text": ("a.txt", LINE.replace("0a1b2c3d", "token").encode(), "with a bad token"),
    "utf-16": ("a.txt", LINE.encode("utf-16"), "found"),
    "byte order mark": ("a.txt", b"\xef\xbb\xbf7" + LINE[1:].encode(), "with a bad label"),
    "gzip without its ending": ("a.txt", GZIP, "found"),
    "zip": ("a.zip", b"PK\x03\x04" + b"a" * 100, "found"),
    "gzip cut": ("a.gz", GZIP[: len(GZIP) // 2], "name its compression"),
    "gzip cut at its end": ("a.gz", GZIP[:-4], "name its compression"),
    "gzip of nothing": ("a.gz", gzip.compress(b""), "found"),
    "gzip changed": ("a.gz", GZIP[:40] + b"\0\0\0\0" + GZIP[44:], "name its compression"),
    "no gzip": ("a.gz", LINE.encode(), "name its compression"),
    "zstd cut": ("a.zst", ZSTD[: len(ZSTD) // 2], "name its compression"),
    "zstd cut at its end": ("a.zst", ZSTD[:-1], "name its compression"),
    "no zstd": ("a.zst", LINE.encode(), "name its compression"),
    "bz2 cut": ("a.bz2", BZ2[: len(BZ2) // 2], "name its compression"),
    "no bz2": ("a.bz2", LINE.encode(), "name its compression"),
    "lz4 cut": ("a.lz4", LZ4[: len(LZ4) // 2], "name its compression"),
    "no lz4": ("a.lz4", LINE.encode(), "name its compression"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_file_that_is_not_criteos_is_one_line(name: str, tmp_path: Path) -> None:
    file_name, content, words = TEXTS[name]
    source = tmp_path / file_name
    source.write_bytes(content)
    argv = ["prepare", "criteo", str(source), "--output", str(tmp_path / "out"), "--num-rows", "10"]
    ends_in_one_line(argv, words)
    assert not list(tmp_path.rglob("examples.npy*"))  # nothing is left that is half written


SIZES = (
    "0",
    "1",
    "-5",
    "x",
    "",
    "1.5",
    "nan",
    "10,10",
    "9" * 5000,
    str(2**31 + 1),
    "table4",
    "10,",
)


@pytest.mark.parametrize("num_rows", SIZES, ids=lambda size: size[:12])
def test_table_sizes_that_make_no_sense_are_one_line(num_rows: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(LINE)
    argv = ["prepare", "criteo", str(tmp_path / "a.txt"), "--output", str(tmp_path / "out")]
    ends_in_one_line([*argv, f"--num-rows={num_rows}"], "found")


def test_paths_that_make_no_sense_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(LINE)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.gz").write_text(LINE)
    os.mkfifo(tmp_path / "pipe")
    good, out = str(tmp_path / "a.txt"), ["--output", str(tmp_path / "o"), "--num-rows", "10"]
    for source in (tmp_path, tmp_path / "pipe", "a\0b", "a" * 5000, tmp_path / "none"):
        ends_in_one_line(["prepare", "criteo", str(source), *out], "found")
    for output in ("", "a\0b", "o" * 5000, good):
        ends_in_one_line(["prepare", "criteo", good, f"--output={output}", *out[2:]], "found")
    for again in (good, str(tmp_path / "folder" / "a.gz")):
        ends_in_one_line(["prepare", "criteo", good, again, *out], "written to one directory")


def test_no_line_of_a_file_is_in_a_message(tmp_path: Path) -> None:
    secret = "name-of-a-patient"
    for name, text in (("a.txt", f"{secret}\n"), ("b.txt", f"{secret}\t" * 39 + secret + "\n")):
        (tmp_path / name).write_text(text)
        argv = ["prepare", "criteo", str(tmp_path / name), "--output", str(tmp_path / "out")]
        code, said = run_main([*argv, "--num-rows", "10"])
        assert isinstance(code, str)
        assert secret not in code + said


# ---- prepared arrays -----------------------------------------------------------------------------

WHOLE = as_npy(examples())

ARRAYS: dict[str, tuple[bytes | None, str]] = {
    "missing": (None, "no examples.npy that can be read"),
    "empty": (b"", "no examples.npy that can be read"),
    "cut": (WHOLE[:-100], "no examples.npy that can be read"),
    "cut in its header": (WHOLE[:30], "no examples.npy that can be read"),
    "longer than its header says": (WHOLE + b"more", "no examples.npy that can be read"),
    "words": (b"no array", "no examples.npy that can be read"),
    "a pickle": (b"\x80\x04]\x94.", "no examples.npy that can be read"),
    "an archive": (as_npz(a=examples()), "no examples.npy that can be read"),
    "a version to come": (WHOLE[:6] + b"\x09" + WHOLE[7:], "no examples.npy that can be read"),
    "more rows than it has": (WHOLE.replace(b"(8, 40)", b"(9, 40)"), "no examples.npy"),
    "fewer than no rows": (WHOLE.replace(b"(8, 40)", b"(-8,40)"), "no examples.npy"),
    "object": (as_npy(examples().astype(object)), "no examples.npy that can be read"),
    "float": (as_npy(examples(dtype=np.float32)), "found float32 of shape (8, 40)"),
    "ids of 3.7": (as_npy(examples(20, 3.7, np.float64)), "found float64"),
    "nan": (as_npy(examples(20, NAN, np.float32)), "found float32"),
    "text": (as_npy(examples().astype(str)), "and no integers in 40 columns"),
    "bool": (as_npy(examples(dtype=bool)), "found bool"),
    "complex": (as_npy(examples(dtype=complex)), "found complex128"),
    "dates": (as_npy(np.zeros((8, 40), "M8[s]")), "found datetime64"),
    "records": (as_npy(np.zeros(8, [("a", "i4")])), "and no integers in 40 columns"),
    "one dimension": (as_npy(examples()[0]), "of shape (40,)"),
    "three dimensions": (as_npy(examples()[None]), "of shape (1, 8, 40)"),
    "a number": (as_npy(np.array(3)), "of shape ()"),
    "39 columns": (as_npy(examples()[:, :39].copy()), "of shape (8, 39)"),
    "41 columns": (as_npy(np.ones((8, 41), np.int32)), "of shape (8, 41)"),
    "no rows": (as_npy(examples()[:0]), "Name larger parts"),
    "labels of 7": (as_npy(examples(0, 7)), "from 0 to 1 in column 0 (label)"),
    "labels of -1": (as_npy(examples(0, -1)), "from 0 to 1 in column 0 (label)"),
    "ids beyond the table": (as_npy(examples(20, 10)), "from 0 to 9 in column 20 (id 7)"),
    "ids below zero": (as_npy(examples(39, -1)), "in column 39 (id 26)"),
    "ids that wrap around": (as_npy(examples(20, 2**32 + 1, np.int64)), "in column 20"),
    "counts that wrap around": (as_npy(examples(5, 2**40, np.int64)), "in column 5 (count 5)"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_that_was_not_prepared_is_refused(name: str, tmp_path: Path) -> None:
    array, words = ARRAYS[name]
    refused(lambda: read_prepared(tmp_path, array, json.dumps(META).encode()), words)


METAS: dict[str, Any] = {
    "no numbers of rows": {},
    "a list": [],
    "25 of them": {"num_rows": [10] * 25},
    "27 of them": {"num_rows": [10] * 27},
    "text": {"num_rows": ["10"] * 26},
    "one text": {"num_rows": "10" * 13},
    "floats": {"num_rows": [10.0] * 26},
    "zero": {"num_rows": [0] * 26},
    "one": {"num_rows": [1] * 26},
    "negative": {"num_rows": [-1] * 26},
    "flags": {"num_rows": [True] * 26},
    "none": {"num_rows": None},
    "one number": {"num_rows": 10},
    "lists": {"num_rows": [[10]] * 26},
    "objects": {"num_rows": {"a": 1}},
    "huge": {"num_rows": [HUGE] * 26},
    "nan": {"num_rows": [NAN] * 26},
    "of another array": META | {"examples": 5},
    "a number in words": META | {"examples": "eight"},
}
RAW_METAS = {
    "empty": b"",
    "bytes": b"\xff\xfe\0",
    "cut": b'{"num_rows": [1,',
    "deep": b"[" * 100_000,
    "many digits": b'{"num_rows": [' + b"9" * 5000 + b"]}",
    "missing": None,
}


@pytest.mark.parametrize("name", [*METAS, *RAW_METAS])
def test_numbers_of_rows_that_make_no_sense_are_refused(name: str, tmp_path: Path) -> None:
    meta = RAW_METAS[name] if name in RAW_METAS else json.dumps(METAS[name]).encode()
    refused(lambda: read_prepared(tmp_path, WHOLE, meta), "lightning-dpsparse prepare criteo")


def test_whole_numbers_of_any_width_are_read(tmp_path: Path) -> None:
    for width in (np.int64, np.uint8, ">i4", np.int32):
        content = as_npy(examples(5, 7, width))
        assert len(read_prepared(tmp_path, content, json.dumps(META).encode())) == 8


# ---- MovieLens -----------------------------------------------------------------------------------

RATINGS = {
    "empty": "",
    "no header": RATING,
    "only words": HEADER + "a,b,c,d\n",
    "three columns": HEADER + "1,2,3\n",
    "a user of -1": HEADER + "-1,2,3,4\n",
    "a user of 1.5": HEADER + "1.5,2,3,100\n",
    "a user of 11 digits": HEADER + "99999999999,2,3,100\n",
    "a movie that is not there": HEADER + "1,9,3,100\n",
    "no movie": HEADER + "1,,3,100\n",
    "stars of nan": HEADER + "1,2,nan,100\n",
    "stars of inf": HEADER + "1,2,inf,100\n",
    "stars of 1e400": HEADER + "1,2,1e400,100\n",
    "stars below zero": HEADER + "1,2,-3,100\n",
    "a time below zero": HEADER + "1,2,3,-100\n",
    "a time of 30 digits": HEADER + f"1,2,3,{'9' * 30}\n",
    "a blank line": HEADER + RATING + "\n" + RATING,
    "cut": HEADER + RATING + "1,2",
    "quotes": HEADER + '"1",2,3,100\n',
    "zeros": HEADER + "\0\0\n",
    "one column twice": "userId,userId,rating,timestamp\n" + RATING,
}
CATALOGUES = {
    "empty": "",
    "only a header": "movieId,title,genres\n",
    "one movie twice": "movieId,t\n1,a\n1,b\n",
    "words": "movieId,t\nx,a\n",
    "a movie of -1": "movieId,t\n-1,a\n2,b\n",
    "30 digits": f"movieId,t\n{'9' * 30},a\n2,b\n",
    "5000 digits": f"movieId,t\n{'9' * 5000},a\n2,b\n",
    "digits of another kind": "movieId,t\n²,a\n2,b\n",
    "a blank line": "movieId,t\n1,a\n\n2,b\n",
}


@pytest.mark.parametrize("name", RATINGS)
def test_ratings_that_are_none_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "ratings.csv").write_text(RATINGS[name])
    (tmp_path / "movies.csv").write_text(MOVIES)
    refused(lambda: read_ratings(tmp_path), "ratings.csv")


@pytest.mark.parametrize("name", CATALOGUES)
def test_a_catalogue_that_is_none_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "ratings.csv").write_text(HEADER + RATING)
    (tmp_path / "movies.csv").write_text(CATALOGUES[name])
    refused(lambda: read_ratings(tmp_path), "movies.csv")


@pytest.mark.parametrize("num_items", [0, -1, 1.5, "2", NAN, True, HUGE, [2], 1, None])
def test_a_number_of_movies_that_makes_no_sense_is_refused(num_items: Any, tmp_path: Path) -> None:
    (tmp_path / "ratings.csv").write_text(HEADER + RATING)
    refused(lambda: read_ratings(tmp_path, num_items), "num_items")


def test_folders_without_movielens_are_refused(tmp_path: Path) -> None:
    (tmp_path / "ratings.csv").mkdir()
    for folder in (tmp_path, tmp_path / "none", Path("a" * 5000), Path("a\0b")):
        refused(lambda folder=folder: read_ratings(folder), "grouplens.org")


# ---- frequencies and negatives -------------------------------------------------------------------

ONES, THREE = np.ones(4), np.ones(3)
COUNTS: dict[str, bytes] = {
    "a table is missing": as_npz(t=ONES),
    "too many": as_npz(t=np.ones(5), u=THREE),
    "two dimensions": as_npz(t=np.ones((4, 1)), u=THREE),
    "nan": as_npz(t=np.array([1, NAN, 1, 1]), u=THREE),
    "inf": as_npz(t=np.array([1, INF, 1, 1]), u=THREE),
    "text": as_npz(t=np.array(list("abcd")), u=THREE),
    "digits in text": as_npz(t=np.array(list("1234")), u=THREE),
    "objects": as_npz(t=np.array([1, 2, 3, None], object), u=THREE),
    "complex": as_npz(t=ONES * 1j, u=THREE),
    "dates": as_npz(t=np.zeros(4, "M8[s]"), u=THREE),
    "records": as_npz(t=np.zeros(4, [("a", "i4")]), u=THREE),
    "empty": b"",
    "words": b"no archive",
    "cut": as_npz(t=ONES, u=THREE)[:200],
    "one array": as_npy(ONES),
    "a pickle": b"\x80\x04]\x94.",
    "changed": as_npz(t=ONES, u=THREE).replace(b"\xf0?", b"\xf1?", 1),
}


@pytest.mark.parametrize("name", COUNTS)
def test_public_frequencies_that_are_none_are_refused(name: str, tmp_path: Path) -> None:
    refused(lambda: read_frequencies(tmp_path / "counts.npz", COUNTS[name]), "counts.npz")


WEIGHTS: dict[str, tuple[str, bytes]] = {
    "nan": ("w.npy", as_npy(np.array([1, NAN, 1, 1]))),
    "negative": ("w.npy", as_npy(-ONES)),
    "zero": ("w.npy", as_npy(np.array([0.0, 1, 1, 1]))),
    "rounded to zero": ("w.npy", as_npy(np.array([5e-324, 1e10, 1, 1]))),
    "a sum beyond float64": ("w.npy", as_npy(np.full(4, 1e308))),
    "text": ("w.npy", as_npy(np.array(list("abcd")))),
    "objects": ("w.npy", as_npy(np.array([1, 2, 3, None], object))),
    "complex": ("w.npy", as_npy(ONES * 1j)),
    "dates": ("w.npy", as_npy(np.ones(4, "M8[s]"))),
    "two dimensions": ("w.npy", as_npy(np.ones((4, 1)))),
    "too many": ("w.npy", as_npy(np.ones(5))),
    "a number": ("w.npy", as_npy(np.array(3.0))),
    "records": ("w.npy", as_npy(np.zeros(4, [("a", "i4")]))),
    "cut": ("w.npy", as_npy(ONES)[:50]),
    "an archive called .npy": ("w.npy", as_npz(item=ONES)),
    "an array called .npz": ("w.npz", as_npy(ONES)),
    "an archive without item": ("w.npz", as_npz(x=ONES)),
    "an archive that is cut": ("w.npz", as_npz(item=ONES)[:100]),
    "text in an archive": ("w.npz", as_npz(item=np.array(list("abcd")))),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_of_negatives_that_are_none_are_refused(name: str, tmp_path: Path) -> None:
    file_name, content = WEIGHTS[name]
    path = tmp_path / file_name
    path.write_bytes(content)
    refused(lambda: TwoTowerModule(4, 8, [8], negatives=str(path)), file_name)

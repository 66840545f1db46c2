"""MovieLens' files: ratings in GroupLens' old and new formats, and the public catalogue.

The table of movies needs a row for each movie. If the rows were the movies that occur in the
ratings, the size of the table would tell who is in the data. Rows therefore come from the public
catalogue that GroupLens ships beside the ratings. `movielens.py` makes training examples of what is
read here.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv

from lightning_dpsparse.checks import check_whole
from lightning_dpsparse.files import is_readable_file
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sampling.units import Ints

# N ratings, R movies

_COLUMNS = ("userId", "movieId", "rating", "timestamp")
_TYPES = dict(zip(_COLUMNS, (pa.uint32(), pa.uint32(), pa.float32(), pa.int64())))
_HEADER = ",".join(_COLUMNS).encode()
_LINE = rb"\d{1,9}%s\d{1,9}%s\d+(\.\d+)?%s\d{1,18}"
_MOST_ITEMS = 2**31
_SEPARATOR = {".csv": b",", ".dat": b"::"}


class Ratings(NamedTuple):
    """Who watched which row of the catalogue and when, in the order of the file."""

    users_N: Ints
    rows_N: Ints
    times_N: Ints
    num_items: int  # number of movies in the catalogue


def read_ratings(path: Path, num_items: int | None = None) -> Ratings:
    """Read MovieLens 1M, 10M (`ratings.dat`), 20M or latest (`ratings.csv`), by folder or file.

    A movie's row is its place in the `movies.csv` or `movies.dat` beside the ratings. Without such
    a file movies are numbered 1 to `num_items`, and a movie's row is its number less one. The
    catalogue counts as public. Where a release lists only movies that somebody rated, as GroupLens
    does since 20M, that is an assumption: name it in the plan's taints.
    """
    check_num_items(num_items)
    file = _ratings_file(Path(path))
    users_N, movies_N, times_N = _read_columns(file)
    # Never the movies of the ratings themselves: a table with a row for whatever somebody watched
    # tells who was there before any noise is added.
    movies_R = _read_catalogue(file, num_items)
    by_number_R = np.argsort(movies_R)
    place_N = np.searchsorted(movies_R, movies_N, sorter=by_number_R)
    rows_N = by_number_R[np.minimum(place_N, movies_R.size - 1)]
    is_known_N = movies_R[rows_N] == movies_N
    if not is_known_N.all():
        line = int(np.argmin(is_known_N)) + (2 if file.suffix == ".csv" else 1)
        raise Refused(
            f"Expected movies of a catalogue of {movies_R.size:,} in {str(file)!r}, found another "
            f"in line {line}. Take the movies file of the same release, or raise num_items."
        )
    return Ratings(users_N, rows_N, times_N, movies_R.size)


def check_num_items(num_items: int | None) -> None:
    """Refuse what is no number of movies; None leaves it to the catalogue."""
    if num_items is not None:
        check_whole("num_items", num_items, most=_MOST_ITEMS, remedy="Or leave it out.")


def _ratings_file(path: Path) -> Path:
    for file in (path, path / "ratings.csv", path / "ratings.dat"):
        if file.suffix in _SEPARATOR and is_readable_file(file):
            return file
    raise Refused(
        f"Expected MovieLens at {str(path)!r}, a folder with ratings.csv and movies.csv (20M, "
        "latest) or ratings.dat and movies.dat (1M), found none that can be read. Get it from "
        "https://grouplens.org/datasets/movielens/ and unpack it."
    )


def _read_columns(file: Path) -> tuple[Ints, ...]:
    """The columns of users, movies and times."""
    source, table = str(file), None
    if file.suffix == ".dat":  # a comma separates nothing here, and :: does
        content = file.read_bytes().replace(b",", b"?").replace(_SEPARATOR[".dat"], b",")
        source = pa.BufferReader(_HEADER + b"\n" + content)
    with suppress(pa.ArrowInvalid):  # its message would quote a line of the data
        table = pyarrow.csv.read_csv(
            source,
            # Rows count as lines do, so that an error can name one.
            parse_options=pyarrow.csv.ParseOptions(quote_char=False, ignore_empty_lines=False),
            convert_options=pyarrow.csv.ConvertOptions(column_types=_TYPES, null_values=[]),
        )
    if not table or not _are_ratings(table):
        line = _malformed_line(file)
        found = "none" if line is None else f"something else in line {line}"
        raise Refused(
            f"Expected ratings as columns {', '.join(_COLUMNS)} in {str(file)!r}, with a header if "
            f"its name ends in .csv, found {found}. Unpack the release again."
        )
    return tuple(table[i].to_numpy().astype(np.int64) for i in (0, 1, 3))


def _are_ratings(table: pa.Table) -> bool:
    """Whether the columns are those of ratings, with stars and times that one may have."""
    try:
        if tuple(table.column_names) != _COLUMNS:
            return False
    except UnicodeDecodeError:  # a name may be any bytes
        return False
    stars, times = table[2].to_numpy(), table[3].to_numpy()
    return bool((np.isfinite(stars) & (stars >= 0) & (times >= 0)).all())


def _malformed_line(file: Path) -> int | None:
    """Number of the first line that is no rating; None if there is no such line."""
    rating = _LINE.replace(b"%s", _SEPARATOR[file.suffix])
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            pattern = _HEADER if number == 1 and file.suffix == ".csv" else rating
            if not re.fullmatch(pattern, line.rstrip(b"\r\n")):
                return number
    return None


def _read_catalogue(ratings: Path, num_items: int | None) -> Ints:
    """The number of the movie of each row, from the public catalogue."""
    files = [ratings.with_name(f"movies{suffix}") for suffix in _SEPARATOR]
    file = next((file for file in files if is_readable_file(file)), None)
    if file is None:
        if num_items is None:
            raise Refused(
                f"Expected movies.csv or movies.dat beside {str(ratings)!r}, or num_items, found "
                f"none and {num_items}. Say, from public knowledge, how many movies there are."
            )
        return np.arange(1, num_items + 1)
    # As bytes: titles are Latin-1 in old releases, and only the first column matters.
    heads = [line.split(_SEPARATOR[file.suffix], 1)[0] for line in file.read_bytes().splitlines()]
    first = int(heads[:1] == [b"movieId"])
    for number, head in enumerate(heads[first:], start=first + 1):
        if not re.fullmatch(rb"\d{1,18}", head):
            raise Refused(
                f"Expected a movie's number at the beginning of line {number} of {str(file)!r}, "
                "found something else. Unpack the release again."
            )
    movies_R = np.array(heads[first:], dtype=np.int64)
    distinct = np.unique(movies_R).size
    if not 0 < distinct == movies_R.size == (num_items or distinct):
        raise Refused(
            f"Expected {num_items or 'some'} movies in {str(file)!r}, each once, found {distinct} "
            f"in {movies_R.size} lines. Unpack the release again, and leave num_items out."
        )
    return movies_R

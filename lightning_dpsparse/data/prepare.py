"""Criteo's tab-separated logs to arrays, once: `lightning-dpsparse prepare criteo`.

A line is a label, 13 integers and 26 categorical tokens of up to eight hexadecimal digits; every
field but the label may be empty. Parsing text is slow, so it is done once: the result is one row of
40 integers per example, which `criteo.py` maps into memory. Tokens are hashed into a given number
of rows by a fixed, public function, because a vocabulary that was counted from the data would leak
it. Malformed lines are left out, and counted by reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from numpy.typing import NDArray
from tqdm import tqdm

from lightning_dpsparse.checks import is_list, is_whole, shown
from lightning_dpsparse.data.criteo import (
    COLUMNS,
    EXAMPLES_FILE,
    META_FILE,
    MOST_ROWS,
    NUM_CATEGORICAL,
    NUM_COUNTS,
)
from lightning_dpsparse.files import is_readable_file
from lightning_dpsparse.hashing import mix, salt
from lightning_dpsparse.refused import Refused

_COMPRESSION = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}
_BLOCK_BYTES = 16 << 20

_HEX_DIGIT = np.full(256, 255, dtype=np.uint8)
_HEX_DIGIT[[ord(c) for c in "0123456789abcdef"]] = range(16)
_HEX_DIGIT[[ord(c) for c in "ABCDEF"]] = range(10, 16)


@dataclass(frozen=True)
class Prepared:
    """What was read from one file, and what was left out."""

    source: str
    num_rows: list[int]
    examples: int
    clicks: int
    malformed: dict[str, int]
    """Number of lines that were left out, by reason."""

    def summary(self) -> str:
        """One line for people."""
        left_out = ", ".join(f"{n:,} {reason}" for reason, n in self.malformed.items() if n)
        rate = self.clicks / self.examples
        return (
            f"{self.source}: {self.examples:,} examples, click rate {rate:.4f}; "
            f"lines left out: {left_out or 'none'}"
        )


def prepare_criteo(
    source: Path, output: Path, num_rows: Sequence[int], progress: bool = True
) -> Prepared:
    """Write `output`/examples.npy (one row of 40 integers per example) and `output`/meta.json."""
    is_sizes = is_list(num_rows) and all(is_whole(n) and 2 <= n <= MOST_ROWS for n in num_rows)
    if not is_sizes or len(num_rows) != NUM_CATEGORICAL:
        raise Refused(
            f"Expected {NUM_CATEGORICAL} table sizes of at least 2 rows (row 0 stands for a "
            f"missing value) and at most {MOST_ROWS:,}, found {shown(num_rows)}. Give one number "
            "for all, or one for each."
        )
    if not is_readable_file(source):
        raise Refused(
            f"Expected a Criteo file at {str(source)!r}, found none that can be read. Check the "
            "path and its permissions."
        )
    if source.stat().st_size == 0:
        raise Refused(
            f"Expected a Criteo file, found {str(source)!r} empty. Download or unpack it again."
        )
    # An interrupted run leaves no result that is half written.
    partial = output / f"{EXAMPLES_FILE}.partial"
    try:
        output.mkdir(parents=True, exist_ok=True)
        partial.touch()
    except (OSError, ValueError) as error:
        raise Refused(
            f"Expected a directory to write to at {str(output)!r}, found that it cannot be made or "
            f"written to ({getattr(error, 'strerror', 'no path')}). Name another one."
        ) from error
    malformed = {"with a wrong number of columns": 0, "with a bad label": 0}
    malformed |= {"with a bad integer": 0, "with a bad token": 0}
    examples = clicks = 0
    try:
        with partial.open("wb") as file:
            _write_header(file, 0)
            for columns in _blocks(source, malformed, progress):
                rows = _parse(columns, num_rows, malformed)
                file.write(rows.tobytes())
                examples += len(rows)
                clicks += int(rows[:, 0].sum())
            file.seek(0)
            _write_header(file, examples)
        if not examples:
            raise Refused(_nothing_valid(source, malformed))
        prepared = Prepared(source.name, list(num_rows), examples, clicks, malformed)
        (output / META_FILE).write_text(json.dumps(asdict(prepared), indent=2) + "\n")
        partial.rename(output / EXAMPLES_FILE)
    finally:
        partial.unlink(missing_ok=True)
    return prepared


def _write_header(file: object, examples: int) -> None:
    """Write an .npy header. numpy pads it, so that the number of rows can be filled in later."""
    np.lib.format.write_array_header_1_0(
        file,  # type: ignore[arg-type]
        {"descr": "<i4", "fortran_order": False, "shape": (examples, COLUMNS)},
    )


def _blocks(source: Path, malformed: dict[str, int], progress: bool) -> Iterator[list[pa.Array]]:
    """The columns of the file as bytes, some tens of thousands of lines at a time."""

    widths: set[int] = set()

    def wrong_width(row: pyarrow.csv.InvalidRow) -> str:
        malformed["with a wrong number of columns"] += 1
        widths.add(row.actual_columns)
        return "skip"

    names = [str(i) for i in range(COLUMNS)]
    with (
        source.open("rb") as raw,
        tqdm(
            total=source.stat().st_size,
            unit="B",
            unit_scale=True,
            desc=source.name,
            disable=not progress,
        ) as bar,
    ):
        stream = pa.PythonFile(raw, mode="r")
        if source.suffix in _COMPRESSION:
            stream = pa.CompressedInputStream(stream, _COMPRESSION[source.suffix])
        try:
            reader = pyarrow.csv.open_csv(
                stream,
                read_options=pyarrow.csv.ReadOptions(
                    column_names=names,
                    block_size=_BLOCK_BYTES,
                    encoding="latin1",  # any byte may stand in a malformed line
                ),
                parse_options=pyarrow.csv.ParseOptions(
                    delimiter="\t", quote_char=False, invalid_row_handler=wrong_width
                ),
                convert_options=pyarrow.csv.ConvertOptions(
                    column_types={name: pa.binary() for name in names},
                    null_values=[""],
                    strings_can_be_null=True,
                ),
            )
            for batch in reader:
                bar.update(raw.tell() - bar.n)
                yield batch.columns
        except (pa.ArrowInvalid, OSError, EOFError) as error:
            # What Arrow says of a text may quote it; of a compressed file it says what is wrong.
            why = f" ({str(error).splitlines()[0]})" if isinstance(error, OSError) else ""
            raise Refused(
                f"Expected {COLUMNS} tab-separated columns in {str(source)!r}, found something "
                f"else{why}. Is it a whole Criteo file, and does its ending name its compression?"
            ) from error
    if widths == {COLUMNS - 1}:
        malformed["without a label column"] = malformed.pop("with a wrong number of columns")


def _nothing_valid(source: Path, malformed: dict[str, int]) -> str:
    found = ", ".join(f"{n:,} lines {reason}" for reason, n in malformed.items() if n) or "no line"
    return (
        f"Expected lines of {COLUMNS} tab-separated columns (label, 13 integers, 26 tokens) in "
        f"{str(source)!r}, found {found}. Criteo's test files have no label: use the training file."
    )


def _parse(
    columns: list[pa.Array], num_rows: Sequence[int], malformed: dict[str, int]
) -> NDArray[np.int32]:
    """Rows of integers of the lines that are well formed. One bad field leaves its line out."""
    rows = np.empty((len(columns[0]), COLUMNS), dtype="<i4")
    label, good_label = _parse_label(columns[0])
    rows[:, 0] = label
    good_counts = np.ones(len(rows), dtype=bool)
    for i in range(1, 1 + NUM_COUNTS):
        rows[:, i], good = _parse_integers(columns[i])
        good_counts &= good
    good_tokens = np.ones(len(rows), dtype=bool)
    for feature in range(NUM_CATEGORICAL):
        tokens, present, good = _parse_tokens(columns[1 + NUM_COUNTS + feature])
        good_tokens &= good
        rows[:, 1 + NUM_COUNTS + feature] = _hash_tokens(
            tokens, present, feature, num_rows[feature]
        )
    malformed["with a bad label"] += int((~good_label).sum())
    malformed["with a bad integer"] += int((good_label & ~good_counts).sum())
    malformed["with a bad token"] += int((good_label & good_counts & ~good_tokens).sum())
    return rows[good_label & good_counts & good_tokens]


def _parse_label(column: pa.Array) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    clicked = pc.fill_null(pc.equal(column, b"1"), False).to_numpy(zero_copy_only=False)
    passed = pc.fill_null(pc.equal(column, b"0"), False).to_numpy(zero_copy_only=False)
    return clicked.astype(np.int32), clicked | passed


def _parse_integers(column: pa.Array) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Integers, clipped to 32 bits, and which lines are well formed. A missing one counts as 0."""
    text = column.cast(pa.string(), safe=False)
    is_integer = pc.fill_null(pc.match_substring_regex(text, r"^-?[0-9]{1,18}$"), True)
    text = pc.if_else(is_integer, text, None)
    values = pc.fill_null(pc.cast(text, pa.int64()), 0).to_numpy(zero_copy_only=False)
    limit = np.iinfo(np.int32).max
    return values.clip(-limit, limit).astype(np.int32), is_integer.to_numpy(zero_copy_only=False)


def _parse_tokens(
    column: pa.Array,
) -> tuple[NDArray[np.uint64], NDArray[np.bool_], NDArray[np.bool_]]:
    """Hexadecimal tokens as numbers, which are present, and which lines are well formed."""
    present = column.is_valid().to_numpy(zero_copy_only=False)
    length = pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)
    good = length <= 8
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset :][: len(column) + 1]
    data = column.buffers()[2] or bytes(1)  # none, or of no bytes, if all tokens are missing
    digits = _HEX_DIGIT[np.frombuffer(data, np.uint8)]
    value = np.zeros(len(column), dtype=np.uint64)
    for place in range(8):
        here = place < length
        digit = digits[np.where(here, offsets[:-1] + place, 0)]
        good &= ~here | (digit < 16)
        value = np.where(here, (value << np.uint64(4)) | digit, value)
    return value, present, good


def _hash_tokens(
    tokens: NDArray[np.uint64], present: NDArray[np.bool_], feature: int, num_rows: int
) -> NDArray[np.int32]:
    """The row of each token: row 0 for a missing one, and another by a public hash otherwise."""
    row = mix(tokens ^ salt(feature)) % np.uint64(num_rows - 1) + np.uint64(1)
    return np.where(present, row, 0).astype(np.int32)

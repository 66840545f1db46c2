"""Prepared Criteo files as memory-mapped data sets.

Criteo's logs are too large for memory. `prepare.py` turned each file once into an array on disk
with one row of 40 integers per example; here the arrays are mapped, and examples are read from them
at random. A `Part` names a stretch of one such array, and `CriteoData` trains, validates and tests
on lists of parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lightning_dpsparse.checks import check_path, check_share, is_list, is_whole, shown
from lightning_dpsparse.data.batch import ClickData, ClickDataset, Clicks
from lightning_dpsparse.files import is_readable_file, read_json, read_npy
from lightning_dpsparse.refused import Refused

# B examples, F categorical features, C count features

NUM_COUNTS, NUM_CATEGORICAL = 13, 26
COLUMNS = 1 + NUM_COUNTS + NUM_CATEGORICAL
MOST_ROWS = 2**31
"""Most rows of a feature: ids are stored in 32 bits."""
_INT32 = np.iinfo(np.int32)
_BLOCK_ROWS, _MOST_BLOCKS = 1 << 16, 64
EXAMPLES_FILE, META_FILE = "examples.npy", "meta.json"


@dataclass(frozen=True, kw_only=True)
class Part:
    """A stretch of one prepared file."""

    path: str
    """Directory that `prepare criteo` wrote."""

    start: float = 0.0
    """Where the stretch begins, as a fraction of the file. Files are in order of time."""

    stop: float = 1.0
    """Where the stretch ends, as a fraction of the file."""

    def __post_init__(self) -> None:
        check_path("path", self.path, remedy="Name a directory that `prepare criteo` wrote.")
        check_share("start", self.start)
        check_share("stop", self.stop)
        if not self.start < self.stop:
            raise Refused(
                f"Expected 0 <= start < stop <= 1 for {self.path!r}, found {self.start} and "
                f"{self.stop}. Raise stop, or lower start."
            )


class PreparedCriteo(ClickDataset):
    """The examples of several parts, one part after the other.

    A row is 40 integers side by side (label, 13 counts, 26 ids), so that reading an example at
    random touches one page of the file.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        _check_parts("parts", parts)
        if not parts:
            raise Refused("Expected at least one part to read, found none. Name one.")
        self.num_rows = _common_num_rows(parts)
        self._paths = [Path(part.path) / EXAMPLES_FILE for part in parts]
        self._arrays: list[NDArray[np.int32]] | None = None
        arrays = [_open(path) for path in self._paths]
        sizes = [array.shape[0] for array in arrays]
        self._starts = [int(part.start * size) for part, size in zip(parts, sizes)]
        stops = [int(part.stop * size) for part, size in zip(parts, sizes)]
        self._ends = np.cumsum([stop - start for start, stop in zip(self._starts, stops)])
        if not self._ends[-1]:
            raise Refused(
                f"Expected examples in {[p.path for p in parts]}, found none. Name larger parts."
            )
        for path, array, first, stop in zip(self._paths, arrays, self._starts, stops):
            for block in _spread_blocks(first, stop):
                self._check_values(array[block], path)

    @override
    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def day_starts(self) -> list[int]:
        """Index of the first example of each part. Criteo's 1TB logs have one file a day."""
        return [0, *self._ends[:-1].tolist()]

    @override
    def __getitems__(self, indices: Sequence[int]) -> Clicks:
        rows = self._rows(np.asarray(indices, dtype=np.int64))
        return Clicks(
            labels_B=rows[:, 0].astype(np.float32),
            counts_BC=rows[:, 1 : 1 + NUM_COUNTS].astype(np.float32),
            lengths_FB=np.ones((NUM_CATEGORICAL, len(rows)), dtype=np.int64),
            ids_L=rows[:, 1 + NUM_COUNTS :].T.astype(np.int64).reshape(-1),
        )

    def _rows(self, index_B: NDArray[np.int64]) -> NDArray[np.int32]:
        # The process that reads opens the files itself: a pickled map would be a copy.
        if self._arrays is None:
            self._arrays = [_open(path) for path in self._paths]
        rows = np.empty((len(index_B), COLUMNS), dtype=np.int32)
        part_B = np.searchsorted(self._ends, index_B, side="right")
        for part in np.unique(part_B):
            here = part_B == part
            before = self._ends[part - 1] if part else 0
            found = self._arrays[part][index_B[here] - before + self._starts[part]]
            self._check_values(found, self._paths[part])
            rows[here] = found
        return rows

    def _check_values(self, rows: NDArray[Any], path: Path) -> None:
        """Refuse labels, counts and ids that `prepare criteo` does not write. None is shown."""
        largest = [1, *[_INT32.max] * NUM_COUNTS, *(rows - 1 for rows in self.num_rows)]
        least = [0, *[_INT32.min] * NUM_COUNTS, *[0] * NUM_CATEGORICAL]
        if not len(rows):
            return
        is_bad_C = (rows.max(0) > np.array(largest)) | (rows.min(0) < np.array(least))
        if is_bad_C.any():
            column = int(np.argmax(is_bad_C))
            raise Refused(
                f"Expected numbers from {least[column]} to {largest[column]} in column {column} "
                f"({_column_name(column)}) of {str(path)!r}, found others. Make it again with: "
                "lightning-dpsparse prepare criteo FILE --output DIR"
            )

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_arrays": None}


def _open(path: Path) -> NDArray[Any]:
    try:
        array = read_npy(path, "prepared examples", is_mapped=True)
    except Refused as error:
        raise Refused(_not_prepared(path.parent, f"no {EXAMPLES_FILE} that can be read")) from error
    if array.dtype.kind not in "iu" or array.ndim != 2 or array.shape[1] != COLUMNS:
        found = f"{array.dtype} of shape {array.shape} in {EXAMPLES_FILE}"
        raise Refused(_not_prepared(path.parent, f"{found}, and no integers in {COLUMNS} columns,"))
    examples = _read_meta(path.parent).get("examples", array.shape[0])
    if examples != array.shape[0]:
        found = f"{array.shape[0]:,} examples where {META_FILE} says {shown(examples)}"
        raise Refused(_not_prepared(path.parent, found))
    return array


def _spread_blocks(first: int, stop: int) -> Iterator[slice]:
    """Blocks of rows to look at before training: all rows of a small file, and some of a large one.

    Of a large one, further rows are looked at when they are read.
    """
    count = min(_MOST_BLOCKS, -(-(stop - first) // _BLOCK_ROWS))
    for start in np.linspace(first, max(first, stop - _BLOCK_ROWS), count).astype(int).tolist():
        yield slice(start, min(start + _BLOCK_ROWS, stop))


def _column_name(column: int) -> str:
    if column == 0:
        return "label"
    return f"count {column}" if column <= NUM_COUNTS else f"id {column - NUM_COUNTS}"


def _not_prepared(folder: Path, found: str) -> str:
    return (
        f"Expected a prepared Criteo directory at {str(folder)!r}, found {found} in it. Make it "
        "with: lightning-dpsparse prepare criteo FILE --output DIR"
    )


def _read_meta(folder: Path) -> dict[str, Any]:
    if not is_readable_file(folder / META_FILE):
        raise Refused(_not_prepared(folder, f"no {META_FILE}"))
    try:
        meta = read_json(folder / META_FILE)
    except ValueError as error:
        raise Refused(_not_prepared(folder, f"a damaged {META_FILE}")) from error
    if not isinstance(meta, dict) or not is_list(meta.get("num_rows")):
        raise Refused(_not_prepared(folder, f"a damaged {META_FILE}"))
    return meta


def _read_num_rows(folder: Path) -> tuple[int, ...]:
    found = _read_meta(folder)["num_rows"]
    if len(found) != NUM_CATEGORICAL or not all(is_whole(n) and 2 <= n <= MOST_ROWS for n in found):
        raise Refused(
            _not_prepared(folder, f"other than {NUM_CATEGORICAL} numbers of rows in {META_FILE}")
        )
    return tuple(found)


def _common_num_rows(parts: Sequence[Part]) -> list[int]:
    found: dict[tuple[int, ...], str] = {}
    for part in parts:
        found[_read_num_rows(Path(part.path))] = part.path
    if len(found) > 1:
        raise Refused(
            f"Expected parts hashed into the same numbers of rows, found different ones in "
            f"{sorted(found.values())}. Prepare them with the same --num-rows."
        )
    return list(next(iter(found)))


def _check_parts(name: str, parts: Any) -> None:
    if not is_list(parts) or not all(isinstance(part, Part) for part in parts):
        raise Refused(
            f"Expected a list of Part in {name}, found {shown(parts)}. Write "
            "[{path: DIR}], with start and stop to take a part of it."
        )


class CriteoData(ClickData):
    """Criteo's display-advertising logs, prepared by `lightning-dpsparse prepare criteo`.

    Args:
        train: Parts to train on.
        val: Parts to validate on.
        test: Parts to test and predict on.
        batch_size: Examples per step, over all ranks.
        num_workers: Processes that read batches beside training.
    """

    def __init__(
        self,
        train: list[Part],
        val: list[Part],
        test: list[Part],
        batch_size: int = 2048,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, num_workers)
        self._parts = {"train_set": train, "val_set": val, "test_set": test}
        for name, parts in self._parts.items():
            _check_parts(name.removesuffix("_set"), parts)

    @override
    def setup(self, stage: str) -> None:
        needed = {
            "fit": ("train_set", "val_set"),
            "validate": ("val_set",),
            "test": ("test_set",),
            "predict": ("test_set",),
        }
        for name in needed[stage]:
            setattr(self, name, PreparedCriteo(self._parts[name]))

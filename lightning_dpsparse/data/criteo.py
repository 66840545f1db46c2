"""Prepared Criteo files as memory-mapped data sets.

Criteo's logs are too large for memory. `prepare.py` turned each file once into an array on disk
with one row of 40 integers per example; here the arrays are mapped, and examples are read from them
at random. A `Part` names a stretch of one such array, and `CriteoData` trains, validates and tests
on lists of parts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lightning_dpsparse.data.batch import ClickData, ClickDataset, Clicks
from lightning_dpsparse.refused import Refused

# B examples, F categorical features, C count features

NUM_COUNTS, NUM_CATEGORICAL = 13, 26
COLUMNS = 1 + NUM_COUNTS + NUM_CATEGORICAL
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


class PreparedCriteo(ClickDataset):
    """The examples of several parts, one part after the other.

    A row is 40 integers side by side (label, 13 counts, 26 ids), so that reading an example at
    random touches one page of the file.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        if not parts:
            raise Refused("Expected at least one part to read, found none.")
        self.num_rows = _common_num_rows(parts)
        self._paths = [Path(part.path) / EXAMPLES_FILE for part in parts]
        self._arrays: list[NDArray[np.int32]] | None = None
        sizes = [_open(path).shape[0] for path in self._paths]
        self._starts = [int(part.start * size) for part, size in zip(parts, sizes)]
        stops = [int(part.stop * size) for part, size in zip(parts, sizes)]
        self._ends = np.cumsum([stop - start for start, stop in zip(self._starts, stops)])
        if not self._ends[-1]:
            raise Refused(f"Expected examples in {[p.path for p in parts]}, found none.")

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
            rows[here] = self._arrays[part][index_B[here] - before + self._starts[part]]
        return rows

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_arrays": None}


def _open(path: Path) -> NDArray[np.int32]:
    try:
        array: NDArray[np.int32] = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise Refused(_not_prepared(path.parent, f"no {EXAMPLES_FILE} that can be read")) from error
    return array


def _not_prepared(folder: Path, found: str) -> str:
    return (
        f"Expected a prepared Criteo directory at {str(folder)!r}, found {found} in it. Make it "
        "with: lightning-dpsparse prepare criteo FILE --output DIR"
    )


def _read_num_rows(folder: Path) -> tuple[int, ...]:
    try:
        return tuple(json.loads((folder / META_FILE).read_text())["num_rows"])
    except FileNotFoundError:
        raise Refused(_not_prepared(folder, f"no {META_FILE}")) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refused(_not_prepared(folder, f"a damaged {META_FILE}")) from error


def _common_num_rows(parts: Sequence[Part]) -> list[int]:
    found: dict[tuple[int, ...], str] = {}
    for part in parts:
        if not 0.0 <= part.start < part.stop <= 1.0:
            raise Refused(
                f"Expected 0 <= start < stop <= 1 for {part.path!r}, found {part.start} and "
                f"{part.stop}."
            )
        found[_read_num_rows(Path(part.path))] = part.path
    if len(found) > 1:
        raise Refused(
            f"Expected parts hashed into the same numbers of rows, found different ones in "
            f"{sorted(found.values())}. Prepare them with the same --num-rows."
        )
    return list(next(iter(found)))


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

"""Plans of DP-AdaFEST and DP-FEST on ranks, and the comparison with their naive loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_dpsparse import AdaFEST, PublicFrequencies, Selection
from tests.support.naive_step import plan
from tests.support.plain_training import assert_close
from tests.support.row_choice import Expected
from tests.support.tiny_model import SEQUENCES, TABLES, paths

# Examples read 3 to 20 rows: those with fewer than four are not clipped. A row passes if about two
# examples read it, or one that reads few.
QUIET = plan(0.3, mechanism=AdaFEST(threshold=0.93, map_clip_norm=2.0))
# sigma1 C1 = 0.76: of the rows that nobody read, one in seven passes.
NOISY = plan(
    0.3,
    noise=0.12,
    mechanism=AdaFEST(threshold=0.8, map_clip_norm=2.0, noise_ratio=3.0),
    noise_source="row_keyed",
)


def singles(sizes: list[list[int]]) -> list[list[int]]:
    """Every example a unit of its own."""
    return [[1] * sum(step) for step in sizes]


def check(
    start: dict[str, Tensor], end: dict[str, Tensor], expected: Expected, tolerance: float
) -> None:
    """As it should be; and rows that never took part are as they were, to the last bit."""
    assert expected.read_and_left > 0, "nothing was left out: the test shows nothing"
    assert expected.read_and_kept > 0
    assert_close(end, expected.weights, tolerance)
    is_sequence = any(key.startswith("ec.") for key in end)
    for name, path in paths(SEQUENCES if is_sequence else ()).items():
        never = ~expected.ever_kept[name]
        for key in end:
            if key == path:
                assert torch.equal(end[key][never], start[key][never]), key
            elif key.startswith(f"{path}:"):  # the optimizer's state
                assert end[key][never].eq(0).all(), key


def public(folder: Path) -> tuple[Selection, dict[str, Tensor]]:
    """Twelve rows of each table, by counts from a file; and a mask of them."""
    generator = np.random.default_rng(0)
    counts = {name: generator.permutation(rows).astype(float) for name, rows, _, _ in TABLES}
    np.savez(folder / "counts.npz", **counts)
    selection = Selection(
        frequencies=PublicFrequencies(path=str(folder / "counts.npz")), rows_per_table=12
    )
    return selection, {n: torch.from_numpy(c >= len(c) - 12) for n, c in counts.items()}

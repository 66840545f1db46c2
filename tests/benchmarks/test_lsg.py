"""The LSG benchmark: what its cells are called, and what its verdict says."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import lsg
from lightning_dpsparse import LSG, RGP, DenseGaussian, SparseDPSGD


@pytest.mark.parametrize(
    ("rank", "sparsity", "name", "expected"),
    [
        ("full", 0.0, "dpsgd", DenseGaussian()),
        ("full", 0.3, "sparse", SparseDPSGD(0.3, layers=("a*",))),
        ("4", 0.0, "rgp", RGP(4, layers=("a*",))),
        ("4", 0.3, "lsg", LSG(4, 0.3, layers=("a*",))),
    ],
)
def test_cells_are_what_they_are_called(
    rank: str, sparsity: float, name: str, expected: Any
) -> None:
    assert lsg.kind(rank, sparsity) == name
    assert lsg.mechanism(rank, sparsity, ("a*",)) == expected


def cells(**scores: list[float]) -> list[lsg.Row]:
    settings = {
        "dpsgd": ("full", 0.0),
        "sparse": ("full", 0.3),
        "rgp": ("4", 0.0),
        "lsg": ("4", 0.3),
        "worse_lsg": ("4", 0.5),
    }
    return [
        {
            "task": "t",
            "rank": settings[name][0],
            "sparsity": settings[name][1],
            "seed": seed,
            "score": score,
        }
        for name, values in scores.items()
        for seed, score in enumerate(values)
    ]


def test_the_verdict_compares_the_best_cells_at_the_same_seed() -> None:
    rows = cells(
        dpsgd=[0.50, 0.70, 0.60],
        rgp=[0.52, 0.72, 0.62],  # seeds differ by far more than methods
        lsg=[0.53, 0.71, 0.62],
        worse_lsg=[0.1, 0.2, 0.1],
    )
    found = "\n".join(lsg.verdict(rows))
    assert "t: best lsg 0.6200" in found
    assert "t: rgp > dpsgd shows (+0.0200, error 0.0000)" in found
    assert "t: lsg > rgp does not show (+0.0000" in found
    assert "sparse" not in found


@pytest.mark.slow
def test_fine_tuning_learns_the_other_teacher() -> None:
    words = ["--examples=2000", "--batch=200", "--epochs=3", "--epsilon=50"]
    tuned = lsg.low_rank("4", 0.1, 0, lsg.parser().parse_args(words))
    x, labels = lsg.Teacher(0, head=2).draw(5_000)
    before = float((lsg.pretrained(0)(x).argmax(1) == labels).float().mean())
    assert tuned > before + 0.2

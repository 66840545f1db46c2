"""Which layers a dense mechanism works on, and settings that it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_dpsparse import LSG, RGP, SparseDPSGD
from lightning_dpsparse.engine.dense import DenseForms
from lightning_dpsparse.engine.ghost import DenseCapture
from lightning_dpsparse.noise.keys import RunKey
from lightning_dpsparse.noise.sources import FastNoise


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 9))
        self.image = nn.Conv2d(3, 4, 3)
        self.grouped = nn.Conv2d(4, 4, 3, groups=2)
        self.frozen = nn.Linear(9, 9).requires_grad_(False)
        self.top = nn.Linear(9, 1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["bottom.0", "bottom.2", "image"]),
        ({"exclude": ()}, ["bottom.0", "bottom.2", "image", "top"]),
        ({"layers": ("bottom.*",)}, ["bottom.0", "bottom.2"]),
        ({"layers": ["bottom.*", "image"], "exclude": ["*.0"]}, ["bottom.2", "image"]),
        ({"layers": "image"}, ["image"]),
    ],
)
def test_layers_are_chosen_by_name(given: dict[str, Any], expected: list[str]) -> None:
    assert list(RGP(1, **given).layers_of(Named())) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layers": ("bottm.*",)}, "named 'bottm.*', found"),
        ({"exclude": ("nothing",)}, "named 'nothing', found"),
        ({"layers": ("top",)}, "none but those that are excluded"),
    ],
)
def test_patterns_that_match_nothing_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("*", r"\*")):
        RGP(1, **given).layers_of(Named())


def test_weights_that_are_computed_are_left_as_they_are() -> None:
    model = nn.Sequential(weight_norm(nn.Linear(9, 9)), nn.Linear(9, 9), nn.Linear(9, 1))
    parameters = dict(model.named_parameters())
    forms = DenseForms(RGP(1), model, parameters).at(0, FastNoise(RunKey.fixed(0)))
    assert list(forms) == ["1.weight"]
    with pytest.raises(ValueError, match=r"named '0', found \['1', '2'\]"):
        RGP(1, layers="0").layers_of(model)


def test_a_weight_that_is_an_embedding_too_is_refused() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.out = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
            self.out.weight = self.rows.weight

    model = Tied()
    parameters = dict(model.named_parameters())
    capture = DenseCapture(parameters)
    forms = DenseForms(RGP(1, exclude=()), model, parameters)
    capture.set_forms(forms.at(0, FastNoise(RunKey.fixed(0))))
    with capture:
        loss = model.out(model.rows(torch.tensor([[0, 1], [2, 3]])).mean(1)).sum(1)
    loss.sum().backward()
    with pytest.raises(ValueError, match=r"nothing else, found .*embedding"):
        list(capture.square_norms(2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: RGP(0),
        lambda: LSG(2, sparsity=1.0),
        lambda: LSG(2, sparsity=-0.1),
        lambda: LSG(2, warmup=-1),
        lambda: SparseDPSGD(1.0),
        lambda: SparseDPSGD(0.1, warmup=-1),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="Expected"):
        make()

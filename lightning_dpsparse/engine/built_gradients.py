"""Gradients that are built, one for every example, where no compact form is known.

That takes as many numbers as a parameter has for every example, so it is done for some examples at
a time: at most `MOST_NUMBERS` numbers in float64, 32 MB, and a few copies of them. Terms that an
example adds up may cancel, in an order that depends on how long others are; in float64 the order
hardly matters.

Read next: `ghost.py`, which clips with these gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_dpsparse.engine.computed_parameters import Computed
from lightning_dpsparse.engine.norms import not_below_rounding
from lightning_dpsparse.engine.outer_products import position_norms
from lightning_dpsparse.engine.parameter_calls import (
    Normalised,
    Product,
    Rows,
    Use,
    beside,
    without,
)
from lightning_dpsparse.engine.parameter_slices import Slice
from lightning_dpsparse.refused import Refused

# B examples, b of them at a time, T positions or terms of an example, N numbers of a parameter

MOST_NUMBERS = 1 << 22
"""Most numbers of per-example gradients that are held at a time."""


@dataclass
class General(Use):
    """Any call that nothing is known of. torch.func runs it for one example at a time."""

    run: Callable[[Tensor, list[Tensor]], Tensor] | None = None
    """The operation as a function of the parameter and of its batched inputs."""
    parameter: Tensor | None = None
    inputs: tuple[Tensor, ...] = ()

    def drop(self, bad_B: Tensor) -> None:
        super().drop(bad_B)
        self.inputs = tuple(without(value, bad_B) for value in self.inputs)

    def first_dimensions(self) -> list[int]:
        return [len(value) if value.dim() else -1 for value in self.inputs] or [-1]

    def batched(self) -> list[Tensor]:
        return list(self.inputs)

    def inputs_of(self, rows: slice) -> dict[str, Any]:
        return {"inputs": tuple(value[rows] for value in self.inputs)}

    def per_example(self) -> Tensor:
        """Compute gradients (B, N), and check them against the batch's."""
        assert self.run is not None
        assert self.parameter is not None
        assert self.gradient is not None
        run = self.run
        parameter, gradient, *inputs = (
            value.double() if value.is_floating_point() else value
            for value in (self.parameter, self.gradient, *self.inputs)
        )

        def of_one(gradient: Tensor, *inputs: Tensor) -> Tensor:
            pull = torch.func.vjp(lambda p: run(p, [x[None] for x in inputs]), parameter)[1]
            result: Tensor = pull(gradient[None])[0]
            return result

        try:
            with _no_word_of_speed():
                each: Tensor = torch.func.vmap(of_one)(gradient, *inputs)
        except (RuntimeError, ValueError, IndexError) as error:
            raise Refused(self._message("cannot be run one example at a time")) from error
        # Gradients are scaled to one size, because the rounding error of a large one could look
        # like mixing of examples, or hide it.
        norms_B = torch.linalg.vector_norm(gradient.unsqueeze(-1).flatten(1), dim=1)
        size_B = norms_B.clamp_min(torch.finfo(norms_B.dtype).tiny)
        pull = torch.func.vjp(lambda p: run(p, inputs), parameter)[1]
        total = pull(_over(gradient, size_B))[0]
        expected = _over(each, size_B).sum(0)
        if not torch.allclose(expected, total, rtol=1e-3, atol=1e-5, equal_nan=True):
            raise Refused(self._message("mixes the examples of a batch"))
        return each.unsqueeze(-1).flatten(1)  # a parameter may be a single number

    def _message(self, fault: str) -> str:
        return (
            f"Expected operations that treat each example by itself, found {self.what!r}, which "
            f"{fault}. Use nn.Linear, LayerNorm or nn.Embedding."
        )


def at_a_time(
    numbers: int, num_examples: int, first_of_unit_B: Tensor | None = None
) -> Iterator[slice]:
    """Examples whose gradients on so many numbers may be built together. Units stay whole.

    At least two examples are taken where there are two, so that a call that mixes them shows.
    """
    most = max(2, MOST_NUMBERS // max(1, numbers))
    if num_examples <= most:
        yield slice(0, num_examples)
        return
    starts: list[int] = list(range(num_examples))
    if first_of_unit_B is not None:
        starts = torch.unique_consecutive(first_of_unit_B).tolist()
    first = 0
    for start, stop in pairwise([*starts, num_examples]):
        if stop - first > most and start > first:
            yield slice(first, start)
            first = start
    yield slice(first, num_examples)


Build = Callable[[slice], tuple[Tensor, list[Tensor]]]
"""Makes the gradients of some examples, (b, N) in float64, and the terms that each sums, (b, T, N).
Norms may stand for terms, (b, T, 1)."""


def built(uses: Sequence[tuple[str, Use]], parameter: Tensor) -> Build:
    """Build gradients on a parameter from all its uses."""

    def build(rows: slice) -> tuple[Tensor, list[Tensor]]:
        each = [_built(role, use.part(rows), parameter) for role, use in uses]
        total = sum(gradient.double() for gradient, _ in each)
        assert isinstance(total, Tensor)
        return total, [terms for _, terms in each]

    return build


def built_by_parts(
    parts: Sequence[tuple[Build, Slice | Computed | None]],
    name: str,
    parameters: Mapping[str, Tensor],
) -> Build:
    """Build gradients on a parameter that is read in parts, or in what is computed from it."""

    def build(rows: slice) -> tuple[Tensor, list[Tensor]]:
        each = [_pulled_back(one(rows)[0], part, name, parameters) for one, part in parts]
        return torch.stack(each).sum(0), [gradient[:, None] for gradient in each]

    return build


def built_square_norm(
    build: Build, numbers: int, num_examples: int, first_of_unit_B: Tensor | None, like: Tensor
) -> Tensor:
    """Compute the squared norms of the gradients of all examples, or of units, (B,)."""
    squares_B = like.new_zeros(num_examples)
    for rows in at_a_time(numbers, num_examples, first_of_unit_B) if num_examples else ():
        total_bN, terms = build(rows)
        first_b = None if first_of_unit_B is None else first_of_unit_B[rows] - rows.start
        if first_b is not None:
            total_bN = torch.zeros_like(total_bN).index_add_(0, first_b, total_bN)
        found_b, *terms_bT = (
            torch.linalg.vector_norm(value, dim=-1).double().square_()
            for value in (total_bN, *terms)
        )
        squares_B[rows] = not_below_rounding(found_b, torch.cat(terms_bT, 1), first_b).to(
            like.dtype
        )
    return squares_B


def built_sum(build: Build, factors_B: Tensor, out: Tensor, numbers: int | None = None) -> None:
    """Write sum_b f_b g_b into `out`. At most so many numbers are built for an example."""
    total_N = out.new_zeros(out.numel(), dtype=torch.float64)
    for rows in at_a_time(numbers or out.numel(), len(factors_B)) if len(factors_B) else ():
        total_N += factors_B[rows].double() @ build(rows)[0]
    out.copy_(total_N.view_as(out))


def _built(role: str, use: Use, parameter: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(use, General):
        each = use.per_example()
        return each, each[:, None]
    if isinstance(use, Rows):
        ids, g = use.pairs()
        each = g.new_zeros(ids.shape[0], *parameter.shape, dtype=torch.float64)
        examples = torch.arange(ids.shape[0], device=ids.device)[:, None].expand_as(ids)
        return each.index_put_((examples, ids), g.double(), accumulate=True).flatten(1), g
    if isinstance(use, Product) and role == "weight":
        a, g = use.positions()
        each = torch.einsum("bto,bti->boi", g.double(), a.double())
        return each.flatten(1), position_norms(a, g)[:, :, None]
    assert isinstance(use, (Product, Normalised))
    terms = use.gradients() if isinstance(use, Product) else use.terms(scale=role == "scale")
    return terms[:, 0] if terms.shape[1] == 1 else terms.sum(1, dtype=torch.float64), terms


def _pulled_back(
    each_bN: Tensor, part: Slice | Computed | None, name: str, parameters: Mapping[str, Tensor]
) -> Tensor:
    """Turn gradients on part of a parameter, or on something computed, into those on itself.

    Takes and gives one row for every example, in float64.
    """
    if part is None:
        return each_bN
    each = each_bN.view(len(each_bN), *part.value.shape)
    if isinstance(part, Slice):
        whole = each.new_zeros(len(each), *parameters[name].shape)
        index: tuple[Any, ...] = (slice(None), *part.index)
        whole[index] = each
        return whole.unsqueeze(-1).flatten(1)
    part.check_unchanged()
    doubled = {key: parameters[key].detach().double() for key in part.sources}
    value, pull, *_ = torch.func.vjp(lambda p: part.of(doubled | {name: p}), doubled[name])
    if not torch.allclose(value, part.value.double(), rtol=1e-4, atol=1e-6, equal_nan=True):
        raise Refused(
            f"Expected {part.what} to give the same result when it is computed again, found "
            "another one. Do not draw at random there."
        )
    try:
        with _no_word_of_speed():
            pulled: Tensor = torch.func.vmap(pull)(each)[0]
    except RuntimeError as error:
        raise Refused(
            f"Expected operations that torch.func.vmap knows between {name!r} and the layers that "
            f"read it, found {part.what}. Write it with others, or freeze the parameter."
        ) from error
    return pulled.unsqueeze(-1).flatten(1)


def _over(value: Tensor, size_B: Tensor) -> Tensor:
    return value / beside(size_B, value)


@contextmanager
def _no_word_of_speed() -> Iterator[None]:
    """torch.func.vmap warns of every operation that it runs example by example."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield

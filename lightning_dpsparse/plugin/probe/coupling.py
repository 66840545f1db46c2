"""The probe: does one example's loss depend on others?

A private step bounds what one example does to the sum by clipping *its* gradient. That is worth
nothing if the example also changes the gradients of others. No list of layers finds all the ways;
measurements on the code itself do. On some examples of a real batch:

1. The same examples again: the same losses. Else nothing can be measured.
2. Some replaced by others, or emptied: nobody else's loss, gradient or layer input changes. With a
   binary code for the examples, every ordered pair of them is looked at.
3. Some removed: the same.
4. The losses of some sent back: exact zeros at everybody else's lookups and layers, by the same
   code.
5. Another batch before this one: it leaves nothing behind that changes this one.

Dense weights are shaken meanwhile, since zeros would hide much. Nothing is released, logged or
kept; random generators and the module's plain attributes are put back.

It costs some eighty small passes and four of the batch's size. It runs before the first release,
after 10, 100, 1,000 and 10,000 steps, every 50,000 steps from then on, and whenever the operations
behind the losses change.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_dpsparse.plugin.deliveries import Delivery
from lightning_dpsparse.plugin.probe import findings
from lightning_dpsparse.plugin.probe.compare import disagreement, first_in, nonzero
from lightning_dpsparse.plugin.probe.repeatable import (
    Attributes,
    drawn_outside_torch,
    nothing_logged,
    same_draws,
    shaken,
)
from lightning_dpsparse.plugin.probe.sources import FromBatch, FromData, Source, are_alike, size_of
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.build import on_every_rank
from lightning_dpsparse.sharded.collections import sharded_collections
from lightning_dpsparse.sharded.examples import empty_examples
from lightning_dpsparse.sharded.observation import Observation, Seen
from lightning_dpsparse.sharded.private import PrivateSteps

# n examples that are looked at on this rank, W ranks

_FEW, _LEAST, _ALIKE = 32, 8, 8
_LOOSE = 10.0
"""Where shapes differ, so does the order in which kernels add up."""


def is_due(step: int) -> bool:
    """By a public rule, whatever the data.

    >>> [step for step in range(120_000) if is_due(step)]
    [0, 10, 100, 1000, 10000, 50000, 100000]
    """
    return step in (0, 10, 100, 1_000, 10_000) or step % 50_000 == 0


@dataclass(frozen=True)
class Reader:
    """How the loader reads examples of its data set."""

    read: Callable[[list[int]], Any]
    collate: Callable[[Any], Any]


class Probe:
    """Looks at the step that is under way, on all ranks together.

    Args:
        forward: The losses of a batch as the loader gave it: moved, and through training_step.
        delivery: The batch of the step.
        leaders: Positions of examples of which no two belong to one unit; None is all.
    """

    def __init__(
        self,
        module: LightningModule,
        trainer: Trainer,
        steps: PrivateSteps,
        forward: Callable[[Any], Tensor],
        delivery: Delivery,
        reader: Reader | None,
        leaders: Sequence[int] | None,
    ) -> None:
        self._module, self._trainer, self._steps = module, trainer, steps
        self._forward, self._delivery, self._reader = forward, delivery, reader
        self._seed = int.from_bytes(os.urandom(4), "big")
        self._size = size_of(delivery.batch, delivery.num_examples)
        self._coins = random.Random(self._seed)
        self._takes_empty = False
        self._seen_of_base: dict[bool, tuple[Observation, list[Seen]]] = {}
        """Of the batch that others are compared with, by whether draws were all alike."""
        everyone = list(range(self._size)) if leaders is None else list(leaders)
        step = max(1, len(everyone) // _FEW)
        self._chosen = everyone[::step][:_FEW]
        while self._chosen and len(self._chosen) < _LEAST:
            self._chosen = (self._chosen * _LEAST)[:_LEAST]

    def run(self) -> bool:
        """Raises if a rank found anything. Returns False if no rank has an example to look at."""
        sizes = on_every_rank(len(self._chosen))
        if not any(sizes):
            return False
        self._sizes = [int(size) for size in sizes]  # type: ignore[call-overload]
        found: str | None = None
        parameters = list(self._steps.parameters.trainable.values())
        tables = list(sharded_collections(self._module).values())
        self._attributes = Attributes(self._module, tables)
        try:
            with nothing_logged(self._module, self._trainer), shaken(parameters, self._seed):
                # All measurements are made on every rank, whatever is found: ranks stay in step.
                found = next(iter([finding for finding in self._look() if finding]), None)
        except (ValueError, RuntimeError, TypeError, IndexError, KeyError, AssertionError) as error:
            if type(error) is ValueError and str(error).startswith("Expected"):
                raise
            raise Refused(findings.failed(error)) from error
        finally:
            self._attributes.restore()
        told = next((message for message in on_every_rank(found) if message), None)
        if told is not None:
            raise Refused(str(told))
        return True

    # ---- the measurements -----------------------------------------------------------------------

    def _look(self) -> Iterator[str]:
        source = self._source()
        base = self._batch_of(source, self._chosen)
        first = self._observe(base)
        yield self._is_repeatable(first, self._observe(base))
        yield from self._codes(first)
        for number, drawn in enumerate(self._halves()):
            others = self._others(drawn)
            replaced = self._batch_of(source, [self._chosen[i] for i in others])
            how, again = "replaced by others", number > 0
            yield from self._compare(base, replaced, drawn, how, again=again)
        for position in self._chosen[:_ALIKE] + [0] * (_ALIKE - len(self._chosen[:_ALIKE])):
            yield from self._among_alike(source, position)
        yield self._is_seen(first, self._observe(replaced), base, drawn, others)
        if all(self._sizes):
            for drawn in self._halves()[:2]:
                yield from self._emptied(base, drawn)
        yield self._removed(source, base)
        yield self._memory(source, base)
        yield from self._at_full_size()

    def _source(self) -> Source:
        from_batch = FromBatch(self._delivery.batch, self._size)
        indices = self._delivery.indices
        if self._reader is None or not indices or not self._chosen:
            return from_batch
        from_data = FromData(self._reader.read, self._reader.collate, indices, self._seed)
        try:
            with same_draws(self._seed):
                made = from_data.batch(self._chosen[:2])
            size_of(made, 2)
        except Exception:  # a data set that only workers can read, say
            return from_batch
        return from_data

    def _observe(self, batch: Any, *, constant: bool = False, fresh: bool = True) -> Observation:
        if fresh:
            self._attributes.restore()
        with same_draws(self._seed, constant=constant):
            observation = self._steps.observe(lambda: self._forward(batch))
            self._outside = drawn_outside_torch()
        return observation

    def _is_repeatable(self, one: Observation, two: Observation) -> str:
        everyone = torch.ones(len(one.loss_n), dtype=torch.bool)
        where = first_in(one.forward(), two.forward(), everyone, 1.0)
        return findings.unrepeatable(f"others in {where}") if where else ""

    def _halves(self) -> list[list[int]]:
        """Sets of positions. Of any two, each is in one of the sets without the other."""
        digits = range(math.ceil(math.log2(max(2, *self._sizes))))
        everyone = range(len(self._chosen))
        return [[i for i in everyone if (i >> d) % 2 == half] for d in digits for half in (0, 1)]

    def _others(self, drawn: list[int], count: int | None = None) -> list[int]:
        """For every position one whose example stands there when these are replaced."""
        others = list(range(len(self._chosen) if count is None else count))
        rest = sorted(set(others) - set(drawn))
        for i in drawn:
            others[i] = self._coins.choice(rest or drawn)
        return others

    def _batch_of(self, source: Source, positions: Sequence[int]) -> Any:
        if not self._chosen:
            return self._delivery.batch  # an empty one
        with same_draws(self._seed):
            return source.batch(positions)

    def _compare(
        self, base: Any, other: Any, drawn: list[int], how: str, *, again: bool = False
    ) -> list[str]:
        """Nobody but those drawn may change, in the forward pass or in the backward pass.

        Where sequences are padded to the longest, another batch has other shapes, and so other
        draws for dropout: what is found must be found again with draws that are all alike. `again`
        says that the base is the last comparison's.
        """
        if not again:
            self._seen_of_base = {}
        found = list(self._differences(base, other, drawn, how, constant=False))
        if any(on_every_rank(bool(found))):
            found = list(self._differences(base, other, drawn, how, constant=True))
        return found

    def _differences(
        self, base: Any, batch: Any, drawn: list[int], how: str, *, constant: bool
    ) -> Iterator[str]:
        if constant not in self._seen_of_base:
            first = self._observe(base, constant=constant)
            self._seen_of_base[constant] = first, _all_sent_back(first)
        first, before = self._seen_of_base[constant]
        other = self._observe(batch, constant=constant)
        after = _all_sent_back(other)
        kept = _mask(len(first.loss_n), drawn, value=False)
        everybody = self._of_all_ranks(kept, first.padded_size)
        looseness = _LOOSE if constant else 1.0
        where = first_in(first.forward(), other.forward(), kept, looseness)
        if where:
            yield self._coupled_or_reordered(first, other, drawn, kept, where, how)
        for one, two in zip(before, after):
            if first_in([one], [two], everybody if one.is_of_all_ranks else kept, looseness):
                yield findings.coupled(one.where, how)

    def _among_alike(self, source: Source, position: int) -> list[str]:
        """Half of a batch of copies of one example is replaced: something may hold for all of them
        that holds for no mixed batch."""
        count = len(self._chosen)
        copies = [position] * count
        mixed = copies[: count // 2] + self._chosen[count // 2 :]
        batches = [self._batch_of(source, some) for some in (copies, mixed)]
        drawn = list(range(count // 2, count))
        return self._compare(batches[0], batches[1], drawn, "replaced by others")

    def _emptied(self, base: Any, drawn: list[int]) -> list[str]:
        """Some models cannot do without a label, say: they refuse such examples, on every rank."""
        try:
            emptied = empty_examples(base, len(self._chosen), drawn)
            found = self._compare(base, emptied, drawn, "emptied")
        except Exception:
            return []
        self._takes_empty = True
        return found

    def _coupled_or_reordered(
        self,
        first: Observation,
        other: Observation,
        drawn: list[int],
        kept: Tensor,
        where: str,
        how: str,
    ) -> str:
        changed = disagreement(first.forward()[-1], other.forward()[-1]).cpu()
        if bool((changed & kept).any()) and not bool((changed & ~kept).any()) and drawn:
            return findings.reordered()
        return findings.coupled(where, how)

    def _is_seen(
        self, first: Observation, other: Observation, base: Any, drawn: list[int], others: list[int]
    ) -> str:
        """Whoever was replaced, by somebody else, must show somewhere."""
        rows = _mask(len(first.loss_n), drawn, value=True)
        before, after = _all_sent_back(first), _all_sent_back(other)
        everybody = self._of_all_ranks(rows, first.padded_size, default=False)
        shows = first_in(first.forward(), other.forward(), rows, 1.0) or any(
            first_in([one], [two], everybody if one.is_of_all_ranks else rows, 1.0)
            for one, two in zip(before, after)
        )
        size = len(self._chosen)
        if shows or all(are_alike(base, size, i, others[i]) for i in drawn):
            return ""
        return findings.unseen()

    def _removed(self, source: Source, base: Any) -> str:
        """The last quarter goes: what numpy draws row by row, once in a step, stays the same."""
        kept = list(range(len(self._chosen) - len(self._chosen) // 4))
        first = self._observe(base, constant=True)
        outside = self._outside
        batch = self._batch_of(source, [self._chosen[i] for i in kept])
        other = self._observe(batch, constant=True)
        rows = torch.tensor(kept, dtype=torch.int64)
        cut = [
            replace(seen, value=seen.value[rows.to(seen.value.device)])
            for seen in first.forward()
            if len(seen.value) == len(self._chosen)
        ]
        everyone = torch.ones(len(kept), dtype=torch.bool)
        where = first_in(cut, other.forward(), everyone, _LOOSE)
        if where and outside != self._outside:
            return findings.unrepeatable("draws of numpy or random, one for each example")
        return findings.counted(where) if where else ""

    def _codes(self, first: Observation) -> Iterator[str]:
        """Every example against every other, by the digits of their numbers, and of their ranks."""
        whole = _all_sent_back(first)
        count, rank = len(first.loss_n), self._trainer.global_rank
        number = torch.arange(count)
        digits = range(math.ceil(math.log2(max(2, *self._sizes))))
        masks = [(number >> digit) % 2 == wanted for digit in digits for wanted in (0, 1)]
        for digit in range(math.ceil(math.log2(max(1, len(self._sizes))))):
            for wanted in (0, 1):
                masks.append(torch.full((count,), (rank >> digit) % 2 == wanted))
        for mask in masks:
            sent = first.backward(mask.to(first.loss_n.device))
            everybody = self._of_all_ranks(mask, first.padded_size, default=False)
            for seen in sent:
                rows = (everybody if seen.is_of_all_ranks else mask).to(seen.value.device)
                if len(seen.value) == len(rows) and bool((nonzero(seen) & ~rows).any()):
                    yield findings.crossed(seen.where)
            for one, two in zip(whole, sent):
                if first_in([one], [two], everybody if one.is_of_all_ranks else mask, 1.0):
                    yield findings.scaled(one.where)

    def _memory(self, source: Source, base: Any) -> str:
        """What one batch leaves behind must not change the next one, whoever was in it."""
        count = len(self._chosen)
        half, all_alike = count // 2, [[position] for position in self._chosen[:4]]
        who = [self._chosen[:half], self._chosen[half:], *all_alike, *[[]] * (4 - len(all_alike))]
        batches = [self._batch_of(source, (some * count)[:count]) for some in who]
        if self._takes_empty:
            batches.append(empty_examples(base, count, list(range(count))))
        outcomes = []
        for batch in batches:
            self._observe(batch)
            rates = self._rates()
            outcomes.append((self._observe(base, fresh=False).forward(), rates))
        everyone = torch.ones(count, dtype=torch.bool)
        seen, rates = outcomes[0]
        for other_seen, other_rates in outcomes[1:]:
            if first_in(seen, other_seen, everyone, 1.0) or rates != other_rates:
                return findings.remembered()
        return ""

    def _rates(self) -> list[dict[str, Any]]:
        """The optimizers' settings."""
        return [
            {key: value for key, value in group.items() if key != "params"}
            for optimizer in self._trainer.optimizers
            for group in optimizer.param_groups
        ]

    def _at_full_size(self) -> Iterator[str]:
        """The batch as it is, and with a quarter of it replaced."""
        batch, size = self._delivery.batch, self._size
        drawn = sorted(self._coins.sample(range(size), (size + 3) // 4))
        others = self._others(drawn, size)
        replaced = FromBatch(batch, size).batch(others) if size else batch
        yield from self._compare(batch, replaced, drawn, "replaced by others")

    def _of_all_ranks(self, mask_n: Tensor, padded: int, *, default: bool = True) -> Tensor:
        """The masks of all ranks one after the other, with padding."""
        masks = on_every_rank(mask_n.tolist())
        whole = torch.full((len(masks), padded), default)
        for rank, mask in enumerate(masks):
            assert isinstance(mask, list)
            whole[rank, : len(mask)] = torch.tensor(mask, dtype=torch.bool)
        return whole.flatten()


def _all_sent_back(seen: Observation) -> list[Seen]:
    return seen.backward(torch.ones_like(seen.loss_n, dtype=torch.bool))


def _mask(size: int, positions: Sequence[int], *, value: bool) -> Tensor:
    mask = torch.full((size,), not value)
    mask[list(positions)] = value
    return mask

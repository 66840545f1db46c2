"""The probe measures whether one example's loss depends on others.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_dpsparse.plugin.deliveries import Delivery
from lightning_dpsparse.plugin.probe import findings
from lightning_dpsparse.plugin.probe.bench import (
    LOOSE,
    Bench,
    all_sent_back,
    mask_of,
    mask_of_all_ranks,
)
from lightning_dpsparse.plugin.probe.compare import first_in, nonzero
from lightning_dpsparse.plugin.probe.repeatable import Attributes, nothing_logged, shaken
from lightning_dpsparse.plugin.probe.sources import are_alike
from lightning_dpsparse.plugin.probe.subjects import Reader, Subjects
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.build import on_every_rank
from lightning_dpsparse.sharded.collections import sharded_collections
from lightning_dpsparse.sharded.examples import empty_examples
from lightning_dpsparse.sharded.observation import Observation
from lightning_dpsparse.sharded.private import PrivateSteps

_ALIKE = 8
"""How many batches are made of copies of one example."""


def is_due(step: int) -> bool:
    """By a public rule, whatever the data.

    >>> [step for step in range(120_000) if is_due(step)]
    [0, 10, 100, 1000, 10000, 50000, 100000]
    """
    return step in (0, 10, 100, 1_000, 10_000) or step % 50_000 == 0


class Probe:
    """Looks at the step that is under way, on all ranks together.

    Args:
        forward: The losses of a batch as the loader gave it: moved, and through training_step.
        delivery: The batch of the step.
        reader: How the loader reads examples; None if they cannot be read again.
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
        self._forward = forward
        self._seed = int.from_bytes(os.urandom(4), "big")
        self._subjects = Subjects(delivery, reader, leaders, self._seed)
        self._takes_empty = False

    def run(self) -> bool:
        """Raises if a rank found anything. Returns False if no rank has an example to look at."""
        if not any(self._subjects.meet_other_ranks()):
            return False
        found: str | None = None
        parameters = list(self._steps.dense.parameters.trainable.values())
        tables = list(sharded_collections(self._module).values())
        attributes = Attributes(self._module, tables)
        self._bench = Bench(self._steps, self._forward, attributes, self._seed)
        try:
            with nothing_logged(self._module, self._trainer), shaken(parameters, self._seed):
                # All measurements are made on every rank, whatever is found: ranks stay in step.
                found = next(iter([finding for finding in self._look() if finding]), None)
        except (ValueError, RuntimeError, TypeError, IndexError, KeyError, AssertionError) as error:
            if isinstance(error, Refused):
                raise
            raise Refused(findings.failed(error)) from error
        finally:
            attributes.restore()
        told = next((message for message in on_every_rank(found) if message), None)
        if told is not None:
            raise Refused(str(told))
        return True

    # ---- the measurements -----------------------------------------------------------------------

    def _look(self) -> Iterator[str]:
        subjects, positions = self._subjects, self._subjects.positions
        base = subjects.batch_of(positions)
        first = self._bench.observe(base)
        yield _is_repeatable(first, self._bench.observe(base))
        yield from self._codes(first)
        for number, drawn in enumerate(subjects.halves()):
            others = subjects.others(drawn)
            replaced = subjects.batch_of([positions[i] for i in others])
            how, again = "replaced by others", number > 0
            yield from self._bench.compare(base, replaced, drawn, how, again=again)
        for position in positions[:_ALIKE] + [0] * (_ALIKE - len(positions[:_ALIKE])):
            yield from self._among_alike(position)
        yield self._is_seen(first, self._bench.observe(replaced), base, drawn, others)
        if all(subjects.counts):
            for drawn in subjects.halves()[:2]:
                yield from self._emptied(base, drawn)
        yield self._removed(base)
        yield self._memory(base)
        yield from self._at_full_size()

    def _codes(self, first: Observation) -> Iterator[str]:
        """Every example against every other, by the digits of their numbers, and of their ranks."""
        whole = all_sent_back(first)
        count, rank = len(first.loss_n), self._trainer.global_rank
        number = torch.arange(count)
        digits = self._subjects.digits()
        masks = [(number >> digit) % 2 == wanted for digit in digits for wanted in (0, 1)]
        for digit in range(math.ceil(math.log2(max(1, len(self._subjects.counts))))):
            for wanted in (0, 1):
                masks.append(torch.full((count,), (rank >> digit) % 2 == wanted))
        for mask in masks:
            sent = first.backward(mask.to(first.loss_n.device))
            everybody = mask_of_all_ranks(mask, first.padded_size, default=False)
            for seen in sent:
                rows = (everybody if seen.is_of_all_ranks else mask).to(seen.value.device)
                if len(seen.value) == len(rows) and bool((nonzero(seen) & ~rows).any()):
                    yield findings.crossed(seen.where)
            for one, two in zip(whole, sent):
                if first_in([one], [two], everybody if one.is_of_all_ranks else mask, 1.0):
                    yield findings.scaled(one.where)

    def _among_alike(self, position: int) -> list[str]:
        """Half of a batch of copies of one example is replaced: something may hold for all of them
        that holds for no mixed batch."""
        count = len(self._subjects.positions)
        copies = [position] * count
        mixed = copies[: count // 2] + self._subjects.positions[count // 2 :]
        batches = [self._subjects.batch_of(some) for some in (copies, mixed)]
        drawn = list(range(count // 2, count))
        return self._bench.compare(batches[0], batches[1], drawn, "replaced by others")

    def _emptied(self, base: Any, drawn: list[int]) -> list[str]:
        """Some examples are emptied. Models that refuse such examples, as those that cannot do
        without a label may, do so on every rank: nothing is measured then."""
        try:
            emptied = empty_examples(base, len(self._subjects.positions), drawn)
            found = self._bench.compare(base, emptied, drawn, "emptied")
        except Exception:
            return []
        self._takes_empty = True
        return found

    def _is_seen(
        self, first: Observation, other: Observation, base: Any, drawn: list[int], others: list[int]
    ) -> str:
        """Whoever was replaced, by somebody else, must show somewhere."""
        rows = mask_of(len(first.loss_n), drawn, value=True)
        before, after = all_sent_back(first), all_sent_back(other)
        everybody = mask_of_all_ranks(rows, first.padded_size, default=False)
        shows = first_in(first.forward(), other.forward(), rows, 1.0) or any(
            first_in([one], [two], everybody if one.is_of_all_ranks else rows, 1.0)
            for one, two in zip(before, after)
        )
        size = len(self._subjects.positions)
        if shows or all(are_alike(base, size, i, others[i]) for i in drawn):
            return ""
        return findings.unseen()

    def _removed(self, base: Any) -> str:
        """The last quarter goes: what numpy draws row by row, once in a step, stays the same."""
        kept = list(range(len(self._subjects.positions) - len(self._subjects.positions) // 4))
        first = self._bench.observe(base, constant=True)
        outside = self._bench.drawn_outside
        batch = self._subjects.batch_of([self._subjects.positions[i] for i in kept])
        other = self._bench.observe(batch, constant=True)
        rows = torch.tensor(kept, dtype=torch.int64)
        cut = [
            replace(seen, value=seen.value[rows.to(seen.value.device)])
            for seen in first.forward()
            if len(seen.value) == len(self._subjects.positions)
        ]
        everyone = torch.ones(len(kept), dtype=torch.bool)
        where = first_in(cut, other.forward(), everyone, LOOSE)
        if where and outside != self._bench.drawn_outside:
            return findings.unrepeatable("draws of numpy or random, one for each example")
        return findings.counted(where) if where else ""

    def _memory(self, base: Any) -> str:
        """What one batch leaves behind must not change the next one, whoever was in it."""
        count = len(self._subjects.positions)
        half, all_alike = count // 2, [[position] for position in self._subjects.positions[:4]]
        who = [
            self._subjects.positions[:half],
            self._subjects.positions[half:],
            *all_alike,
            *[[]] * (4 - len(all_alike)),
        ]
        batches = [self._subjects.batch_of((some * count)[:count]) for some in who]
        if self._takes_empty:
            batches.append(empty_examples(base, count, list(range(count))))
        outcomes = []
        for batch in batches:
            self._bench.observe(batch)
            rates = _settings_of(self._trainer)
            outcomes.append((self._bench.observe(base, fresh=False).forward(), rates))
        everyone = torch.ones(count, dtype=torch.bool)
        seen, rates = outcomes[0]
        for other_seen, other_rates in outcomes[1:]:
            if first_in(seen, other_seen, everyone, 1.0) or rates != other_rates:
                return findings.remembered()
        return ""

    def _at_full_size(self) -> list[str]:
        """Compare the batch as it is with one in which a quarter is replaced."""
        replaced, drawn = self._subjects.whole_batch_with_a_quarter_replaced()
        batch = self._subjects.whole_batch
        return self._bench.compare(batch, replaced, drawn, "replaced by others")


def _is_repeatable(one: Observation, two: Observation) -> str:
    everyone = torch.ones(len(one.loss_n), dtype=torch.bool)
    where = first_in(one.forward(), two.forward(), everyone, 1.0)
    return findings.unrepeatable(f"others in {where}") if where else ""


def _settings_of(trainer: Trainer) -> list[dict[str, Any]]:
    """The optimizers' settings."""
    return [
        {key: value for key, value in group.items() if key != "params"}
        for optimizer in trainer.optimizers
        for group in optimizer.param_groups
    ]

"""The training loader of a private run: the user's own, over batches that the plan draws.

Amplification by sampling is worth much privacy, and holds only if batches really are drawn as the
accountant assumes. So the order of the user's loader is replaced: by Poisson samples of examples or
of users, day by day if asked, or by one fixed order. A loader whose order cannot be replaced is
refused. With sampling="unamplified" the loader keeps its own order, which costs far more, and is
only checked for examples that come twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
from lightning.fabric.utilities.data import sized_len
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from lightning_dpsparse.noise.keys import RunKey
from lightning_dpsparse.plan import PrivacyPlan, Users
from lightning_dpsparse.plugin.batch_order import EveryExample, FromStep, InOrder, Noted
from lightning_dpsparse.plugin.datasets import check_no_repeats, users_of
from lightning_dpsparse.plugin.deliveries import Deliveries
from lightning_dpsparse.plugin.loaders import EvaluationBatches, ResumableLoader, rebuild
from lightning_dpsparse.plugin.probe.subjects import Reader
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sampling.poisson import (
    Phase,
    PoissonBatches,
    PoissonSampler,
    day_phases,
)
from lightning_dpsparse.sampling.units import (
    AllExamples,
    CappedExamples,
    Units,
    WholeUsers,
    check_day_starts,
    check_one_day,
    check_users,
)
from lightning_dpsparse.sharded.process_group import largest_over_ranks
from lightning_dpsparse.sharded.split_batch import empty_batch


@dataclass(frozen=True)
class RankContext:
    """What drawing batches needs to know of this process and its trainer."""

    rank: int
    world_size: int
    key: RunKey
    present_step: Callable[[], int]
    """Returns the step of the schedule that the run is at, as its ledger counts."""
    planned_steps: int | None
    """The trainer's max_steps; None if epochs say how long training is."""
    is_one_epoch: bool
    """Whether the trainer's max_epochs is 1."""
    deliveries: Deliveries
    """What is told who is drawn."""


@dataclass(frozen=True)
class SampledData:
    """What the accountant and the step need to know of the data."""

    phases: list[Phase]
    num_units: int | None
    expected_batch: float
    steps_per_pass: int | None = None
    sampler: PoissonSampler | None = None
    """What says which examples belong to one user; None if every example is its own unit."""
    in_order: Callable[[Phase | None], Any] | None = None
    """Reads this rank's share of a phase, or of all the data, once; None if that cannot be done."""
    every_example: Callable[[int], tuple[Any, int]] | None = None
    """Reads this rank's share of all examples once, in batches of this size, as many on every rank,
    and says how many examples count; None if that cannot be done. On all ranks."""
    reader: Reader | None = None
    """How single examples are read; None if they cannot be read by number."""

    dataset: object = None
    """The data set that the training loader reads; None if it is not known."""
    trusted: str | None = None
    """What has to be believed of the user's own order, in words; None if nothing has to."""

    @property
    def accounted(self) -> tuple[object, ...]:
        """The facts that the accounting rests on: they may not change during a run."""
        return tuple(self.phases), self.num_units, self.expected_batch, self.steps_per_pass


def private_loader(
    loader: object, plan: PrivacyPlan, place: RankContext
) -> tuple[object, SampledData]:
    """The loader that the plan's accounting fits, and what is known of its data.

    For plan.sampling == "unamplified" the loader stays as it is.
    """
    if plan.sampling == "unamplified":
        return loader, _any_order(loader, plan, place)
    plain = _plain(loader, plan)
    if not len(cast(Sized, plain.dataset)):
        raise Refused(
            f"Expected examples to train on, found none in {type(plain.dataset).__name__}. Give "
            "the training loader a data set that has some."
        )
    batch = plan.expected_batch_size or cast(int, plain.batch_size) * place.world_size
    if plan.sampling == "fixed_order":
        return _fixed_order(plain, batch, place)
    return _poisson(plain, batch, plan, place)


def _plain(loader: object, plan: PrivacyPlan) -> DataLoader[Any]:
    """Refuse a loader unless its order may be replaced: a `DataLoader` with a standard sampler."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        found = type(loader.dataset if isinstance(loader, DataLoader) else loader).__name__
        raise Refused(
            f"Expected a DataLoader over a map-style data set for sampling={plan.sampling!r}, "
            f"found {found}: its examples cannot be drawn by number. Use one, or set "
            "sampling='unamplified', which costs far more."
        )
    samplers = (SequentialSampler, RandomSampler, DistributedSampler)
    if type(loader.batch_sampler) is not BatchSampler or type(loader.sampler) not in samplers:
        found = type(_sampler_of(loader)).__name__
        raise Refused(
            f"Expected a plain DataLoader for sampling={plan.sampling!r}, found one with a {found}:"
            " its batches are not what the accounting assumes. Leave the sampler out, or set "
            "sampling='unamplified', which costs far more."
        )
    return loader


def _sampler_of(loader: DataLoader[Any]) -> object:
    """The user's own sampler, taken out of Lightning's wrapper if it is in one."""
    if type(loader.batch_sampler) is not BatchSampler:
        return loader.batch_sampler
    inner = getattr(getattr(loader.sampler, "dataset", None), "_sampler", None)
    return loader.sampler if inner is None else inner


def _poisson(
    loader: DataLoader[Any], batch: float, plan: PrivacyPlan, place: RankContext
) -> tuple[object, SampledData]:
    units, num_units = _units(loader.dataset, plan)
    _check_users_a_step(batch, units, plan)
    length = -(-units.count // round(batch))
    if plan.by_day:
        phases = _days(loader.dataset, units, batch, plan, place, length)
        length = sum(cast(int, phase.steps) for phase in phases)
    else:
        phases = [Phase(0, units.count, min(1.0, batch / units.count))]
    sampler = PoissonSampler(
        units, phases, place.key, place.rank, place.world_size, plan.max_batch_size
    )
    batches = PoissonBatches(sampler, length, place.present_step)
    shape = SampledData(
        phases,
        num_units,
        batch,
        sampler=sampler if plan.draws_whole_users else None,
        in_order=lambda phase: _over(loader, InOrder(units, phase, place.rank, place.world_size)),
        every_example=partial(_every_example, loader, units, place),
        reader=_reader(loader),
        dataset=loader.dataset,
    )
    return _over(loader, Noted(batches, place.deliveries)), shape


def _units(dataset: Dataset[Any], plan: PrivacyPlan) -> tuple[Units, int]:
    """The units that are drawn, and how many units are protected."""
    size = len(cast(Sized, dataset))
    if not isinstance(plan.unit, Users):
        check_no_repeats(dataset)
        return AllExamples(size), size
    users = _users(dataset)
    check_users(users, size)
    kind = WholeUsers if plan.unit.drawn == "users" else CappedExamples
    units = kind(users, plan.unit.max_examples)
    return units, units.num_users


def _check_users_a_step(batch: float, units: Units, plan: PrivacyPlan) -> None:
    """Refuse a batch of more users than there are: it was meant as a number of examples."""
    if plan.draws_whole_users and batch > units.count:
        raise Refused(
            f"Expected a batch size of at most {units.count:,}, the number of users, found "
            f"{batch:,}: users are drawn with all their examples, so it counts users. Divide it by "
            "the examples that a user has, or set drawn='examples'."
        )


def _days(
    dataset: Dataset[Any],
    units: Units,
    batch: float,
    plan: PrivacyPlan,
    place: RankContext,
    length: int,
) -> list[Phase]:
    starts = _attribute(dataset, "day_starts", "where each day begins", "by_day")
    check_day_starts(starts, len(cast(Sized, dataset)))
    if place.planned_steps is None and not place.is_one_epoch:
        raise Refused(
            "Expected max_epochs=1 or max_steps with by_day, found several epochs: one takes all "
            "days in order. For more steps a day set max_steps."
        )
    if isinstance(plan.unit, Users) and plan.unit.in_one_day:
        check_one_day(_users(dataset), starts)
    period = plan.days_per_period
    bounds = units.bounds(starts[::period])
    names = [_name(day, min(day + period, len(starts))) for day in range(0, len(starts), period)]
    return day_phases(
        bounds,
        batch,
        place.planned_steps or length,
        names if plan.unit_lives_in_one_day else None,
    )


def _name(first: int, stop: int) -> str:
    """A period in words. Days are counted from one."""
    return f"day {stop}" if stop == first + 1 else f"days {first + 1} to {stop}"


def _users(dataset: Dataset[Any]) -> Any:
    return _as_array(users_of(dataset), dataset, "users", "whose each example is", "unit")


def _attribute(dataset: object, name: str, meaning: str, setting: str) -> Any:
    return _as_array(getattr(dataset, name, None), dataset, name, meaning, setting)


def _as_array(value: object, dataset: object, name: str, meaning: str, setting: str) -> Any:
    if value is None:
        raise Refused(
            f"Expected {type(dataset).__name__}.{name}, which says {meaning}, found none. The "
            f"plan's {setting!r} needs it."
        )
    try:
        return np.asarray(value)
    except ValueError as error:  # of lists of several lengths
        raise Refused(
            f"Expected {type(dataset).__name__}.{name} to be one list, which says {meaning}, found "
            "lists of several lengths. Give each example one."
        ) from error


def _fixed_order(
    loader: DataLoader[Any], batch: float, place: RankContext
) -> tuple[object, SampledData]:
    check_no_repeats(loader.dataset)
    size = len(cast(Sized, loader.dataset))
    each = cast(int, loader.batch_size)
    deal = EvaluationBatches(size, each, place.rank, place.world_size, drop_last=False)
    shape = SampledData(
        [Phase(0, size, 1.0)],
        size,
        batch,
        steps_per_pass=len(deal),
        in_order=lambda phase: _over(
            loader, InOrder(AllExamples(size), phase, place.rank, place.world_size)
        ),
        every_example=partial(_every_example, loader, AllExamples(size), place),
        reader=_reader(loader),
        dataset=loader.dataset,
    )
    batches = FromStep(deal, place.present_step)
    return _over(loader, Noted(batches, place.deliveries)), shape


def _every_example(
    loader: DataLoader[Any], units: Units, place: RankContext, size: int
) -> tuple[Any, int]:
    batches = EveryExample(units, size, place.rank, place.world_size)
    (most,) = largest_over_ranks([float(batches.num_batches)])
    batches.num_batches = int(most)
    return _over(loader, batches), batches.num_examples


def _any_order(loader: object, plan: PrivacyPlan, place: RankContext) -> SampledData:
    each = getattr(loader, "batch_size", None)
    expected = plan.expected_batch_size or (each * place.world_size if each else None)
    if expected is None:
        raise Refused(
            "Expected a batch size to divide by, found a loader without one. Set "
            "expected_batch_size in the privacy plan."
        )
    dataset = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader) or isinstance(dataset, IterableDataset):
        trusted = (
            f"That {type(loader if dataset is None else dataset).__name__} gives examples in an "
            "order that does not depend on them, none twice in a batch."
        )
        size = None if isinstance(dataset, IterableDataset) else sized_len(dataset)
        return SampledData(
            [Phase(0, size or 0, 1.0)], size, expected, dataset=dataset, trusted=trusted
        )
    check_no_repeats(dataset)
    size = len(cast(Sized, dataset))
    return SampledData(
        [Phase(0, size, 1.0)],
        size,
        expected,
        reader=_reader(loader),
        dataset=dataset,
        trusted=_check_order(loader, place),
    )


def _check_order(loader: DataLoader[Any], place: RankContext) -> str | None:
    """Refuse an order that repeats examples or looks at them; say what has to be believed."""
    sampler = _sampler_of(loader)
    if isinstance(sampler, WeightedRandomSampler) or getattr(sampler, "replacement", False):
        raise Refused(
            f"Expected an order in which every example comes once, found {type(sampler).__name__} "
            "with replacement or weights: an example may come several times in a batch, at the "
            "price of one. Leave the sampler out, and weigh losses instead."
        )
    size, together = len(cast(Sized, loader.dataset)), (loader.batch_size or 0) * place.world_size
    if size < together and size % place.world_size:
        raise Refused(
            f"Expected at least one whole batch of {together:,} examples, or as many for every "
            f"rank, found {size:,}: some would be shown to two ranks at once. Use a smaller batch."
        )
    if type(loader.batch_sampler) is BatchSampler and isinstance(
        sampler, (SequentialSampler, RandomSampler, DistributedSampler)
    ):
        return None
    return f"That the order of {type(sampler).__name__} does not depend on the examples."


def noted(loader: object, plan: PrivacyPlan, deliveries: Deliveries) -> object:
    """A loader of the user's whose examples' numbers are noted, if it has numbers."""
    if (
        plan.sampling != "unamplified"
        or not isinstance(loader, DataLoader)
        or isinstance(loader.dataset, IterableDataset)
        or loader.batch_sampler is None
    ):
        return loader
    return rebuild(type(loader), loader, Noted(loader.batch_sampler, deliveries))


class _Collated(Dataset[Any]):
    """A data set that is read in whole batches, by the numbers of their examples.

    A batch may be empty. What a collate function makes of no examples is anyone's guess, so an
    empty batch is an ordinary one that is cut down to no examples.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._dataset, self._collate = loader.dataset, loader.collate_fn

    def __getitems__(self, indices: Sequence[int]) -> Any:
        if not indices:
            return empty_batch(self.__getitems__([0]))
        return self._collate(_read(self._dataset, indices))

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])

    def __len__(self) -> int:
        return len(cast(Sized, self._dataset))


def _read(dataset: Dataset[Any], indices: Sequence[int]) -> Any:
    """Read examples as a `DataLoader` does: all at once, where the data set can do that."""
    fetch = getattr(dataset, "__getitems__", None)
    return fetch(indices) if fetch else [dataset[i] for i in indices]


def _reader(loader: DataLoader[Any]) -> Reader:
    return Reader(partial(_read, loader.dataset), cast(Any, loader.collate_fn))


def _as_is(batch: Any) -> Any:
    return batch


def _over(loader: DataLoader[Any], batches: Any) -> Any:
    """The same loader, over other batches."""
    return rebuild(ResumableLoader, loader, batches, dataset=_Collated(loader), collate_fn=_as_is)

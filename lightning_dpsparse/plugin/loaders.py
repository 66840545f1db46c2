"""Loaders for sharded tables, with as many batches on every rank.

Every batch is a conversation between all ranks: each looks up rows on the others. If one rank has
a batch more than another, it waits for it forever. So the ranks compare their loaders before they
begin, or before every batch where lengths are not known. Evaluation loaders show every example
exactly once, and training loaders resume in the middle of an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import islice
from typing import Any, Literal, cast

import torch.utils.data as data
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.overrides.distributed import (
    UnrepeatedDistributedSamplerWrapper,
    _IndexBatchSamplerWrapper,
)
from torch.utils.data import DataLoader, DistributedSampler

from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.build import on_every_rank

Uneven = Literal["raise", "truncate"]
Position = tuple[int, int]
"""An epoch, and how many of its batches are done."""


def training_loader(loader: object, uneven: Uneven, position: Callable[[], Position]) -> object:
    """A loader that resumes in the middle of an epoch and never leaves a rank alone."""
    loader = same_number_of_batches(loader, "training", uneven)
    if (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, data.IterableDataset)
        and type(loader.batch_sampler) is data.BatchSampler
    ):
        return rebuild(ResumableLoader, loader, _FromBatch(loader.batch_sampler, position))
    return loader


def evaluation_loader(loader: object, stage: str, uneven: Uneven, rank: int, world: int) -> object:
    """A loader that shows every example exactly once, in as many batches on every rank.

    Lightning's own samplers repeat examples (validation, test) or give ranks batches of their own
    (predict: a hang). Loaders with a sampler of the user's are only checked.
    """
    if (
        isinstance(loader, DataLoader)
        and _injected_by_lightning(loader.sampler)
        and loader.batch_size
    ):
        examples = len(cast(Sized, loader.dataset))
        if examples < world:
            raise Refused(
                f"Expected at least one {stage} example for each of the {world} ranks, found "
                f"{examples}. Use fewer devices."
            )
        batches = EvaluationBatches(examples, loader.batch_size, rank, world, loader.drop_last)
        sampler: Any = batches
        if isinstance(loader.batch_sampler, _IndexBatchSamplerWrapper):
            sampler = _IndexBatchSamplerWrapper(batches)  # lets prediction writers know the order
        return rebuild(DataLoader, loader, sampler)
    return same_number_of_batches(loader, stage, uneven)


def same_number_of_batches(loader: object, stage: str, uneven: Uneven) -> object:
    """`loader`, if all ranks have as many batches; else an error, or only the common ones."""
    lengths = on_every_rank(sized_len(loader))
    if len(lengths) == 1:
        return loader
    if None in lengths:
        return InStep(cast("Iterable[Any]", loader), stage, uneven)
    counts = cast("list[int]", lengths)
    if min(counts) == max(counts):
        return loader
    if uneven == "raise":
        raise Refused(_uneven_message(stage, f"{counts} batches on the ranks in order"))
    return Truncated(cast("Iterable[Any]", loader), min(counts))


def _uneven_message(stage: str, found: str) -> str:
    return (
        f"Expected the {stage} loader to have as many batches on every rank, found {found}. Every "
        "batch is a conversation between all ranks. Even the loaders out, or set "
        "uneven_loaders='truncate' on the strategy to drop what is over."
    )


def _injected_by_lightning(sampler: object) -> bool:
    if isinstance(sampler, UnrepeatedDistributedSamplerWrapper):
        inner = cast(Any, sampler.dataset)._sampler
        return isinstance(inner, data.SequentialSampler)
    return type(sampler) is DistributedSampler and not sampler.shuffle


class EvaluationBatches:
    """Batch sampler: all examples in order, dealt evenly over batches and ranks, none empty.

    >>> [list(EvaluationBatches(5, batch_size=2, rank=r, world=2, drop_last=False)) for r in (0, 1)]
    [[[0, 1], [3]], [[2], [4]]]
    """

    def __init__(
        self, num_examples: int, batch_size: int, rank: int, world: int, drop_last: bool
    ) -> None:
        together = batch_size * world
        self._num_batches = num_examples // together if drop_last else -(-num_examples // together)
        self._num_examples = min(num_examples, self._num_batches * together)
        self._rank, self._world = rank, world

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[list[int]]:
        for part in range(self._rank, self._num_batches * self._world, self._world):
            yield list(range(self._start_of(part), self._start_of(part + 1)))

    def _start_of(self, part: int) -> int:
        """Where part `part` begins; the first parts take the odd examples."""
        size, odd = divmod(self._num_examples, self._num_batches * self._world)
        return part * size + min(part, odd)


def rebuild(
    cls: type[DataLoader[Any]], loader: DataLoader[Any], batch_sampler: Any, **changes: Any
) -> Any:
    """The same loader over another batch sampler, with some settings changed."""
    settings = {
        "dataset": loader.dataset,
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }
    return cls(batch_sampler=batch_sampler, **settings | changes)


class _FromBatch:
    """A batch sampler that begins where `position()` says, without reading an example before it."""

    def __init__(self, batch_sampler: data.BatchSampler, position: Callable[[], Position]) -> None:
        self._batch_sampler, self._position = batch_sampler, position
        self.sampler = batch_sampler.sampler

    def __len__(self) -> int:
        return len(self._batch_sampler)

    def __iter__(self) -> Iterator[list[int]]:
        epoch, first = self._position()
        if hasattr(self.sampler, "set_epoch"):
            # Lightning has set it too, but counts an epoch twice when it resumes at its end.
            self.sampler.set_epoch(epoch)
        return islice(iter(self._batch_sampler), first, None)


class ResumableLoader(DataLoader[Any]):
    """A `DataLoader` that goes on where the trainer's progress says, after a checkpoint too.

    It asks for the progress with the first batch: Lightning calls `iter` before it has restored it.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """The loader has no state. Having this method tells Lightning that the loader resumes."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is nothing to load: the trainer's progress says where to go on."""


class Truncated:
    """The first `num_batches` batches of a loader."""

    def __init__(self, loader: Iterable[Any], num_batches: int) -> None:
        self._loader, self._num_batches = loader, num_batches

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._loader), self._num_batches)


class InStep:
    """A loader of unknown length that ends on all ranks at once: they agree before every batch."""

    def __init__(self, loader: Iterable[Any], stage: str, uneven: Uneven) -> None:
        self._loader, self._stage, self._uneven = loader, stage, uneven

    def __iter__(self) -> Iterator[Any]:
        over = object()
        batches = iter(self._loader)
        while True:
            batch = next(batches, over)
            has_more = on_every_rank(batch is not over)
            if all(has_more):
                yield batch
                continue
            if any(has_more) and self._uneven == "raise":
                raise Refused(
                    _uneven_message(self._stage, "some ranks at their end and others not")
                )
            return

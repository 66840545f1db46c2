"""Values of a checkpoint are of the kinds that this trainer would have written.

Lightning and torch copy what a checkpoint holds into loops, optimizers and schedulers, and look at
it when they use it: a text in place of a learning rate would end a run in its middle, and a number
that is none would end in weights that are none. So the values are compared before they are copied,
with those that the trainer holds now: a number where there is a number, a table where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_dpsparse.checks import is_list, is_number, shown
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.sharded.upstream import required


def check_restored(checkpoint: Mapping[str, Any], trainer: Trainer) -> None:
    """Refuse a checkpoint with values that the trainer cannot go on from."""
    faults = (
        fault
        for key, like in _held_now(trainer).items()
        if key in checkpoint
        for fault in _differences(checkpoint[key], like, key)
    )
    fault = next(faults, None)
    if fault is not None:
        raise Refused(
            f"Expected a checkpoint of a run like this one, found {fault}. Take one that a run of "
            "the same code saved, or load its weights alone."
        )


def _held_now(trainer: Trainer) -> dict[str, Any]:
    """What the trainer would write now, under Lightning's names."""
    loops = required(trainer, "_checkpoint_connector")._get_loops_state_dict()
    return {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": "",
        "loops": loops,
        "callbacks": {},
        "optimizer_states": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "lr_schedulers": [
            config.scheduler.state_dict() for config in trainer.strategy.lr_scheduler_configs
        ],
    }


def _differences(found: Any, like: Any, place: str) -> Iterator[str]:
    """Where a value is of another kind than one that is held now."""
    if isinstance(like, Mapping):
        if not isinstance(found, Mapping):
            yield _words(found, place, "names with values")
        elif place.endswith("].state"):  # of an optimizer, which is filled in its first step
            yield from _odd_state(found, place)
        else:
            for key in like.keys() & found.keys():
                yield from _differences(found[key], like[key], f"{place}.{key}")
    elif isinstance(like, (bool, str)):
        if not isinstance(found, type(like)):
            yield _words(found, place, "a text" if isinstance(like, str) else "True or False")
    elif is_number(like):
        is_one = is_number(found) or (isinstance(found, Tensor) and found.numel() == 1)
        if not is_one or math.isfinite(like) > math.isfinite(float(found)):
            yield _words(found, place, "a finite number")
    elif is_list(like):
        if not is_list(found):
            yield _words(found, place, "a list")
        else:  # a run may go on with more schedulers, or with fewer
            for i, (one, other) in enumerate(zip(found, like)):
                yield from _differences(one, other, f"{place}[{i}]")


def _odd_state(state: Mapping[Any, Any], place: str) -> Iterator[str]:
    """What no optimizer remembers of a parameter: all remember the same kinds of things."""
    tensors: set[str] = set()
    for entries in state.values():
        if isinstance(entries, Mapping):
            tensors |= {name for name, value in entries.items() if isinstance(value, Tensor)}
    for parameter, entries in state.items():
        if not isinstance(entries, Mapping):
            yield _words(entries, f"{place}.{parameter}", "names with values")
            continue
        for name, value in entries.items():
            where = f"{place}.{parameter}.{name}"
            if isinstance(value, Tensor):
                if not value.isfinite().all():
                    yield f"{where} with entries that are infinite or no number"
            elif value is not None and (name in tensors or not _can_be_remembered(value)):
                yield _words(value, where, "a tensor")


def _can_be_remembered(value: Any) -> bool:
    is_history = is_list(value) and all(isinstance(one, Tensor) for one in value)
    return is_history or isinstance(value, bool) or is_number(value)


def _words(found: Any, place: str, expected: str) -> str:
    return f"{place} = {shown(found)} in place of {expected}"

"""Running the same code several times as if each time were the first.

Whether examples depend on each other shows when a pass is repeated with other examples in the
batch. Everything else must then be as it was: random numbers, counters and running means that the
module keeps, and what has been logged.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dpsparse.sharded.collections import sharded_collections
from lightning_dpsparse.sharded.seeding import seed_torch

_CONTAINERS = (list, dict, set, deque)


@contextmanager
def same_draws(seed: int, *, constant: bool = False) -> Iterator[None]:
    """Inside, torch, numpy and random draw what they drew the last time with this seed.

    With `constant`, torch's draws do not depend on their shape either: all numbers of a draw are
    alike. Then a batch with fewer examples has the draws of a larger one.
    """
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    in_numpy, in_python = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices), _Draws(seed, constant=constant) as draws:
        try:
            seed_all(seed)
            yield
        finally:
            np.random.set_state(in_numpy)
            random.setstate(in_python)
            draws.restore()


def seed_all(seed: int) -> None:
    """From here on torch, numpy and random draw what they draw after this seed."""
    seed_torch(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def drawn_outside_torch() -> tuple[Any, ...]:
    """How far numpy's and Python's generators have come."""
    state: Any = np.random.get_state()
    return (*state[2:], hash(state[1].tobytes()), hash(random.getstate()))


class _Draws(TorchDispatchMode):
    """Sees every random operation, those on generators of the user's own included."""

    def __init__(self, seed: int, *, constant: bool) -> None:
        super().__init__()
        self._seed, self._constant = seed, constant
        self._states: dict[int, tuple[torch.Generator, Tensor]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        generator = kwargs.get("generator")
        if generator is not None and id(generator) not in self._states:
            self._states[id(generator)] = generator, generator.get_state()
            generator.manual_seed(self._seed)
        if not self._constant:
            return func(*args, **kwargs)
        if generator is None:
            seed_torch(self._seed)
        else:
            generator.manual_seed(self._seed)
        if func is torch.ops.aten.native_dropout.default:
            return args[0] / (1.0 - args[1]), torch.ones_like(args[0], dtype=torch.bool)
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if isinstance(out, Tensor) and out.numel():
            out.fill_(1 if name.startswith("bernoulli") else out.reshape(-1)[0].clone())
        return out

    def restore(self) -> None:
        for generator, state in self._states.values():
            generator.set_state(state)


class Attributes:
    """Plain attributes of a module and all that it holds: counters, schedules, metrics' states.

    Parameters, buffers and what other objects keep are not among them.
    """

    def __init__(self, module: nn.Module, leave_out: Sequence[nn.Module]) -> None:
        outside = {id(inner) for other in leave_out for inner in other.modules()}
        self._of = [
            (child, {key: (value, _copied(value)) for key, value in vars(child).items()})
            for child in module.modules()
            if id(child) not in outside
        ]

    @torch.no_grad()
    def restore(self) -> None:
        for child, attributes in self._of:
            for key in vars(child).keys() - attributes.keys():
                vars(child).pop(key)
            for key, (value, copied) in attributes.items():
                vars(child)[key] = value
                _refill(value, copied)


def _copied(value: Any) -> Any:
    if type(value) in _CONTAINERS:
        return value.copy()
    return value.detach().clone() if isinstance(value, Tensor) else None


def _refill(value: Any, copied: Any) -> None:
    """Put the old contents back into the same object, if they changed."""
    if isinstance(value, Tensor):
        if not torch.equal(value.detach(), copied):
            value.detach().copy_(copied)
    elif type(value) in (list, deque):
        if len(value) != len(copied) or any(a is not b for a, b in zip(value, copied)):
            value.clear()
            value.extend(copied)
    elif type(value) is dict:
        if value.keys() != copied.keys() or any(value[key] is not copied[key] for key in copied):
            value.clear()
            value.update(copied)
    elif type(value) is set and value != copied:
        value.clear()
        value.update(copied)


@contextmanager
def nothing_logged(module: LightningModule, trainer: Trainer) -> Iterator[None]:
    """Inside, what the module logs goes nowhere, and what it sends to loggers neither."""
    loggers = trainer.loggers
    with silenced(module):
        try:
            trainer.loggers = [DummyLogger() for _ in loggers]
            yield
        finally:
            trainer.loggers = loggers


@contextmanager
def silenced(module: LightningModule) -> Iterator[None]:
    """Inside, the module logs and prints nothing. Methods of its own for that are covered, too."""
    names = ("log", "log_dict", "print")
    attributes = vars(module)
    before = {name: attributes[name] for name in names if name in attributes}
    try:
        attributes.update(dict.fromkeys(names, _ignore))
        yield
    finally:
        for name in names:
            attributes.pop(name, None)
        attributes.update(before)


def _ignore(*args: Any, **kwargs: Any) -> None:
    return None


@contextmanager
def shaken(parameters: Sequence[nn.Parameter], seed: int) -> Iterator[None]:
    """Inside, dense weights have small random numbers added to them.

    Zeros, as layers often begin with, would hide what examples do to each other.
    """
    generator = torch.Generator().manual_seed(seed)
    originals = [parameter.data for parameter in parameters]
    try:
        for parameter, original in zip(parameters, originals):
            size = float(original.abs().mean()) if original.numel() else 0.0
            if not size > 0.0:
                size = 1.0 / max(1.0, original[0].numel() if original.dim() > 1 else 10.0) ** 0.5
            noise = torch.randn(original.shape, generator=generator).to(original)
            parameter.data = original + 0.1 * size * noise
        yield
    finally:
        for parameter, original in zip(parameters, originals):
            parameter.data = original


def as_if_never_run(module: LightningModule) -> Callable[[], AbstractContextManager[None]]:
    """A context for a pass through the model that a step makes in advance, and then again.

    Inside, torch, numpy and random draw what they would draw now, when this function is called.
    Afterwards they go on as if nothing had been drawn, nothing has been logged, and what the module
    keeps in attributes (counters, metrics) is as it was.
    """
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    in_torch, on_devices = torch.get_rng_state(), [torch.cuda.get_rng_state(d) for d in devices]
    in_numpy, in_python = np.random.get_state(), random.getstate()

    @contextmanager
    def context() -> Iterator[None]:
        attributes = Attributes(module, list(sharded_collections(module).values()))
        numpy_now, python_now = np.random.get_state(), random.getstate()
        with torch.random.fork_rng(devices), nothing_logged(module, module.trainer):
            torch.set_rng_state(in_torch)
            for device, state in zip(devices, on_devices):
                torch.cuda.set_rng_state(state, device)
            np.random.set_state(in_numpy)
            random.setstate(in_python)
            try:
                yield
            finally:
                np.random.set_state(numpy_now)
                random.setstate(python_now)
                attributes.restore()

    return context

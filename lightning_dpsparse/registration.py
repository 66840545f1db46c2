"""What is done to Lightning as soon as it and this package are both imported.

- `Trainer(strategy="dpsparse")` is known: Lightning finds a strategy by name in a registry of its
  own, and has no way for other packages to announce theirs.
- `load_from_checkpoint`, and trainers with other strategies, read the checkpoint directories of
  this package: Lightning expects a file there.

Importing Lightning here would take seconds: `lightning-dpsparse --help` would be slow, and `doctor`
could not speak where Lightning is broken. Those who need it import Lightning anyway, before this
package or after it. So what concerns a module of Lightning's is done at once if the module has been
imported. If not, a finder waits on `sys.meta_path` for that one import, does it right after, and
goes away.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

FollowUp = Callable[[ModuleType], None]
"""What is done to a module after it was imported."""


def register_with_lightning() -> None:
    """Do what is to be done to Lightning, now or as soon as it is imported."""
    for name, follow_up in (
        ("lightning.pytorch.strategies", _register),
        ("lightning.pytorch.core.saving", _read_directories),  # load_from_checkpoint
        ("lightning.fabric.plugins.io.torch_io", _read_directories),  # other strategies
    ):
        if name in sys.modules:
            follow_up(sys.modules[name])
        else:
            sys.meta_path.insert(0, _FollowingFinder(name, follow_up))


def _register(strategies: ModuleType) -> None:
    registry = strategies.StrategyRegistry
    registry.register("dpsparse", _make, "TorchRec sharded tables", override=True)


def _make(**kwargs: Any) -> Any:
    from lightning_dpsparse.plugin.strategy import DPSparseStrategy

    return DPSparseStrategy(**kwargs)


def _read_directories(module: ModuleType) -> None:
    """Have a module of Lightning's read our directories too, where it reads a checkpoint."""
    read_file = module.pl_load

    @wraps(read_file)
    def read(
        path_or_url: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        is_path = isinstance(path_or_url, (str, Path))
        if is_path and (Path(path_or_url) / "manifest.json").is_file():
            from lightning_dpsparse.plugin.whole_checkpoints import read_directory

            return read_directory(Path(path_or_url), map_location, trust=weights_only is False)
        found: dict[str, Any] = read_file(path_or_url, map_location, weights_only)
        return found

    module.pl_load = read  # type: ignore[attr-defined]


class _FollowingFinder(MetaPathFinder):
    """Leaves every import to the other finders, and follows up on that of one module."""

    def __init__(self, name: str, follow_up: FollowUp) -> None:
        self._name, self._follow_up = name, follow_up

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _FollowingLoader(spec.loader, self._done)
        return spec

    def _done(self, module: ModuleType) -> None:
        sys.meta_path.remove(self)
        self._follow_up(module)


class _FollowingLoader(Loader):
    """Loads the module as its own loader would, then follows up."""

    def __init__(self, loader: Loader, done: FollowUp) -> None:
        self._loader, self._done = loader, done

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        # Only now: an import that failed, and is tried again, must pass here again.
        self._done(module)

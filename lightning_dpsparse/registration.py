"""`Trainer(strategy="dpsparse")` is known as soon as this package and Lightning are both imported.

Lightning finds a strategy by name in a registry of its own, and has no way for other packages to
announce theirs. Importing Lightning here, to write into that registry, would take seconds:
`lightning-dpsparse --help` would be slow, and `doctor` could not speak where Lightning is broken.
Those who need the name import Lightning anyway, before this package or after it. So:

- If Lightning's registry has been imported, the strategy is registered at once.
- If not, a finder waits on `sys.meta_path` for that one import, registers the strategy right after
  it, and goes away.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_REGISTRY = "lightning.pytorch.strategies"
"""The module of Lightning that holds the registry."""


def register_with_lightning() -> None:
    """Register the strategy now, or as soon as Lightning is imported."""
    if _REGISTRY in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _RegistryFinder())


def _register() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    StrategyRegistry.register("dpsparse", _make, "TorchRec sharded tables", override=True)


def _make(**kwargs: Any) -> Any:
    from lightning_dpsparse.plugin.strategy import DPSparseStrategy

    return DPSparseStrategy(**kwargs)


class _RegistryFinder(MetaPathFinder):
    """Leaves every import to the other finders, and follows up on that of Lightning's registry."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _REGISTRY:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader, self)
        return spec


class _RegisteringLoader(Loader):
    """Loads the module as its own loader would, then registers the strategy."""

    def __init__(self, loader: Loader, finder: _RegistryFinder) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        # Only now: an import that failed, and is tried again, must pass here again.
        sys.meta_path.remove(self._finder)
        _register()

"""Watches tables' weights that user code reads directly, past the lookup.

Under LazyDP most rows owe noise at any time. A lookup has its rows pay first, but code that takes
`collection.embedding_bags["t"].weight` itself would see rows that still owe. So a watched weight
calls back before any torch function reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_DATA: Any = Tensor.data.__get__  # type: ignore[attr-defined]
_HARMLESS: set[Any] = {
    *(
        getattr(torch._C.TensorBase, name).__get__
        for name in (
            "shape", "device", "dtype", "layout", "requires_grad", "grad", "grad_fn", "is_leaf",
            "ndim", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested",
            "is_mkldnn", "itemsize", "nbytes", "_version",
        )
    ),
    *(getattr(Tensor, n) for n in ("size", "dim", "numel", "stride", "element_size", "nelement")),
    *(getattr(Tensor, n) for n in ("is_floating_point", "is_complex", "data_ptr", "__len__")),
    *(getattr(Tensor, n) for n in ("storage_offset", "is_contiguous", "register_hook")),
}  # fmt: skip
"""Functions and properties of a weight that do not read its values."""


def watch_weights(collection: nn.Module, before_read: Callable[[], None]) -> Callable[[], None]:
    """Call `before_read` before any torch function reads a weight. Returns the undo function."""
    watched: list[tuple[Any, type]] = []
    for parameter in collection.parameters():
        kind = type(parameter)
        watched.append((parameter, kind))
        parameter.__class__ = _watched(kind, before_read)

    def undo() -> None:
        for parameter, kind in watched:
            parameter.__class__ = kind

    return undo


def _watched(kind: type, before_read: Callable[[], None]) -> Any:
    class WatchedWeight(kind):
        @classmethod
        def __torch_function__(
            cls,
            func: Callable[..., Any],
            types: Any,
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                if func not in _HARMLESS:
                    before_read()
                if func == _DATA:  # `detach` gives the same, and counts writes
                    return args[0].detach()
                return func(*args, **(kwargs or {}))

    return WatchedWeight

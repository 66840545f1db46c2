"""Full float32 precision for matrix products, whatever the user allows elsewhere.

PyTorch can be told to round the factors of float32 products, which is faster. The model may be run
that way, but norms and clipped sums may not: a clipped sum keeps its bound only if both are
computed from the same numbers. `step.py` computes them inside `whole_products`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def whole_products() -> Iterator[None]:
    """Make matrix products keep all bits of their factors inside this context.

    `torch.set_float32_matmul_precision("medium")`, which Lightning recommends on recent GPUs,
    rounds factors to 8 or 11 bits. A clipped sum would then exceed what its norms allow.
    """
    backends: Any = torch.backends
    settings = [backends.cuda.matmul, backends.mkldnn.matmul]
    before = [setting.fp32_precision for setting in settings]
    rounded = [(s, found) for s, found in zip(settings, before) if found not in ("ieee", "none")]
    try:
        for setting, _ in rounded:
            setting.fp32_precision = "ieee"
        yield
    finally:
        for setting, found in rounded:
            setting.fp32_precision = found

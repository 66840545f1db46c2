"""Torch's own generators, which layers and users' code draw from. No noise comes from them."""

from __future__ import annotations

import torch


def seed_torch(seed: int) -> None:
    """Like `torch.manual_seed`, but for devices in use alone.

    For each kind of device that is not in use, torch keeps the seed until it is, together with the
    text of the whole stack. That takes hundreds of times as long as to seed the processor, and
    changes what is drawn on that device later.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)

"""Checkpoint directories for those who know nothing of shards.

`Module.load_from_checkpoint`, and a Trainer with another strategy, expect one file with whole
tables. For a directory of this package (`sharded.checkpoint`) they get what the consolidated file
would hold. `registration` calls this.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_dpsparse.plugin import history  # noqa: F401 (weights that are loaded bring theirs)
from lightning_dpsparse.sharded.checkpoint import consolidate


def read_directory(path: Path, map_location: Any, *, trust: bool) -> dict[str, Any]:
    """Read a checkpoint directory as Lightning reads a file, with whole tables."""
    checkpoint = consolidate(path, trust=trust)
    if isinstance(map_location, (str, torch.device)):
        state = checkpoint["state_dict"]
        for name, value in state.items():
            state[name] = value.to(map_location)
    return checkpoint

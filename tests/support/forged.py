"""Checkpoints that somebody has changed on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_dpsparse.durable.manifest import (
    MANIFEST_NAME,
    Manifest,
    digest_file,
    read_manifest,
    write_manifest,
)


def signed(folder: Path, about: dict[str, Any] | None = None) -> None:
    """Make the manifest fit, as whoever forges a checkpoint would."""
    files = {p.name: digest_file(p) for p in folder.iterdir() if p.name != MANIFEST_NAME}
    known = read_manifest(folder).about if about is None else about
    write_manifest(folder, Manifest(files, known))

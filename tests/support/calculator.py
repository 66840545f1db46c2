"""The command line's calculator, asked for what programs read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_dpsparse.cli import main

RUN = ["--examples", "1000000", "--batch", "1024", "--steps", "10000", "--delta", "1e-6"]


def answer(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    """What a command prints with --json."""
    main([*args, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found

"""The command line in a process of its own, which need not import everything again.

It is forked from the server that holds TorchRec and Lightning (`tests/support/ranks.py`), and then
does what `python -m lightning_dpsparse` does. Tests of launchers start the real command instead.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.support.ranks import FORKED

_PATIENCE = 120.0  # seconds


@dataclass(frozen=True)
class Finished:
    """How a command ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def run_command(*args: str, cwd: Path | None = None) -> Finished:
    """`lightning-dpsparse` with these arguments, to its end."""
    return run_captured(_command, args, cwd=cwd)


def run_captured(fn: Callable[..., Any], *args: Any, cwd: Path | None = None) -> Finished:
    """`fn(*args)` in a process of its own, to its end; a `SystemExit` is how it may end."""
    with TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = FORKED.Process(target=_capture, args=(fn, args, cwd or Path.cwd(), out, err))
        process.start()
        process.join(_PATIENCE)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise TimeoutError(f"{args} did not end within {_PATIENCE} s:\n{err.read_text()}")
        return Finished(process.exitcode, out.read_text(), err.read_text())


def _capture(fn: Callable[..., Any], args: Any, cwd: Path, out: Path, err: Path) -> None:
    for path, stream in ((out, sys.stdout), (err, sys.stderr)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
    import torch

    torch.set_num_threads(1)
    os.chdir(cwd)
    fn(*args)


def _command(args: tuple[str, ...]) -> None:
    sys.argv = ["lightning_dpsparse", *args]
    runpy.run_module("lightning_dpsparse", run_name="__main__", alter_sys=True)

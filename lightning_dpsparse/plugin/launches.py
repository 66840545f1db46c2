"""Which launch a process belongs to, and whether it is a restart.

A launcher that starts a job again after a failure (torchrun, or a scheduler that puts a job back
into its queue) says so in environment variables. What the job spent before it failed must go on
being counted, so journals remember the launch that wrote them.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path


def launch_name() -> str | None:
    """A name that all restarts of a job share, and other jobs do not; None if there is no telling.

    >>> from unittest.mock import patch
    >>> with patch.dict(os.environ, {"SLURM_JOB_ID": "12"}, clear=True):
    ...     launch_name()
    'slurm 12'
    """
    settings = os.environ
    if "SLURM_JOB_ID" in settings:
        job = settings.get("SLURM_ARRAY_JOB_ID", settings["SLURM_JOB_ID"])
        words = ("slurm", settings.get("SLURM_CLUSTER_NAME"), job)
        return " ".join(w for w in (*words, settings.get("SLURM_ARRAY_TASK_ID")) if w)
    run = settings.get("TORCHELASTIC_RUN_ID")
    if run is None:
        return None
    if run not in ("", "none"):
        return f"torchrun {run}"
    # Without an id of its own, a launch is known by the process that starts all others.
    agent = os.getppid()
    return f"torchrun on {socket.gethostname()}, process {agent} of {_start_of(agent)}"


def is_restart() -> bool:
    """Whether the launcher says that it has started this job before."""
    counts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return any(
        os.environ.get(name, "0").isdecimal() and int(os.environ.get(name, "0")) > 0
        for name in counts
    )


def _start_of(process: int) -> str:
    """When a process was started, as its system counts; empty where that is not told."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""

"""`lightning-dpsparse doctor`: what is installed, and what is wrong with it.

Imports nothing heavy into this process: a broken FBGEMM can take its process down.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from importlib import metadata
from typing import Any

from lightning_dpsparse.version import __version__

_DISTRIBUTIONS = (
    "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "fbgemm-gpu-genai", "lightning",
    "pytorch-lightning", "torchmetrics", "jsonargparse", "pyarrow",
)  # fmt: skip

_PROBE = """
import json, torch
found = {"torch": torch.__version__, "cuda_build": torch.version.cuda}
found["cuda_devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
import torch.distributed as dist
found["backends"] = [n for n in ("gloo", "nccl") if getattr(dist, f"is_{n}_available")()]
print(json.dumps(found), flush=True)
"""
_LOOKUP = """
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen)
cuda = torch.cuda.is_available()
place = EmbeddingLocation.DEVICE if cuda else EmbeddingLocation.HOST
device = ComputeDevice.CUDA if cuda else ComputeDevice.CPU
tables = SplitTableBatchedEmbeddingBagsCodegen([(8, 4, place, device)])
at = "cuda" if cuda else "cpu"
tables(torch.tensor([1, 2], device=at), torch.tensor([0, 2], device=at)).sum().backward()
"""


def diagnose() -> dict[str, Any]:
    """Versions, backends and devices, with a list of problems in words."""
    versions = {name: _version(name) for name in _DISTRIBUTIONS}
    probe, failure = _run(_PROBE)
    found: dict[str, Any] = json.loads(probe) if failure is None else {}
    problems = package_problems(versions)
    if failure is not None:
        problems.append(f"torch does not import: {failure}. Reinstall it.")
    else:
        _, failure = _run(_LOOKUP)
        if failure is not None:
            problems.append(
                f"An FBGEMM lookup and update fail: {failure}. Reinstall fbgemm (README, Install)."
            )
        if found["cuda_devices"] and "nccl" not in found["backends"]:
            problems.append(
                "CUDA devices without NCCL: several GPUs cannot talk. Install a CUDA torch."
            )
    _, failure = _run("import lightning_dpsparse.plugin.strategy")
    if failure is not None and not problems:
        problems.append(
            f"The strategy does not import: {failure}. Reinstall lightning and torchrec."
        )
    return {
        "lightning_dpsparse": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "devices": found.get("cuda_devices") or ["cpu"],
        "cuda_build": found.get("cuda_build"),
        "backends": found.get("backends", []),
        "problems": problems,
    }


def package_problems(versions: dict[str, str | None]) -> list[str]:
    """What the installed distributions alone give away.

    Releases go in step: fbgemm 1.X is built for torch 2.(X+5).

    >>> fbgemm = {"fbgemm-gpu": "1.6.0", "fbgemm-gpu-cpu": None}
    >>> others = {"torch": "2.13.0", "torchrec": "1.8.0", "lightning": "2.6.6"}
    >>> package_problems(others | fbgemm)  # doctest: +ELLIPSIS
    ['fbgemm 1.6.0 is built for torch 2.11, found torch 2.13.0: ...']
    """
    problems = [
        f"{name} is not installed. Run: pip install -e . (CUDA) or make setup (CPU)."
        for name in ("torch", "torchrec", "lightning")
        if versions.get(name) is None
    ]
    cuda, cpu = versions.get("fbgemm-gpu"), versions.get("fbgemm-gpu-cpu")
    is_shim = cuda is not None and cuda.endswith("+cpu")
    if cuda is not None and cpu is not None and not is_shim:
        problems.append(
            f"Both fbgemm-gpu {cuda} (CUDA) and fbgemm-gpu-cpu {cpu} are installed: they share one "
            "folder, so neither is whole. Remove both, then install one of them (README, Install)."
        )
    fbgemm = cpu if is_shim or cuda is None else cuda
    if fbgemm is None:
        problems.append("No fbgemm is installed. On CPU: make setup. On CUDA: pip install -e .")
    elif versions.get("torch") is not None:
        torch_minor = _minor(str(versions["torch"]))
        if torch_minor != _minor(fbgemm) + 5:
            problems.append(
                f"fbgemm {fbgemm} is built for torch 2.{_minor(fbgemm) + 5}, found torch "
                f"{versions['torch']}: its kernels may crash. Install the matching pair."
            )
    return problems


def _minor(version: str) -> int:
    return int(version.split(".")[1])


def report(found: dict[str, Any]) -> str:
    """The diagnosis for people."""
    lines = [
        f"lightning_dpsparse {found['lightning_dpsparse']}, Python {found['python']}, "
        f"{found['platform']}",
        *(f"  {name:<20} {version or '-'}" for name, version in found["versions"].items()),
        f"  {'backends':<20} {', '.join(found['backends']) or 'none'}",
        f"  {'devices':<20} {', '.join(found['devices'])}"
        + (f" (CUDA {found['cuda_build']} build)" if found["cuda_build"] else ""),
    ]
    if found["problems"]:
        lines += ["", "Problems:", *(f"  - {problem}" for problem in found["problems"])]
    else:
        lines += ["", "No problem found."]
    return "\n".join(lines)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _run(code: str) -> tuple[str, str | None]:
    """Output of a child interpreter, and the last line of its complaint if it failed."""
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    if child.returncode == 0:
        return child.stdout.strip().splitlines()[-1] if child.stdout.strip() else "", None
    complaint = child.stderr.strip().splitlines()
    return "", complaint[-1] if complaint else f"exit code {child.returncode}"

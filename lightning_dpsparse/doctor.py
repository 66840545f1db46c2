"""`lightning-dpsparse doctor`: what is installed, and what is wrong with it.

TorchRec, FBGEMM and torch are built for each other, and a wrong pair fails late and strangely: a
missing symbol, a crash in a kernel. The doctor names the installed versions, says which sets of
them are supported (`versions.py`), and tries a lookup and the import of the strategy. It tries
them in child processes and imports nothing heavy into its own, because a broken FBGEMM can take its
process down. Every problem is told with a remedy.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from typing import Any

from lightning_dpsparse.version import __version__
from lightning_dpsparse.versions import (
    SUPPORTED_SETS,
    distribution_version,
    is_supported,
    members_of_set,
    show_supported,
    show_versions,
)

_DISTRIBUTIONS = (
    "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "fbgemm-gpu-genai", "lightning",
    "pytorch-lightning", "torchmetrics", "jsonargparse", "pyarrow",
)  # fmt: skip
_INSTALL = "On CPU run `make setup`, on CUDA run `pip install -e .` (README, Install)."

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
    versions = {name: distribution_version(name) for name in _DISTRIBUTIONS}
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
        "supported": [str(one) for one in SUPPORTED_SETS],
        "is_supported": is_supported(members_of_set(versions)),
        "devices": found.get("cuda_devices") or ["cpu"],
        "cuda_build": found.get("cuda_build"),
        "backends": found.get("backends", []),
        "problems": problems,
    }


def package_problems(versions: dict[str, str | None]) -> list[str]:
    """What is wrong with the installed distributions, judged by their versions alone.

    >>> fbgemm = {"fbgemm-gpu": "1.6.0", "fbgemm-gpu-cpu": None}
    >>> others = {"torch": "2.13.0", "torchrec": "1.8.0", "lightning": "2.6.6"}
    >>> package_problems(others | fbgemm)  # doctest: +ELLIPSIS
    ['fbgemm 1.6.0 is built for torch 2.11, found torch 2.13.0: ...']
    """
    problems = [
        f"{name} is not installed. {_INSTALL}"
        for name in ("torch", "torchrec", "lightning")
        if versions.get(name) is None
    ]
    cuda, cpu = versions.get("fbgemm-gpu"), versions.get("fbgemm-gpu-cpu")
    if cuda is not None and cpu is not None and not cuda.endswith("+cpu"):
        problems.append(
            f"Both fbgemm-gpu {cuda} (CUDA) and fbgemm-gpu-cpu {cpu} are installed: they share one "
            "folder, so neither is whole. Remove both, then install one of them (README, Install)."
        )
    installed = members_of_set(versions)
    torch, fbgemm = installed["torch"], installed["fbgemm"]
    if fbgemm is None:
        problems.append(f"No fbgemm is installed. {_INSTALL}")
    elif torch is not None and _minor(torch) != _minor(fbgemm) + 5:
        # Releases go in step: fbgemm 1.X is built for torch 2.(X+5).
        problems.append(
            f"fbgemm {fbgemm} is built for torch 2.{_minor(fbgemm) + 5}, found torch {torch}: its "
            f"kernels may crash. Install a supported set: {show_supported()}. {_INSTALL}"
        )
    if not problems and not is_supported(installed):
        problems.append(
            f"Expected a supported set of versions ({show_supported()}), found "
            f"{show_versions(installed)}: nobody has run the tests with it. {_INSTALL}"
        )
    return problems


def _minor(version: str) -> int:
    return int(version.split(".")[1])


def show_diagnosis(found: dict[str, Any]) -> str:
    """The diagnosis as text for people."""
    verdict = "yes" if found["is_supported"] else "NO"
    lines = [
        f"lightning_dpsparse {found['lightning_dpsparse']}, Python {found['python']}, "
        f"{found['platform']}",
        *(f"  {name:<20} {version or '-'}" for name, version in found["versions"].items()),
        f"  {'backends':<20} {', '.join(found['backends']) or 'none'}",
        f"  {'devices':<20} {', '.join(found['devices'])}"
        + (f" (CUDA {found['cuda_build']} build)" if found["cuda_build"] else ""),
        "",
        "Supported sets of versions:",
        *(f"  {one}" for one in found["supported"]),
        f"The installed set is supported: {verdict}.",
    ]
    if found["problems"]:
        lines += ["", "Problems:", *(f"  - {problem}" for problem in found["problems"])]
    else:
        lines += ["", "No problem found."]
    return "\n".join(lines)


def _run(code: str) -> tuple[str, str | None]:
    """The last line that a child interpreter prints, and the last line of its error if it fails."""
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    if child.returncode == 0:
        return child.stdout.strip().splitlines()[-1] if child.stdout.strip() else "", None
    complaint = child.stderr.strip().splitlines()
    return "", complaint[-1] if complaint else f"exit code {child.returncode}"

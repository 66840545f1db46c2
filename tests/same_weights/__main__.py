"""The commands `record`, `compare` and `against`."""

from __future__ import annotations

import argparse
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

import lightning_dpsparse
from tests.same_weights import __doc__ as description
from tests.same_weights.cases import all_cases
from tests.same_weights.ranks import Result, run_cases, same_bits

HERE = Path(__file__).parent


def main() -> int:
    options = _parser().parse_args()
    if options.list:
        print("\n".join(case.name for case in all_cases() if fnmatchcase(case.name, options.only)))
        return 0
    if options.command == "record":
        torch.save(_record(options.only), options.target)
        return 0
    if options.command == "compare":
        return _compare(torch.load(options.target), options)
    if options.command == "against":
        return _compare(_record_commit(options.target, options.only), options)
    _parser().print_help()
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.same_weights",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", nargs="?", choices=["record", "compare", "against"])
    parser.add_argument("target", nargs="?", help="a file of weights, or for `against` a commit")
    parser.add_argument("--only", default="*", help="pattern of the names of cases to run")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument(
        "--tolerance",
        action="append",
        default=[],
        metavar="PATTERN=NUMBER",
        help="largest difference that cases of these names may have; the last that fits counts",
    )
    return parser


def _record(only: str) -> dict[str, Any]:
    """Run the cases with the package that can be imported."""
    cases = [case for case in all_cases() if fnmatchcase(case.name, only)]
    with tempfile.TemporaryDirectory() as folder:
        results = run_cases(cases, Path(folder))
    refused = sum(isinstance(result, str) for result in results.values())
    print(f"{len(results)} cases ran, {refused} of which gave no weights.")
    for name, result in results.items():
        if isinstance(result, str) and result != "refused":
            print(f"{name}: {result}")
    machine = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    about = {"package": lightning_dpsparse.__file__, "machine": f"{machine}, {platform.machine()}"}
    return {"about": about, "cases": results}


def _record_commit(commit: str, only: str) -> dict[str, Any]:
    """Run the cases with another version of the package, in a process of its own."""
    archive = subprocess.run(
        ["git", "archive", commit], cwd=HERE.parents[1], check=True, capture_output=True
    ).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        copy, recorded = Path(folder, "tests", HERE.name), Path(folder, "recorded.pt")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(HERE, copy)
        command = [sys.executable, "-m", f"tests.{HERE.name}", "record", str(recorded)]
        environment = {**os.environ, "PYTHONPATH": folder}
        subprocess.run([*command, "--only", only], cwd=folder, env=environment, check=True)
        found = torch.load(recorded)
        assert Path(found["about"]["package"]).is_relative_to(folder), found["about"]
        return found


def _compare(before: dict[str, Any], options: argparse.Namespace) -> int:
    """Run the cases now, and say which differ. Returns 1 if any is beyond its tolerance."""
    now = _record(options.only)
    machines = [found["about"]["machine"] for found in (before, now)]
    if machines[0] != machines[1]:
        print(f"Recorded with {machines[0]}, compared with {machines[1]}: bits may differ.")
    tolerances = [text.rpartition("=") for text in options.tolerance]
    equal = within = beyond = 0
    old = {name: r for name, r in before["cases"].items() if fnmatchcase(name, options.only)}
    for name, result in old.items():
        size, what = _difference(result, now["cases"].get(name, "no longer a case"))
        fitting = [float(n) for pattern, _, n in tolerances if fnmatchcase(name, pattern)]
        if not what:
            equal += 1
        elif fitting and size <= fitting[-1]:
            within += 1
            print(f"{name}: {what}, which is tolerated")
        else:
            beyond += 1
            print(f"{name}: {what}")
    for name in sorted(set(now["cases"]) - set(old)):
        print(f"{name}: a new case, compared with nothing")
    tolerated = f" ({within} of them tolerated)" if within else ""
    print(f"{len(old)} cases: {equal} equal bit for bit, {within + beyond} differ{tolerated}")
    return 1 if beyond else 0


def _difference(before: Result, now: Result) -> tuple[float, str]:
    """The largest absolute difference, and a description of it that is empty if there is none."""
    if isinstance(before, str) or isinstance(now, str):
        shown = [r if isinstance(r, str) else "weights" for r in (before, now)]
        return torch.inf, "" if shown[0] == shown[1] else f"{shown[0]} before, {shown[1]} now"
    names = [*before, *(name for name in now if name not in before)]
    differing = [
        name
        for name in names
        if name not in before or name not in now or not same_bits(before[name], now[name])
    ]
    if not differing:
        return 0.0, ""
    largest = 0.0
    for name in differing:
        if name not in before or name not in now or before[name].shape != now[name].shape:
            return torch.inf, f"{name} is not in both, or of another shape"
        gap = (before[name].double() - now[name].double()).abs()
        largest = max(largest, gap.nan_to_num(torch.inf).max().item())
    return largest, (
        f"differs by up to {largest:.3g}, first in {differing[0]} "
        f"({len(differing)} of {len(names)} parameters)"
    )


if __name__ == "__main__":
    sys.exit(main())

"""The layers of the package import each other in one direction only; tests share no test module."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.module_imports import imports

PACKAGE = Path(__file__).parents[1] / "lightning_dpsparse"

# A layer may import those to its left, and itself.
ORDER = [
    "refused",
    "checks",
    "files",
    "command_line",
    "versions",
    "hashing",
    "durable",
    "noise",
    "accounting",
    "sampling",
    "engine",
    "mechanisms",
    "optimizers",
    "estimators",
    "plan",
    "run_plan",
    "prospects",
    "budget",
    "version",
    "report",
    "calculator",
    "sharded",
    "plugin",
    "registration",
    "data",
    "models",
    "recipe_files",
    "recipe",
    "audit",
    "doctor",
    "cli",
    "__main__",
    "__init__",
]

# Who may import what from outside.
ALLOWED = {
    "lightning": {"plugin", "models", "data", "recipe", "audit", "registration"},
    "torchrec": {"sharded", "models", "data", "audit"},
    "fbgemm_gpu": {"sharded"},
    "torch.distributed": {"sharded"},
    "dp_accounting": {"accounting"},
    "scipy": {"accounting", "estimators", "audit"},
    "sklearn": {"estimators"},  # where it calls, and never at import: it is no dependency
    "pyarrow": {"data"},
}

FILES = sorted(PACKAGE.rglob("*.py"))
REPOSITORY = PACKAGE.parent
OUTSIDE = sorted(
    p for folder in ("tests", "benchmarks") for p in (REPOSITORY / folder).rglob("*.py")
)


def layer(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_layer_imports_a_higher_one(path: Path) -> None:
    mine = layer(path)
    for name in imports(path):
        if name.startswith("lightning_dpsparse."):
            other = name.split(".")[1]
            if other in ORDER and mine != "__init__":
                assert ORDER.index(other) <= ORDER.index(mine), f"{mine} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_outside_packages_stay_in_their_layer(path: Path) -> None:
    for name in imports(path):
        for package, layers in ALLOWED.items():
            if name == package or name.startswith(package + "."):
                assert layer(path) in layers, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_hold_one_idea(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


def test_helpers_of_tests_are_in_support_and_not_in_a_test_module() -> None:
    """What a test module keeps moves and breaks with its tests; `tests/support` is shared."""
    found = [
        f"{path.relative_to(REPOSITORY)} imports {name}"
        for path in OUTSIDE
        for name in imports(path)
        if name.startswith("tests.") and any(part.startswith("test_") for part in name.split("."))
    ]
    assert len(OUTSIDE) > 100
    assert not found


def test_no_two_public_functions_share_a_name() -> None:
    homes: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    shared = {name: files for name, files in homes.items() if len(files) > 1}
    assert shared == {}

"""The table of supported versions, what is installed, and what `pyproject.toml` asks for."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from lightning_dpsparse.versions import (
    SUPPORTED_SETS,
    VersionSet,
    fbgemm_build,
    installed_versions,
    is_supported,
    show_supported,
    show_versions,
)

ROOT = Path(__file__).parents[1]

INSTALLED: dict[str, str | None] = {
    "torch": "2.13.0+cpu",
    "torchrec": "1.8.0",
    "fbgemm": "1.8.0",
    "lightning": "2.6.6",
}


def test_the_suite_runs_with_a_supported_set() -> None:
    found = installed_versions()
    assert None not in found.values()
    assert is_supported(found), show_versions(found)


@pytest.mark.parametrize(
    "change",
    [
        {"torch": "2.14.1"},
        {"torchrec": "1.80.0"},  # a prefix of numbers, not of letters
        {"fbgemm": "1.9.0"},
        {"lightning": "2.5.6"},
        {"lightning": None},
    ],
)
def test_one_version_outside_makes_the_set_unsupported(change: dict[str, str | None]) -> None:
    assert is_supported(INSTALLED)
    assert not is_supported(INSTALLED | change)


def test_versions_are_supported_as_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two sets in the table, a mixture of both is in neither."""
    newer = VersionSet(torch="2.14", torchrec="1.9", fbgemm="1.9", lightning="2.6")
    monkeypatch.setattr("lightning_dpsparse.versions.SUPPORTED_SETS", (newer, *SUPPORTED_SETS))
    assert is_supported({**INSTALLED, "torch": "2.14.1", "torchrec": "1.9.2", "fbgemm": "1.9.0"})
    assert is_supported(INSTALLED)
    assert not is_supported({**INSTALLED, "torchrec": "1.9.2"})
    assert "; or torch 2.13.*" in show_supported()


def test_the_stand_in_for_fbgemm_is_not_taken_for_fbgemm() -> None:
    assert fbgemm_build("1.8.0+cpu", None) is None
    assert fbgemm_build(None, "1.8.0") == "1.8.0"
    assert fbgemm_build("1.9.0", "1.8.0") == "1.9.0"


def test_pyproject_pins_the_newest_supported_set() -> None:
    """What pip may install is in the set, and the next minor version is not."""
    text = (ROOT / "pyproject.toml").read_text()
    lines = text.split("dependencies = [")[1].split("]\n")[0].splitlines()
    requirements = [Requirement(line.split('"')[1]) for line in lines if '"' in line]
    asked = {found.name.removesuffix("-gpu"): found.specifier for found in requirements}
    for name, prefix in asdict(SUPPORTED_SETS[0]).items():
        major, minor = prefix.split(".")
        version = installed_versions()[name]
        assert version is not None
        assert asked[name].contains(version.split("+")[0]), name
        assert not asked[name].contains(f"{major}.{int(minor) + 1}.0"), name
        assert not asked[name].contains(f"{major}.{int(minor) - 1}.9"), name


def test_the_table_can_be_asked_without_importing_torch() -> None:
    code = (
        "import sys; sys.argv = ['lightning-dpsparse']; import lightning_dpsparse.versions as v; "
        "v.installed_versions(); print([n for n in ('torch', 'lightning') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

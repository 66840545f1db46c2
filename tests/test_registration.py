"""The strategy is known by name, whatever is imported first and whatever program imports it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(code: str, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Code in a process of its own; `path` is where it finds modules first."""
    folders = [str(folder) for folder in (path, ROOT) if folder is not None]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(folders)}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=env,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    "imports",
    [
        "import lightning_dpsparse; from lightning.pytorch import Trainer",
        "from lightning.pytorch import Trainer; import lightning_dpsparse",
    ],
)
@pytest.mark.parametrize(
    "program", [pytest.param("train.py", marks=pytest.mark.slow), "lightning-dpsparse"]
)
def test_the_order_of_imports_and_the_program_do_not_matter(imports: str, program: str) -> None:
    found = run(
        f"import sys; sys.argv[0] = {program!r}; {imports}\n"
        "from lightning.pytorch.strategies import StrategyRegistry\n"
        "import lightning.pytorch.strategies as registry\n"
        "print('dpsparse' in StrategyRegistry, 'lightning_dpsparse.plugin' in sys.modules)\n"
        "print(type(registry.__loader__).__name__, type(registry.__spec__.loader).__name__)\n"
        "print([f for f in sys.meta_path if type(f).__module__.startswith('lightning')])"
    )
    assert found.stdout.splitlines() == [
        "True False",  # known, and not imported before it is used
        "SourceFileLoader SourceFileLoader",
        "[]",
    ], found.stderr


def test_help_waits_for_nothing_heavy() -> None:
    found = run(
        "import sys; from lightning_dpsparse.cli import main; main(['--help'])\n"
        "print([name for name in ('torch', 'lightning', 'numpy') if name in sys.modules])"
    )
    assert found.stdout.splitlines()[-1] == "[]", found.stderr


BROKEN = "raise ImportError('this Lightning is broken')\n"


def broken_lightning(folder: Path) -> Path:
    (folder / "lightning").mkdir()
    (folder / "lightning" / "__init__.py").write_text(BROKEN)
    return folder


def test_tools_speak_where_lightning_is_broken(tmp_path: Path) -> None:
    code = (
        "import sys; import lightning_dpsparse.doctor as doctor\n"
        "from lightning_dpsparse.cli import main\n"
        "doctor.diagnose = lambda: {'problems': []}\n"  # its own probes have tests of their own
        "main(sys.argv[1:])"
    )
    found = run(code, "doctor", "--json", path=broken_lightning(tmp_path))
    assert found.returncode == 0, found.stderr
    assert '"problems": []' in found.stdout


def test_an_import_that_failed_may_be_tried_again(tmp_path: Path) -> None:
    """Lightning breaks in the middle of its registry's module, is mended, and imported again."""
    pytorch = tmp_path / "lightning" / "pytorch"
    pytorch.mkdir(parents=True)
    for package in (pytorch.parent, pytorch):
        (package / "__init__.py").write_text("")
    registry = pytorch / "strategies.py"
    registry.write_text(BROKEN)
    mended = (
        "known = []\n"
        "class StrategyRegistry:\n"
        "    register = staticmethod(lambda name, *rest, **more: known.append(name))\n"
    )
    found = run(
        "import importlib, pathlib, sys; import lightning_dpsparse\n"
        "try: import lightning.pytorch.strategies\n"
        "except ImportError: print('broken')\n"
        "pathlib.Path(sys.argv[1]).write_text(sys.argv[2]); importlib.invalidate_caches()\n"
        "from lightning.pytorch.strategies import known; print(known)",
        str(registry),
        mended,
        path=tmp_path,
    )
    assert found.stdout.splitlines() == ["broken", "['dpsparse']"], found.stderr

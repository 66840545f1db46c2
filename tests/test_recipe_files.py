"""Recipes by name: in a checkout, and from a wheel that was really built and installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_dpsparse.cli import main
from lightning_dpsparse.recipe_files import find_recipe, list_recipes, shipped_recipes
from lightning_dpsparse.refused import Refused

ROOT = Path(__file__).parents[1]


def test_the_folder_at_the_top_is_the_one_in_the_package() -> None:
    """README and users write `recipes/dlrm_lazydp.yaml`."""
    assert (ROOT / "recipes").resolve() == ROOT / "lightning_dpsparse" / "recipes"
    assert set(shipped_recipes()) == {path.stem for path in (ROOT / "recipes").iterdir()}


def test_a_path_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_recipe("dlrm_lazydp") == shipped_recipes()["dlrm_lazydp"]
    Path("dlrm_lazydp").mkdir()  # a folder is no recipe
    assert find_recipe("dlrm_lazydp") == shipped_recipes()["dlrm_lazydp"]
    Path("pctr_fest").write_text("{}")
    assert find_recipe("pctr_fest") == Path("pctr_fest")


@pytest.mark.parametrize("word", ["dlrm_lazy_dp", "recipes/dlrm_lazydp.yaml", "dlrm_lazydp.yml"])
def test_a_name_that_is_nearly_right_is_corrected(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refused, match=f"found '{word}'.*Did you mean dlrm_lazydp") as caught:
        find_recipe(word)
    assert all(name in str(caught.value) for name in shipped_recipes())


def test_the_list_has_a_sentence_for_every_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    main(["recipes"])
    lines = capsys.readouterr().out.splitlines()
    assert lines == list_recipes().splitlines()
    assert [line.split()[0] for line in lines] == list(shipped_recipes())
    for line in lines:
        sentence = line.split(maxsplit=1)[1]
        assert sentence[0].isupper()
        assert sentence.endswith(".")
        assert len(line) <= 120


def test_a_recipe_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["recipes", "pctr_fest"])
    assert capsys.readouterr().out == shipped_recipes()["pctr_fest"].read_text()


FROM_THE_WHEEL = """
from pathlib import Path

import lightning_dpsparse
assert Path(lightning_dpsparse.__file__).parts[-3] == "site", lightning_dpsparse.__file__
from lightning_dpsparse.audit.command import _parser
from lightning_dpsparse.cli import main
from lightning_dpsparse.recipe_files import find_recipe
for audit in ("one-run", "secret-sharer"):
    assert find_recipe(_parser().parse_args([audit]).config).parts[-4] == "site"
assert (Path(lightning_dpsparse.__file__).parent / "py.typed").is_file()
main(["fit", "--config", "dlrm_lazydp", "--print_config"])
"""


@pytest.mark.slow  # it builds and installs a wheel; the first test says where recipes are
def test_a_wheel_has_the_recipes(tmp_path: Path) -> None:
    """About ten seconds, most of which pass while torch and Lightning are imported."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    # From a copy of what a wheel is made of: a build leaves its folders beside its source.
    source, package = tmp_path / "source", "lightning_dpsparse"
    shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [
        *pip,
        "wheel",
        "--no-index",
        "--no-build-isolation",
        "--no-deps",
        "--wheel-dir",
        "wheels",
        str(source),
    ]
    subprocess.run(build, cwd=tmp_path, check=True, timeout=120, capture_output=True)
    (wheel,) = (tmp_path / "wheels").iterdir()
    install = [
        *pip,
        "install",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--target",
        "site",
        str(wheel),
    ]
    subprocess.run(install, cwd=tmp_path, check=True, timeout=120, capture_output=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", FROM_THE_WHEEL],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "class_path: lightning_dpsparse.LazyDP" in done.stdout

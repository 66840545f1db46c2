"""The recipes that come with the package, and how `--config` finds one.

A recipe is a YAML file with a model, its data and a trainer. The package ships its recipes in the
folder `lightning_dpsparse/recipes`, so that an installed wheel has them too; `recipes` at the top
of a checkout is a symbolic link to that folder. A user may name a shipped recipe (`dlrm_lazydp`) or
give the path of a file. `recipe.py` reads what is found here.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from lightning_dpsparse.refused import Refused

_FOLDER = Path(__file__).parent / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """The file of every shipped recipe, by the recipe's name."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.yaml"))}


def find_recipe(name_or_path: str) -> Path:
    """The file that `--config` means. If there is a file at this path, it is taken before a name.

    >>> find_recipe("dlrm_lazydp").name
    'dlrm_lazydp.yaml'
    """
    if Path(name_or_path).is_file():
        return Path(name_or_path)
    shipped = shipped_recipes()
    if name_or_path in shipped:
        return shipped[name_or_path]
    raise Refused(
        "Expected the path of a recipe or the name of one that comes with the package, found "
        f"{name_or_path!r}: there is no such file or name. {_suggest_names(name_or_path)}"
    )


def recipe_text(name: str) -> str:
    """The YAML text of a shipped recipe."""
    shipped = shipped_recipes()
    if name not in shipped:
        raise Refused(
            "Expected the name of a recipe that comes with the package, found "
            f"{name!r}: there is no such name. {_suggest_names(name)}"
        )
    return shipped[name].read_text(encoding="utf-8")


def _suggest_names(word: str) -> str:
    names = list(shipped_recipes())
    close = get_close_matches(Path(word).stem, names, n=3)
    question = f"Did you mean {' or '.join(close)}? " if close else ""
    return f"{question}The names are {', '.join(names)}."


def list_recipes() -> str:
    """One line for each shipped recipe: its name, and the first line of its comment."""
    shipped = shipped_recipes()
    width = max(len(name) for name in shipped)
    return "\n".join(f"{name:<{width}}  {_summary(path)}" for name, path in shipped.items())


def _summary(path: Path) -> str:
    return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")

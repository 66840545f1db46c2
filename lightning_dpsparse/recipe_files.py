"""The recipes that come with the package, and how `--config` finds one.

A recipe is a YAML file with a model, its data and a trainer. The package ships its recipes in the
folder `lightning_dpsparse/recipes`, so that an installed wheel has them too; `recipes` at the top
of a checkout is a symbolic link to that folder. A user may name a shipped recipe (`dlrm_lazydp`) or
give the path of a file. `recipe.py` reads what is found here.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

import yaml

from lightning_dpsparse.refused import Refused

_DEEPEST, _LARGEST, _LONGEST = 50, 100_000, 4_000
"""Most settings inside of one another, most values, and longest value of a recipe."""
_FOLDER = Path(__file__).parent / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """The file of every shipped recipe, by the recipe's name."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.yaml"))}


def find_recipe(name_or_path: str) -> Path:
    """The file that `--config` means. If there is a file at this path, it is taken before a name.

    >>> find_recipe("dlrm_lazydp").name
    'dlrm_lazydp.yaml'
    """
    if _is_file(name_or_path):
        return Path(name_or_path)
    shipped = shipped_recipes()
    if name_or_path in shipped:
        return shipped[name_or_path]
    raise Refused(
        "Expected the path of a recipe or the name of one that comes with the package, found "
        f"{name_or_path!r}: there is no such file or name. {_suggest_names(name_or_path)}"
    )


def _is_file(name_or_path: str) -> bool:
    try:
        return Path(name_or_path).is_file()
    except (OSError, ValueError):  # a name that is too long, or that holds a zero byte
        return False


def check_recipe_text(text: str) -> None:
    """Refuse YAML that says a setting twice, or unfolds to more than any recipe has.

    YAML takes the last of two settings without a word, and a few lines of references can stand for
    billions of settings. What is no YAML at all is left to whoever reads it.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None:
            _size(root, {}, 0)
    except yaml.YAMLError:
        return
    except RecursionError as error:
        raise Refused(_too_much("settings inside of settings without end")) from error


def _size(node: yaml.Node, sizes: dict[int, int], depth: int) -> int:
    """Number of values that a node unfolds to. References count as often as they occur."""
    if sizes.get(id(node)) == 0 or depth > _DEEPEST:
        raise Refused(_too_much("settings that refer to themselves, or lie too deep"))
    if id(node) in sizes:
        return sizes[id(node)]
    sizes[id(node)] = 0  # as long as it is being counted
    size = 1
    if isinstance(node, yaml.MappingNode):
        names = [str(key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = [name for name in names if name != "<<" and names.count(name) > 1]
        if twice:
            raise Refused(
                f"Expected each setting of a recipe once, found {twice[0][:40]!r} twice from line "
                f"{node.start_mark.line + 1} on. Leave one of them out."
            )
        size += sum(_size(part, sizes, depth + 1) for pair in node.value for part in pair)
    elif isinstance(node, yaml.SequenceNode):
        size += sum(_size(part, sizes, depth + 1) for part in node.value)
    elif len(node.value) > _LONGEST:
        raise Refused(_too_much(f"a value of {len(node.value):,} characters"))
    if size > _LARGEST:
        raise Refused(_too_much(f"more than {_LARGEST:,} values"))
    sizes[id(node)] = size
    return size


def _too_much(found: str) -> str:
    return (
        f"Expected a recipe of a few settings, found {found}. Write them out, without references."
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

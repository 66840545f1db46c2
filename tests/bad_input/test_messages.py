"""Every refusal in the code says what was expected, what was found, and what to do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_dpsparse.checks import shown
from lightning_dpsparse.refused import Refused

PACKAGE = Path(__file__).parents[2] / "lightning_dpsparse"
FILES = sorted(PACKAGE.rglob("*.py"))
FORM = re.compile(r"Expected .+found .+[.?:)] (VALUE|[A-Z`'\"].*)", re.DOTALL)

# Messages without a remedy of their own, by the words that they begin with. None may be added.
WITHOUT_REMEDY = {
    "Expected a step of the schedule, found step",  # after the schedule nothing is left to do
    "Expected a key of VALUE bytes, found",  # no user makes keys
    "Expected VALUE to hold VALUE, found none",
    "Expected layers that treat each example by itself, found",  # the fault says what to use
}


def refusals(path: Path) -> Iterator[str]:
    """The messages of a file that are written out where they are raised."""
    for node in ast.walk(ast.parse(path.read_text())):
        is_refusal = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if is_refusal and node.func.id in ("Refused", "BudgetSpentError") and node.args:
            message = _text(node.args[0])
            if message != "VALUE":
                yield message


def _text(node: ast.AST) -> str:
    """A text as it is written, with VALUE for every value in it."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return "VALUE"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_every_refusal_has_a_remedy(path: Path) -> None:
    bad = [message for message in refusals(path) if not FORM.fullmatch(message)]
    assert [m for m in bad if not m.startswith(tuple(WITHOUT_REMEDY))] == []


def test_messages_are_found() -> None:
    assert sum(len(list(refusals(path))) for path in FILES) > 150


def test_a_refusal_is_one_line_that_can_be_seen() -> None:
    assert str(Refused("a\nb\x1b[31m\u202e ε")) == "a\\nb\\x1b[31m\\u202e ε"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("x" * 500, "'" + "x" * 78 + "…"),
        (10**400, "a number of 401 digits"),
        (b"secret", "bytes"),
        ({"a": ["b", {"c": [[[1]]]}]}, "{'a': ['b', {'c': [[…]]}]}"),
        (object(), "object"),
        (int, "the class int"),
    ],
)
def test_what_was_found_is_shown_in_short(value: object, words: str) -> None:
    assert shown(value) == words

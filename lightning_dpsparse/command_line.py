"""Options of commands: a parser whose errors are one line, and the types of numbers.

Argparse calls a type with the text of an option. It prints the message of an `ArgumentTypeError`,
and the name of the function for any other error, so every function here raises the former.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from typing_extensions import override

from lightning_dpsparse.checks import MOST, shown
from lightning_dpsparse.refused import spell_out

_LONGEST = 500  # characters of an error


class CommandParser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line, whatever was on the command line."""

    @override
    def error(self, message: str) -> NoReturn:
        said = spell_out(message)
        super().error(said if len(said) <= _LONGEST else f"{said[:_LONGEST]}…")


def whole_number(least: int, most: int = MOST) -> Callable[[str], int]:
    """The type of an option that is a whole number in this range."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:  # of too many digits, too
            number = least - 1
        if not least <= number <= most:
            bound = f"at least {least:,}" if number < least else f"at most {most:,}"
            raise argparse.ArgumentTypeError(
                f"expected a whole number of {bound}, found {shown(text)}"
            )
        return number

    return parse


def positive_number(text: str) -> float:
    """The type of an option that is a finite number above zero."""
    number = _number(text)
    if not 0.0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected more than 0, found {shown(text)}")
    return number


def probability(text: str) -> float:
    """The type of an option that is a number between 0 and 1, without both."""
    number = _number(text)
    if not 0.0 < number < 1.0:
        raise argparse.ArgumentTypeError(f"expected a number between 0 and 1, found {shown(text)}")
    return number


def some_path(text: str) -> Path:
    """The type of an option that names a file or a folder."""
    if not text.strip() or "\0" in text:
        raise argparse.ArgumentTypeError(f"expected a path, found {shown(text)}")
    return Path(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid float value: {shown(text)}") from None


# ---- errors of jsonargparse, which reads recipes -------------------------------------------------

_KEY = re.compile(r'(?:- )?Parser key "(?P<key>[^"]*)":$')
_VALUE = re.compile(r"(?:Got value|Given value): (?P<value>.*)$")
_NESTED = re.compile(r"NestedArg\(key='[^']*', val=(?P<value>.*)\)$")
_NOISE = ("Does not validate", "Subtypes:", "Errors:", "Given value", "Problem with given")


def in_one_line(message: str) -> str:
    """What is wrong with a setting of a recipe, from a page that jsonargparse says about it.

    A setting may be of several types, and the page tells of every type that was tried, the types
    inside of these, and so on, each further to the right. The rightmost key is what the user got
    wrong.

    >>> page = 'Parser key "trainer":\\n  Errors:\\n    - Expected a <class \\'str\\'>\\n'
    >>> page += '    - Parser key "max_steps":\\n       Expected a <class \\'int\\'>. Got value: 2x'
    >>> in_one_line(page)
    'trainer.max_steps: expected int, found 2x'
    """
    lines = [(len(line) - len(line.lstrip()), line.strip()) for line in message.splitlines()]
    path, reasons, at = _rightmost(lines)
    if not path or not reasons:
        return spell_out(" ".join(message.split()))
    unknown = next((reason for reason in reasons if reason.startswith("Option ")), None)
    if unknown is not None:
        return spell_out(f"{'.'.join(path)}: expected one of its settings, found: {unknown}")
    values = [found["value"] for _, line in lines[at:] if (found := _VALUE.search(line))]
    value = values[0] if values else ""
    nested = _NESTED.match(value)
    seen = f", found {nested['value'] if nested else value}" if value else ""
    return spell_out(f"{'.'.join(path)}: expected {' or '.join(dict.fromkeys(reasons))}{seen}")


def _rightmost(lines: list[tuple[int, str]]) -> tuple[list[str], list[str], int]:
    """The path of the rightmost key, what was expected there, and the number of its line."""
    best: tuple[int, list[str], int] = (-1, [], 0)
    stack: list[tuple[int, str]] = []
    for number, (indent, line) in enumerate(lines):
        found = _KEY.match(line)
        if found:
            stack = [(i, key) for i, key in stack if i < indent] + [(indent, found["key"])]
            if indent > best[0]:
                best = (indent, [key for _, key in stack], number)
    indent, path, at = best
    inside = []
    for deeper, line in lines[at + 1 :]:
        if line and deeper <= indent:
            break
        inside.append(line.removeprefix("- "))
    kept = [line for line in inside if line and not line.startswith(_NOISE) and line != "Errors:"]
    return path, [_expected(line) for line in kept if _is_reason(line)], at


def _is_reason(line: str) -> bool:
    return line.startswith(("Expected", "Not ", "Option ", "Key ", "Import", "Unexpected", "The "))


def _expected(line: str) -> str:
    """A line of jsonargparse's about one type, in fewer words."""
    if line.startswith(("Expected a path but", "Expected a dot import path")):
        return "the import path of a class"
    line = re.sub(r"\. Got value: .*$", "", line)
    line = re.sub(r"^Not a valid subclass of ", "a class derived from ", line)
    line = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", line)
    line = re.sub(r"typing\.Literal\[(.*?)\]", r"one of \1", line)
    line = line.replace("NoneType", "null")
    return re.sub(r"^Expected an? ", "", line)

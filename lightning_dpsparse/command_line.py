"""Options of commands: a parser whose errors are one line, and the types of numbers.

Argparse calls a type with the text of an option. It prints the message of an `ArgumentTypeError`,
and the name of the function for any other error, so every function here raises the former.
"""

from __future__ import annotations

import argparse
import math
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

"""How malformed input must end: in one line with what was expected, what was found, and a remedy.

A table of bad inputs has a row for each: who is given it, what it is, and words of the message. In
Python the end is a `Refused`; on the command line it is `error: ...` with exit code 1, or a usage
error with exit code 2. Anything else is a fault: another exception, a second line, no remedy.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from lightning_dpsparse.cli import main
from lightning_dpsparse.refused import Refused

NAN, INF = math.nan, math.inf
HUGE = 10**30
HUGER = 10**400

NOT_NUMBERS: tuple[Any, ...] = ("1.0", "x", True, None, [1.0], b"1", 1j, {}, HUGER)
NOT_FINITE: tuple[Any, ...] = (NAN, INF, -INF, *NOT_NUMBERS)
NOT_POSITIVE: tuple[Any, ...] = (*NOT_FINITE, -1.0, 0.0, 1e308, HUGE, 1e-300)
NEGATIVE: tuple[Any, ...] = (*NOT_FINITE, -1.0, 1e308, HUGE)
NOT_A_SHARE: tuple[Any, ...] = (*NOT_FINITE, -0.5, 1.5, 1e308)
NOT_WHOLE: tuple[Any, ...] = (NAN, INF, 1.5, 2.0, "3", "x", True, None, [3], 1e308, HUGE, -1)
NOT_COUNTS: tuple[Any, ...] = (*NOT_WHOLE, 0)
NOT_FLAGS: tuple[Any, ...] = ("yes", "false", 2, 1, None, [])
NOT_CHOICES: tuple[Any, ...] = ("nosuch", "", 3, True, [], NAN)
NOT_PATHS: tuple[Any, ...] = (3, "", "  ", b"x", [], "a\0b")
NOT_SIZES: tuple[Any, ...] = ([0], [-1], ["a"], [1.5], [True], "12", [HUGE], 3, [NAN], [None])

Row = tuple[Callable[..., Any], Mapping[str, Any], str]
"""Who is called, with which arguments, and words of the refusal."""

_MESSAGE = re.compile(r"Expected .+, found .+[.?] [A-Z`'\"].*[.?)\w]")


def rows(
    make: Callable[..., Any], base: Mapping[str, Any], field: str, values: Iterable[Any], words: str
) -> list[Any]:
    """A row for every bad value of one field, named after both."""
    name = getattr(make, "__name__", str(make))
    return [
        pytest.param(make, {**base, field: value}, words, id=f"{name}-{field}-{short(value)}")
        for value in values
    ]


def short(value: Any) -> str:
    """A value in a few letters, for the name of a test."""
    if isinstance(value, int) and abs(value) > 10**12:
        return f"1e{int(math.log10(abs(value)))}"
    text = f"{value}" if isinstance(value, (int, float)) else f"{type(value).__name__}_{value}"
    return re.sub(r"[^\w.+-]+", "_", text)[:24]


def assert_is_refusal(message: str, words: str) -> None:
    """A refusal is one line that says what was expected, what was found, and what to do."""
    assert _MESSAGE.fullmatch(message), message
    assert message.isprintable(), message
    assert words in message, message


def refused(call: Callable[[], Any], words: str) -> None:
    """The call ends in a `Refused`, and in no other exception."""
    with pytest.raises(Refused) as caught:
        call()
    assert_is_refusal(str(caught.value), words)


def ends_in_one_line(argv: Iterable[str], words: str) -> None:
    """The command ends with exit code 1 or 2, and one line that has these words."""
    code, said = run_main(argv)
    assert code is not None, f"accepted: {said}"
    if isinstance(code, str):
        assert code.startswith("error: ")
        assert_is_refusal(code.removeprefix("error: "), words)
        return
    assert code == 2, said
    assert "Traceback" not in said
    tail = said.partition("error: ")[2].strip()
    assert tail, said
    assert tail.isprintable(), tail
    assert words in tail, tail


def run_main(argv: Iterable[str]) -> tuple[str | int | None, str]:
    """The exit code of a command in this process (None without one), and what it said."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(list(argv))
        except SystemExit as end:
            return end.code, err.getvalue()
    return None, out.getvalue()

"""Checks of single settings: a number, a choice, a name, a list.

Python takes any value for any setting, and a wrong one shows late: `True` counts as one, NaN passes
every comparison that is not asked for, and a number that float32 cannot hold becomes infinite in
the first step. Each check here refuses such a value where it is set, in one sentence that names the
setting, what was expected and what was found. They are for settings, which may be shown, and never
for the values of examples.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NoReturn

from lightning_dpsparse.refused import Refused

LARGEST = 1e18
"""Largest number of a setting that goes into float32 arithmetic: its square is still finite."""
SMALLEST = 1e-18
"""Smallest such number that is not zero: its square is not rounded to zero."""
MOST = 2**63 - 1
"""Largest whole number that a tensor holds."""

_LONGEST, _DEEPEST = 80, 4
"""Most characters, and most lists inside of one another, of a value that is shown."""


def check_number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = LARGEST,
    smallest: float = SMALLEST,
    expected: str = "",
    remedy: str = "",
) -> None:
    """Refuse what is no finite number, or lies outside of these bounds. True is no number.

    Where zero is refused, what is below `smallest` is refused as well, unless `most` is None.

    >>> check_number("clip_norm", 1.0, above=0)
    >>> check_number("clip_norm", float("nan"), above=0)
    Traceback (most recent call last):
    ...
    lightning_dpsparse.refused.Refused: Expected clip_norm > 0, found nan. Set it to such a number.
    """
    low = above if least is None else least
    lower = "a finite number" if low is None else f"{'>' if least is None else '>='} {low:g}"
    if below is not None:
        lower = f"between {low or 0:g} and {below:g}"
    if not is_number(value) or not math.isfinite(float(value)):
        _refuse(name, lower, value, remedy, expected)
    number = float(value)
    is_inside = (above is None or number > above) and (least is None or number >= least)
    if not is_inside or (below is not None and not number < below):
        _refuse(name, lower, value, remedy, expected)
    if most is not None and not abs(number) <= most:
        _refuse(name, f"of at most {most:g}", value, remedy)
    if above == 0 and most is not None and number < smallest:
        _refuse(name, f"of at least {smallest:g}", value, remedy)


def check_share(name: str, value: Any, *, remedy: str = "") -> None:
    """Refuse what is no number from 0 to 1."""
    if not is_number(value) or not 0 <= float(value) <= 1:
        _refuse(name, "between 0 and 1", value, remedy)


def check_whole(
    name: str,
    value: Any,
    least: int = 1,
    most: int = MOST,
    *,
    expected: str = "",
    remedy: str = "",
) -> None:
    """Refuse what is no whole number from `least` to `most`. Neither True nor 3.0 is one.

    >>> check_whole("steps", 3.5)
    Traceback (most recent call last):
    ...
    lightning_dpsparse.refused.Refused: Expected steps >= 1, found 3.5. Set it to a whole number.
    """
    remedy = remedy or "Set it to a whole number."
    if not is_whole(value) or value < least:
        _refuse(name, f">= {least:,}", value, remedy, expected)
    if value > most:
        _refuse(name, f"of at most {most:,}", value, remedy)


def check_whole_list(
    name: str, values: Any, least: int = 1, most: int = MOST, *, remedy: str = ""
) -> None:
    """Refuse what is no list of whole numbers from `least` to `most`."""
    if not is_list(values) or not all(is_whole(v) and least <= v <= most for v in values):
        _refuse(name, f"of at least {least:,} each, in a list", values, remedy)


def check_choice(name: str, value: Any, choices: Iterable[Any], *, remedy: str = "") -> None:
    """Refuse what is none of the choices.

    >>> check_choice("kind", "lamb", ("sgd", "adam"))
    Traceback (most recent call last):
    ...
    lightning_dpsparse.refused.Refused: Expected kind 'sgd' or 'adam', found 'lamb'. Choose one.
    """
    known = [choice for choice in choices if choice is not None]
    if not any(type(value) is type(choice) and value == choice for choice in known):
        words = [repr(choice) for choice in known]
        said = f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]
        _refuse(name, said, value, remedy or "Choose one.")


def check_flag(name: str, value: Any) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        _refuse(name, "True or False", value, "Set it to one of the two.")


def check_text(name: str, value: Any, *, expected: str = "", remedy: str = "") -> None:
    """Refuse what is no text, and text that is blank."""
    if not isinstance(value, str) or not value.strip():
        _refuse(name, "to be text", value, remedy or "Write it out, in quotes.", expected)


def check_path(name: str, value: Any, *, remedy: str = "") -> None:
    """Refuse what cannot be the path of a file or folder."""
    is_path = isinstance(value, (str, os.PathLike)) and str(value).strip()
    if not is_path or "\0" in str(value):
        _refuse(name, "to be a path", value, remedy or "Name a file or a folder.")


def check_kind(name: str, value: Any, kind: type | tuple[type, ...], *, remedy: str = "") -> None:
    """Refuse what is no object of this class."""
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        said = " or ".join(one.__name__ for one in kinds)
        _refuse(name, f"to be a {said}", value, remedy or "Make one, and pass it.")


def check_names(name: str, values: Any, *, remedy: str = "") -> None:
    """Refuse what is no list of texts. One text alone would be read letter by letter."""
    if not is_list(values) or not all(isinstance(v, str) and v.strip() for v in values):
        _refuse(name, "to be a list of texts", values, remedy or "Write each in quotes.")


def check_mapping(name: str, value: Any, *, remedy: str = "") -> None:
    """Refuse what has no values by name."""
    if not isinstance(value, Mapping) or not all(isinstance(k, str) and k for k in value):
        _refuse(name, "to have values by name", value, remedy or "Write {name: value}.")


def is_number(value: Any) -> bool:
    """Whether a value is a real number that float64 can hold. True and False are none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number, by its type. True and False are none, nor is 3.0."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def shown(value: Any, depth: int = 0) -> str:
    """A setting in one short line. Of what may hold data, such as an array, only the type.

    >>> shown("lamb"), shown([1, None]), shown(10**50), shown(b"data")
    ("'lamb'", '[1, None]', 'a number of 51 digits', 'bytes')
    """
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**40:
        return f"a number of {int(math.log10(abs(value))) + 1:,} digits"
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return _cut(repr(value))
    if isinstance(value, Real):  # of numpy, whose repr names its type
        return str(value)
    if isinstance(value, (list, tuple, Mapping)) and depth > _DEEPEST:
        return "…"
    if isinstance(value, (list, tuple)):
        return _cut(f"[{', '.join(shown(v, depth + 1) for v in value[:_LONGEST])}]")
    if isinstance(value, Mapping):
        pairs = list(value.items())[:_LONGEST]
        return _cut("{" + ", ".join(f"{shown(k)}: {shown(v, depth + 1)}" for k, v in pairs) + "}")
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _refuse(name: str, bounds: str, value: Any, remedy: str, expected: str = "") -> NoReturn:
    raise Refused(
        f"Expected {expected or f'{name} {bounds}'}, found {shown(value)}. "
        f"{remedy or 'Set it to such a number.'}"
    )

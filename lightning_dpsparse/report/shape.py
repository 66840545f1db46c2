"""The shape that facts must have before a page is made of them.

Reports are handed around, and anybody may have changed one. A fact of another kind than the page
expects would end in the middle of it, and a number that is not finite would be drawn as nothing. So
all facts are looked at first, and whoever shows a report may rely on what is written here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from lightning_dpsparse.refused import Refused

FORMAT = 1

_LARGEST = 1e100
"""Largest number of a report. Larger ones cannot be drawn, and mean nothing."""
_DEEPEST = 12
"""Most lists and objects inside of one another."""


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def _count(value: Any) -> bool:
    return isinstance(value, int) and _number(value)


Check = Callable[[Any], bool]


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(check(item) for item in value)


def _pair(first: Check, second: Check) -> Check:
    return lambda v: isinstance(v, list) and len(v) == 2 and first(v[0]) and second(v[1])


def _fields(**checks: Check) -> Check:
    return lambda value: (
        isinstance(value, dict)
        and all(name in value and check(value[name]) for name, check in checks.items())
    )


def _texts_by_name(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(v, str) for v in value.values())


def _ran(value: Any) -> bool:
    """What ran: single values by name, and the settings of its parts in objects of their own."""
    needed = _fields(mechanism=_text, noise_multiplier=_number, steps=_count, steps_lost=_count)
    return needed(value) and all(
        isinstance(item, dict) if name.endswith("_settings") else not isinstance(item, (dict, list))
        for name, item in value.items()
    )


_SECTIONS: dict[str, Check] = {
    "run": _text,
    "created": _text,
    "guarantee": _fields(
        sentence=_text,
        is_private=_flag,
        epsilon=_or_none(_number),
        delta=_or_none(_number),
        unit=_text,
        adjacency=_text,
        threat_model=_text,
        faults=_list_of(_text),
    ),
    "target": _or_none(_fields(epsilon=_number, delta=_number)),
    "ran": _ran,
    "ledger": _list_of(_fields(event=_text, steps=_count, partition=_or_none(_text))),
    "epsilon_over_time": _list_of(_pair(_count, _or_none(_number))),
    "epsilon_for_delta": _list_of(_pair(_number, _or_none(_number))),
    "cross_check": _fields(
        accountant=_text, epsilon=_or_none(_number), rdp_epsilon=_or_none(_number)
    ),
    "taints": _list_of(_text),
    "not_covered": _list_of(_text),
    "audits": _list_of(
        _fields(
            name=_text,
            claimed_epsilon=_or_none(_number),
            measured_epsilon=_or_none(_number),
            confidence=_or_none(_number),
            passed=_flag,
        )
    ),
    "versions": _texts_by_name,
}
"""What every report has."""

_LATER: dict[str, Check] = {
    "assumptions": _list_of(_text),
    "history": _list_of(
        _fields(
            data=_or_none(_text),
            steps=_or_none(_count),
            run=_or_none(_text),
            ledger=_or_none(_text),
        )
    ),
    "exposures": _list_of(
        _fields(
            repeats=_count,
            canaries=_count,
            interpolation=_number,
            low=_number,
            high=_number,
            extrapolation=_number,
        )
    ),
}
"""What reports of older versions lack, or what only some have."""

_REMEDY = "Take the report of a checkpoint of the same run instead."


def check_facts(facts: Mapping[str, Any]) -> None:
    """Refuse facts of which no whole page can be made. No value of them is shown."""
    found = facts.get("format")
    if type(found) is not int or found != FORMAT:
        is_plain = found is None or isinstance(found, (int, float))
        said = repr(found)[:20] if is_plain else type(found).__name__
        raise Refused(
            f"Expected a privacy report of format {FORMAT}, found {said}. "
            "Read it with the version of lightning_dpsparse that wrote it."
        )
    missing = [name for name in _SECTIONS if name not in facts]
    if missing:
        raise Refused(
            f"Expected a whole privacy report, found one without {', '.join(missing)}. {_REMEDY}"
        )
    bad = [n for n, check in (_SECTIONS | _LATER).items() if n in facts and not check(facts[n])]
    if bad:
        raise Refused(
            f"Expected facts of a privacy report, found something else under {', '.join(bad)}. "
            f"{_REMEDY}"
        )
    for name, value in facts.items():
        if not _can_be_shown(name) or not _can_be_shown(value):
            raise Refused(
                "Expected finite numbers and whole characters in a privacy report, found something "
                f"else under {name[:40]!r}. {_REMEDY}"
            )


def _can_be_shown(value: Any, depth: int = 0) -> bool:
    if depth > _DEEPEST:
        return False
    if isinstance(value, Mapping):
        pairs = [item for pair in value.items() for item in pair]
        return all(isinstance(key, str) for key in value) and all(
            _can_be_shown(item, depth + 1) for item in pairs
        )
    if isinstance(value, (list, tuple)):
        return all(_can_be_shown(item, depth + 1) for item in value)
    if isinstance(value, str):
        return not any("\ud800" <= c <= "\udfff" for c in value)  # halves of a character
    if isinstance(value, (int, float)):
        return abs(value) <= _LARGEST and not math.isnan(value)
    return value is None

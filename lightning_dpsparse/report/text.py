"""How a value becomes text, and how the page says which fact a text shows.

Every value of a report passes `show`, so that it looks the same everywhere, and `escape`, so that
none can become markup. `leaf` puts a fact into an element that names it by its JSON pointer, by
which a test finds every fact on the page.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from lightning_dpsparse.refused import spell_out


def show(value: Any, null: str = "none") -> str:
    """A value as a reviewer reads it; the only place where values are formatted.

    Fractions have six digits and whole numbers have all of theirs. Characters that cannot be seen
    are spelled out, so that no text can hide its neighbours or turn them around.

    >>> [show(value) for value in (26_000_000, 2.13456789, 1e-8, 65536.0, True, None)]
    ['26,000,000', '2.13457', '1e-08', '65,536', 'yes', 'none']
    >>> show(None, null="unbounded")
    'unbounded'
    """
    if value is None:
        return null
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        # ".6g" would cut an expected batch of 1,234,567 short.
        is_whole = value.is_integer() or abs(value) >= 1e5
        return f"{value:,.0f}" if is_whole and abs(value) < 1e15 else f"{value:,.6g}"
    return "\n".join(spell_out(line) for line in str(value).split("\n"))


def escape(value: Any, null: str = "none") -> str:
    """A value as HTML text or as the value of a quoted attribute."""
    return html.escape(show(value, null))


def leaf(facts: Mapping[str, Any], *path: str | int) -> str:
    """The fact at `path`, in an element that names it by its JSON pointer (RFC 6901)."""
    value: Any = facts
    for key in path:
        value = value[key]
    keys = [str(key).replace("~", "~0").replace("/", "~1") for key in path]
    null = "unbounded" if _is_epsilon(path) else "none"
    return f'<span data-fact="{escape("/" + "/".join(keys))}">{escape(value, null)}</span>'


def _is_epsilon(path: tuple[str | int, ...]) -> bool:
    """Whether a null at `path` means that epsilon is unbounded."""
    if path[0] in ("epsilon_over_time", "epsilon_for_delta"):
        return path[-1] == 1
    # In a mechanism's settings, null is a choice that was not made.
    return path[0] != "ran" and str(path[-1]).endswith("epsilon")

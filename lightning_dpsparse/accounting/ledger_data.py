"""The shape of a ledger in a file.

Journals and checkpoints hold a ledger as plain data, and people hand them around. `ledger.py` reads
one only if it has this shape: a ledger that was misread would undercharge.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_dpsparse.checks import check_whole, is_list, shown
from lightning_dpsparse.refused import Refused

_OTHER = "Take the ledger of another checkpoint of the run."


def check_ledger_data(data: Any) -> None:
    """Refuse data that is no ledger. Its events are checked where they are read (`events.py`)."""
    _check_keys("a ledger", data, ("run", "entries", "steps", "lost", "protects"))
    _check_text("run", data["run"])
    if data["protects"] is not None:
        _check_text("protects", data["protects"])
    for name in ("steps", "lost"):
        check_whole(name, data[name], 0, remedy=_OTHER)
    if not is_list(data["entries"]):
        raise Refused(f"Expected a ledger's entries, found {shown(data['entries'])}. {_OTHER}")
    for entry in data["entries"]:
        _check_keys("an entry of a ledger", entry, ("event", "count", "partition"))
        check_whole("count", entry["count"], remedy=_OTHER)
        check_whole("steps", entry.get("steps", 0), 0, remedy=_OTHER)
        if entry["partition"] is not None:
            _check_text("partition", entry["partition"])
    paid = sum(entry.get("steps", 0) for entry in data["entries"])
    if max(data["lost"], paid) > data["steps"]:
        raise Refused(
            f"Expected no more steps lost, or paid for by entries, than the {data['steps']:,} of "
            f"the ledger, found {data['lost']:,} and {paid:,}. {_OTHER}"
        )


def _check_keys(what: str, data: Any, keys: tuple[str, ...]) -> None:
    if not isinstance(data, Mapping) or not all(key in data for key in keys):
        found = f"only {shown(list(data))}" if isinstance(data, Mapping) else shown(data)
        raise Refused(f"Expected {what} with {', '.join(keys)}, found {found}. {_OTHER}")


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise Refused(f"Expected {name} of a ledger to be text, found {shown(value)}. {_OTHER}")

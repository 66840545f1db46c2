"""The privacy report: the facts of a run, as JSON for programs and one HTML page for a reviewer.

A guarantee is worth what a reviewer can check. `facts.py` collects what a run did and claims,
`page.py` turns it into a page whose sections follow a published checklist, and the functions here
write, read and extend the two files. The page needs no network, because it holds its style
(`style.py`) and its drawing (`plot.py`) itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_dpsparse.durable.files import make_folder, write_files
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.report.page import page
from lightning_dpsparse.report.shape import check_facts
from lightning_dpsparse.report.text import show

__all__ = ["add_audit", "add_exposures", "read", "render", "show", "write"]

JSON_NAME, HTML_NAME = "privacy_report.json", "privacy_report.html"


def render(facts: Mapping[str, Any]) -> str:
    """The report as one self-contained HTML page.

    Guarantees: every leaf of `facts` is in the page's text, as `show` formats it, inside an element
    whose `data-fact` is the leaf's JSON pointer; no text of `facts` becomes markup; the page never
    calls a run private whose epsilon is unbounded or that has a fault.
    Reference: Ponomareva et al. 2023, section 5.3 (arXiv:2303.00654).
    """
    check_facts(facts)
    return page(facts)


def write(facts: Mapping[str, Any], folder: Path) -> None:
    """Write `privacy_report.json` and `privacy_report.html` into `folder`.

    Guarantees: a reader finds each file whole, old or new, after a power cut too; neither changes
    unless both could be made. A number that is not finite is refused.
    """
    check_facts(facts)
    data = json.dumps(dict(facts), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    texts = {JSON_NAME: data.encode(), HTML_NAME: render(facts).encode()}
    try:
        write_files(make_folder(folder), texts)
    except OSError as error:
        raise Refused(
            f"Expected to write the privacy report into {str(folder)!r}, found that it failed: "
            f"{error.strerror or error}. What was there before is untouched. Make the disk "
            "writable, with room on it, and go on from the last checkpoint."
        ) from error


def read(folder: Path) -> dict[str, Any]:
    """The facts that `write` put into `folder`."""
    path = folder / JSON_NAME
    if not _is_file(path):
        raise Refused(
            f"Expected {JSON_NAME} in {folder}, found none. Name the folder of a private run."
        )
    try:
        found = json.loads(path.read_bytes(), object_pairs_hook=_each_once)
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Refused(
            f"Expected a privacy report as JSON in {path}, found something else. Take the report "
            "of a checkpoint of the same run instead."
        )
    return found


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, or that holds a zero byte
        return False


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs as an object. A fact that is there twice would be read in two ways."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice")
    return found


def add_audit(folder: Path, audit: Mapping[str, Any]) -> None:
    """Add the result of an audit to the report in `folder`."""
    facts = read(folder)
    check_facts(facts)
    write({**facts, "audits": [*facts["audits"], dict(audit)]}, folder)


def add_exposures(folder: Path, exposures: Sequence[Mapping[str, Any]]) -> None:
    """Add the exposures of canaries to the report in `folder`, if there is one."""
    if (folder / JSON_NAME).is_file():
        write({**read(folder), "exposures": [dict(exposure) for exposure in exposures]}, folder)

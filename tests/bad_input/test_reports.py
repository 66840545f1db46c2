"""Reports and ledgers that somebody changed: one thing in each is of another kind, or missing."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_dpsparse import report
from lightning_dpsparse.accounting.events import (
    composed,
    event_from_data,
    event_to_data,
    exponential,
    gaussian,
    gumbel,
    poisson_examples_of_user,
    poisson_gaussian,
    truncated_poisson_gaussian,
)
from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.refused import Refused
from tests.support.bad_files import small_facts, small_ledger
from tests.support.bad_input import (
    HUGE,
    HUGER,
    INF,
    NAN,
    assert_is_refusal,
    ends_in_one_line,
    refused,
    run_main,
)

FACTS = small_facts()
LEDGER = small_ledger().to_data()
MISSING = object()
ESCAPES = "\x1b[31mHOSTILE\x07\x9b\u202e\u2028\r\n</script>"
OTHERS = (None, True, -1, 0, 1e308, HUGER, "x", [], {}, [1], {"a": 1}, NAN, INF, [[]], ESCAPES)


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in some facts, and the first items of lists only."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:1])
    for key, item in items if isinstance(value, (dict, list)) else ():
        yield from (paths(item, (*path, key)) if isinstance(item, (dict, list)) else [(*path, key)])


def changed(facts: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of the facts with another value, or none, at one place."""
    if not path:
        return value
    facts = copy.deepcopy(facts)
    place = facts
    for key in path[:-1]:
        place = place[key]
    if value is MISSING:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return facts


def written(folder: Path, facts: Any) -> Path:
    (folder / report.JSON_NAME).write_text(json.dumps(facts))
    return folder


@pytest.mark.parametrize("path", list(paths(FACTS)), ids=lambda p: "/".join(map(str, p)) or "all")
def test_a_changed_report_is_shown_or_refused(path: tuple[Any, ...], tmp_path: Path) -> None:
    """It is never half a page, another exception, or a character that steers the terminal."""
    for value in (*OTHERS, MISSING):
        if value is MISSING and not path:
            continue
        code, said = run_main(["report", str(written(tmp_path, changed(FACTS, path, value)))])
        assert all(line.isprintable() for line in said.splitlines()), (path, said)
        assert code is None or isinstance(code, str), (path, value)
        if isinstance(code, str):
            assert_is_refusal(code.removeprefix("error: "), "")
            assert "HOSTILE" not in code  # no fact is shown of what is refused


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), 2),
        (("format",), True),
        (("format",), "1"),
        (("run",), 3),
        (("guarantee",), []),
        (("guarantee", "epsilon"), "x"),
        (("guarantee", "epsilon"), -1),
        (("guarantee", "epsilon"), HUGER),
        (("guarantee", "delta"), NAN),
        (("guarantee", "is_private"), "yes"),
        (("guarantee", "faults"), "none"),
        (("guarantee", "sentence"), MISSING),
        (("target",), 3),
        (("target", "epsilon"), None),
        (("ran",), []),
        (("ran", "steps"), 1.5),
        (("ran", "mechanism"), MISSING),
        (("ran", "mechanism_settings"), 3),
        (("ran", "clip_norm"), INF),
        (("ledger",), {}),
        (("ledger", 0), "x"),
        (("ledger", 0, "steps"), "x"),
        (("epsilon_over_time", 0), [1]),
        (("epsilon_over_time", 0, 1), "x"),
        (("epsilon_for_delta",), "x"),
        (("cross_check",), {}),
        (("taints",), "text"),
        (("taints", 0), 3),
        (("audits", 0, "passed"), "yes"),
        (("audits", 0), None),
        (("history", 0), {}),
        (("exposures", 0, "high"), NAN),
        (("versions",), []),
        (("versions",), MISSING),
        (("run",), "\ud800"),
    ],
)
def test_what_no_page_can_be_made_of_is_refused(path: Any, value: Any, tmp_path: Path) -> None:
    facts = changed(FACTS, path, value)
    refused(lambda: report.render(facts), "privacy report")
    refused(lambda: report.write(facts, tmp_path / "new"), "privacy report")
    assert not (tmp_path / "new").exists()
    ends_in_one_line(["report", str(written(tmp_path, facts))], "privacy report")


RAW = {
    "empty": b"",
    "bytes": b"\xff\xfe",
    "a list": b"[]",
    "nan": b"NaN",
    "cut": json.dumps(FACTS).encode()[:200],
    "deep": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "one name twice": b'{"format": 1, ' + json.dumps(FACTS).encode()[1:],
    "many digits": b'{"format": ' + b"9" * 5000 + b"}",
    "byte order mark": b"\xef\xbb\xbf[]",
}


@pytest.mark.parametrize("name", RAW)
def test_a_file_that_is_no_report_is_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / report.JSON_NAME).write_bytes(RAW[name])
    for words in ((), ("--json",)):
        ends_in_one_line(["report", str(tmp_path), *words], "Take the report of a checkpoint")
    ends_in_one_line(["audit", "one-run", "--report", str(tmp_path)], "Take the report")


def test_folders_without_a_report_are_one_line(tmp_path: Path) -> None:
    (tmp_path / report.JSON_NAME).mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / report.JSON_NAME).symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file", tmp_path / "none", "a" * 5000, "a\0b", ""):
        ends_in_one_line(["report", str(path)], "found")


def test_no_text_of_a_report_steers_the_terminal(tmp_path: Path) -> None:
    """Escapes, bells, turned text and further lines are spelled out, or the report is refused."""
    hostile = copy.deepcopy(FACTS)
    hostile["guarantee"] |= dict.fromkeys(("sentence", "unit", "adjacency"), ESCAPES)
    hostile["ran"]["mechanism"] = ESCAPES
    hostile["taints"] = [ESCAPES, "fine"]
    code, said = run_main(["report", str(written(tmp_path, hostile))])
    assert code is None
    assert said.count("\\x1b[31mHOSTILE\\x07\\x9b\\u202e\\u2028\\r\\n") == 5
    assert len(said.splitlines()) == 6  # what the report says takes no line more
    assert all(line.isprintable() for line in said.splitlines())
    code, said = run_main(["report", str(tmp_path), "--json"])
    assert json.loads(said) == hostile
    assert said.replace("\n", "").isprintable()


def test_no_hostile_text_is_markup(tmp_path: Path) -> None:
    hostile = copy.deepcopy(FACTS)
    hostile["taints"] = ["<script>alert(1)</script>", "\x1b]0;title\x07", '"><img src=x onerror=y>']
    hostile["ran"]["mechanism_settings"] = {"<b>": "<i>", "nested": {"<u>": ["<s>"]}}
    hostile["versions"] = {"<b>": "<i>"}
    page = report.render(hostile)
    for tag in ("<script", "<img", "<b>", "<i>", "<u>", "<s>", "\x1b", "\x07"):
        assert tag not in page
    folder = tmp_path / "\x1b[31m"
    folder.mkdir()
    code, said = run_main(["report", str(written(folder, hostile))])
    assert (code, "\x1b" in said) == (None, False)


# ---- ledgers -------------------------------------------------------------------------------------

EVENTS = [
    gaussian(1.0),
    poisson_gaussian(0.1, 1.0),
    truncated_poisson_gaussian(100, 0.1, 20, 1.0),
    poisson_examples_of_user(3, 0.1, 1.0),
    composed([(gaussian(1.0), 3), (exponential(1.0), 2), (gumbel(0.5), 1)]),
]


@pytest.mark.parametrize("path", list(paths(LEDGER)), ids=lambda p: "/".join(map(str, p)) or "all")
def test_a_changed_ledger_is_read_or_refused(path: tuple[Any, ...]) -> None:
    for value in (*OTHERS, HUGE, MISSING):
        if value is MISSING and not path:
            continue
        try:
            ledger = Ledger.from_data(changed(LEDGER, path, value))
            assert ledger.epsilon(1e-6) >= 0 if ledger.entries else True
        except Refused as refusal:
            assert_is_refusal(str(refusal), "")


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_a_changed_event_is_read_or_refused(event: Any) -> None:
    data = event_to_data(event)
    assert event_from_data(data) == event
    names = ("DpEvent", "Mapping", "NoOpDpEvent", "os", "__class__", "EventBuilder")
    for path in paths(data):
        for value in (*OTHERS, *names, HUGE, MISSING):
            if value is MISSING and not path:
                continue
            try:
                event_from_data(changed(data, path, value))
            except Refused as refusal:
                assert_is_refusal(str(refusal), "")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ((), [], "a ledger with run"),
        (("run",), 3, "run of a ledger"),
        (("steps",), -1, "steps >= 0"),
        (("steps",), "10", "steps >= 0"),
        (("steps",), 3, "no more steps lost, or paid for"),
        (("lost",), 11, "no more steps lost, or paid for"),
        (("entries",), {}, "entries"),
        (("entries", 0), None, "an entry of a ledger"),
        (("entries", 0, "count"), 0, "count >= 1"),
        (("entries", 0, "partition"), 3, "partition"),
        (("entries", 0, "event"), "x", "a privacy event"),
        (("entries", 0, "event", "module_name"), "os", "an event of dp_accounting"),
        (("entries", 0, "event", "class_name"), "system", "an event's class"),
        (("entries", 0, "event", "sampling_probability"), 2.0, "sampling_probability"),
        (("entries", 0, "event", "event", "noise_multiplier"), NAN, "noise_multiplier"),
        (("entries", 0, "event", "event", "noise_multiplier"), MISSING, "a privacy event"),
        (("entries", 0, "event", "event", "nosuch"), 3, "a privacy event"),
    ],
)
def test_a_ledger_of_another_shape_is_refused(path: Any, value: Any, words: str) -> None:
    refused(lambda: Ledger.from_data(changed(LEDGER, path, value)), words)


def test_events_without_end_are_refused() -> None:
    deep: Any = event_to_data(gaussian(1.0))
    for _ in range(2000):
        deep = {"module_name": "dp_accounting.dp_event", "class_name": "SelfComposedDpEvent",
                "count": 1, "event": deep}  # fmt: skip
    refused(lambda: event_from_data(deep), "a privacy event")

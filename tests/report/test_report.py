"""The privacy report: every fact is on the page, as text, and nothing else gets in."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dpsparse import report
from lightning_dpsparse.durable import files
from lightning_dpsparse.refused import Refused
from lightning_dpsparse.report.plot import draw_epsilon_curve
from lightning_dpsparse.report.text import show
from tests.support.module_imports import imports

HOSTILE = "</span><script>alert(1)</script> & \"x\" <img src=http://a.b/c onerror='alert(2)'>"
VOID = {"meta", "br", "line", "path", "polyline", "circle"}
Facts = dict[str, Any]
Make = Callable[[], Facts]
Browse = Callable[[Path], tuple[str, list[str]]]


# fmt: off
def private_facts() -> Facts:
    return {
        "format": 1, "created": "2026-11-16T06:30:00+00:00", "run": "3f2a9c0d",
        "guarantee": {
            "sentence": "The released model is (2.13457, 1e-08)-differentially private per user.",
            "is_private": True, "epsilon": 2.13456789, "delta": 1e-8, "unit": "user",
            "adjacency": "add or remove all examples of one user",
            "threat_model": "central: an attacker sees the final model and every checkpoint",
            "faults": [],
        },
        "target": {"epsilon": 3.0, "delta": 1.5e-8},
        "ran": {
            "mechanism": "AdaFEST",
            "mechanism_settings": {"threshold": 4.0, "noise_ratio": 5.25, "exact": False},
            "clipping": "flat", "clip_norm": 0.75, "noise_multiplier": 0.8125,
            "noise_stddev": 0.609375, "noise_source": "secure", "sampling": "poisson",
            "num_units": 45_840_617, "sampling_rate": 0.00142968, "expected_batch": 65537.0,
            "max_batch": None, "steps": 7000, "steps_lost": 17, "steps_planned": 7200, "ranks": 8,
            "rounding_price": 0.00289,
        },
        "ledger": [
            {"event": "Poisson(0.00142968, Gaussian(0.8125))", "steps": 7000, "partition": None},
            {"event": "Gaussian(12.5)", "steps": 1, "partition": "day_3"},
        ],
        "epsilon_over_time": [[i * 350, 2.13456789 * (i / 20) ** 0.5] for i in range(1, 21)],
        "epsilon_for_delta": [[1e-6, 1.75], [1e-7, 1.95], [1e-10, 2.625], [0.0, None]],
        "cross_check": {"accountant": "PLD", "epsilon": 2.13456789, "rdp_epsilon": 2.40625},
        "taints": [],
        "assumptions": ["That no example's loss depends on other examples: read by two people."],
        "history": [
            {"data": "d41d8cd98f00b204", "steps": 300, "run": None, "ledger": None},
            {"data": "0cc175b9c0f1b6a8", "steps": 7000, "run": "3f2a9c0d", "ledger": "92eb5ffe"},
        ],
        "not_covered": ["Learning rate chosen by hand.", "Validation metrics."],
        "audits": [{"name": "canaries", "claimed_epsilon": 2.13456789, "measured_epsilon": 0.3125,
                    "confidence": 0.95, "passed": True}],
        "versions": {"lightning_dpsparse": "0.2.0", "torch": "2.13.1", "dp-accounting": "0.5.0"},
    }
# fmt: on


def tainted_facts() -> Facts:
    facts = private_facts()
    facts |= {"taints": ["The vocabulary was counted from the training data."], "audits": []}
    facts["ran"]["mechanism_settings"] = {"inner_epsilon": None}
    return facts


def broken_facts() -> Facts:
    facts = private_facts()
    facts["guarantee"] |= {"sentence": "No guarantee.", "is_private": False, "epsilon": None}
    facts["guarantee"] |= {"delta": None, "faults": ["No noise.", "Fixed noise key."]}
    facts["cross_check"] |= {"epsilon": None, "rdp_epsilon": None}
    facts["ran"] |= {"mechanism_settings": {}, "sampling_rate": None}
    facts.update(target=None, ledger=[], epsilon_over_time=[], epsilon_for_delta=[], not_covered=[])
    facts.update(assumptions=[], history=[])
    facts["audits"][0] |= {"claimed_epsilon": None, "measured_epsilon": 41.5, "passed": False}
    return facts


def hostile_facts(text: str = HOSTILE) -> Facts:
    """Facts whose every string, and every free key, is `text`, made different by a number."""
    count = iter(range(1000))

    def change(value: Any) -> Any:
        if isinstance(value, list):
            return [change(item) for item in value]
        if isinstance(value, dict):
            return {key: change(item) for key, item in value.items()}
        return f"{text}{next(count)}" if isinstance(value, str) else value

    facts: Facts = change(tainted_facts())
    facts["guarantee"]["faults"] = [text]
    facts["audits"] = change(private_facts()["audits"])
    facts["ran"]["mechanism_settings"] = {f"{text}{i}": i for i in range(2)}
    facts["versions"] = {f"{text}{i}": "1" for i in range(2)}
    return facts


CASES = [private_facts, tainted_facts, broken_facts, hostile_facts]
each_case = pytest.mark.parametrize("make", CASES, ids=["private", "tainted", "broken", "hostile"])


class Page(HTMLParser):
    """Elements, attributes, visible text, and the text of every element that names a fact."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = self.style = self._collected = ""
        self.facts: dict[str, set[str]] = {}
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(source)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append((tag, dict(attrs)))
        self._collected = ""

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        opened, attributes = self._open.pop()
        assert opened == tag, f"<{opened}> closed by </{tag}>"
        if "data-fact" in attributes:
            self.facts.setdefault(str(attributes["data-fact"]), set()).add(self._collected)

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1][0] == "style":
            self.style += data
        elif not any(tag == "head" for tag, _ in self._open):
            self.text += data
            self._collected += data


def leaves(value: Any, pointer: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its JSON pointer."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, f"{pointer}/{str(key).replace('~', '~0').replace('/', '~1')}")
    else:
        yield pointer, value


def shown(facts: Facts) -> dict[str, set[str]]:
    """What the page must say: the text of each leaf, and no other leaf."""
    epsilon = re.compile(
        r"/guarantee/epsilon|/cross_check/(rdp_)?epsilon|/audits/\d+/claimed_epsilon"
        r"|/epsilon_(for_delta|over_time)/\d+/1"
    )
    return {
        show(pointer): {show(leaf, "unbounded" if epsilon.fullmatch(pointer) else "none")}
        for pointer, leaf in leaves(facts)
    }


def load(facts: Facts) -> Page:
    return Page(report.render(facts))


def test_values_are_formatted_for_reading() -> None:
    numbers = [45_840_617, -3, 2.13456789, 1e-8, 0.0, 65537.0, 1234567.8, 1e20]
    texts = ["45,840,617", "-3", "2.13457", "1e-08", "0", "65,537", "1,234,568", "1e+20"]
    assert [show(number) for number in numbers] == texts
    assert [show(value) for value in (True, False, None, "flat")] == ["yes", "no", "none", "flat"]
    # Text that would turn the line around, or break it off.
    assert show("a\u202eb\r\x00") == "a\\u202eb\\r\\x00"


@each_case
def test_every_leaf_is_on_the_page(make: Make) -> None:
    facts = make()
    found = load(facts)
    assert found.facts == shown(facts)
    assert all(key in found.text for key in facts["versions"] | facts["ran"]["mechanism_settings"])


@settings(max_examples=50, deadline=None)
@given(text=st.text() | st.text("<>&\"'/=! scriptonx-").map(lambda text: HOSTILE + text))
def test_no_text_becomes_markup(text: str) -> None:
    found, harmless = load(hostile_facts(text)), load(hostile_facts(""))
    assert found.tags == harmless.tags
    assert [a[:2] for a in found.attributes] == [a[:2] for a in harmless.attributes]
    assert found.facts == shown(hostile_facts(text))


@each_case
def test_the_page_runs_and_loads_nothing(make: Make) -> None:
    found = load(make())
    assert not {"script", "link", "iframe", "object", "embed", "img", "image"} & set(found.tags)
    for tag, name, value in found.attributes:
        assert not name.startswith("on"), (tag, name)
        assert name not in ("src", "srcset", "style", "action", "xlink:href"), (tag, name)
        assert name != "href" or value.startswith("#"), (tag, value)
    assert not re.search(r"url\(|@import|https?:", found.style)
    assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'") in found.attributes


def test_nothing_on_the_page_is_hidden() -> None:
    found = load(private_facts())
    assert not re.search(r"display: *none|visibility|hidden|opacity|font-size: *0", found.style)
    assert not {"hidden", "aria-hidden"} & {name for _, name, _ in found.attributes}


@each_case
def test_links_lead_to_sections(make: Make) -> None:
    found = load(make())
    ids = [value for _, name, value in found.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    links = {value for _, name, value in found.attributes if name == "href"}
    # Every section but the checklist itself answers something.
    sections = {value for tag, name, value in found.attributes if (tag, name) == ("section", "id")}
    assert links == {f"#{name}" for name in sections - {"checklist"}}
    assert "section 5.3" in found.text


def verdict(facts: Facts) -> tuple[str, str]:
    """The class of the box, and its words."""
    page = report.render(facts)
    ((kind, words),) = re.findall(r'<div class="box (\w+)">\n<p class="verdict">([^<]*)</p>', page)
    assert f"<title>Privacy report: {words}</title>" in page
    return kind, words


def test_the_verdict_is_in_words_and_not_in_colour_alone() -> None:
    assert verdict(private_facts()) == ("private", "PRIVATE")
    assert verdict(tainted_facts()) == ("tainted", "PRIVATE, BUT TAINTED")
    assert verdict(broken_facts()) == ("broken", "NOT PRIVATE")
    facts = private_facts()
    facts["audits"][0]["passed"] = False
    assert verdict(facts) == ("tainted", "PRIVATE BY ACCOUNTING, BUT AN AUDIT FAILED")


@pytest.mark.parametrize(
    "change", [{"epsilon": None}, {"is_private": False}, {"faults": ["Fixed noise key."]}]
)
def test_one_reason_is_enough_not_to_be_private(change: Facts) -> None:
    facts = private_facts()
    assert "not guaranteed" not in report.render(facts)
    facts["guarantee"].update(change)
    assert verdict(facts) == ("broken", "NOT PRIVATE")
    text = load(facts).text
    assert "at most" not in text  # numbers that were computed must not be quoted
    assert "computed but not guaranteed" in text
    assert ": not met" in text


def test_the_target_is_met_by_the_exact_numbers() -> None:
    facts = private_facts()
    for found, word in [((3, 1.5e-8), "met"), ((3, 2e-8), "not met"), ((3.0000001, 0), "not met")]:
        facts["guarantee"] |= dict(zip(("epsilon", "delta"), found))
        assert f"ε 3 at δ 1.5e-08: {word}" in load(facts).text  # 3.0000001 is shown as 3


def test_empty_sections_say_so() -> None:
    text = Page(report.render(broken_facts() | {"audits": []})).text
    for sentence in (
        "None declared or found.", "No audit was run.", "No event was recorded.",
        "No other delta was computed.", "Nothing was listed.", "no step has a bounded epsilon",
    ):  # fmt: skip
        assert sentence in text


def coordinates(svg: str) -> list[tuple[float, float]]:
    (line,) = re.findall(r'class="curve" points="([^"]*)"', svg)
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in line.split())]


def test_the_plot_is_true_to_scale() -> None:
    svg = draw_epsilon_curve([(0, 0.0), (50, 1.0), (100, 3.0)], target=2.0)
    (x0, y0), (x1, y1), (x2, y2) = coordinates(svg)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.02)  # coordinates have two decimals
    assert 3 * (y0 - y1) == pytest.approx(y0 - y2, abs=0.04)
    (target,) = re.findall(r'class="target" x1="[\d.]+" y1="([\d.]+)"', svg)
    assert y0 - float(target) == pytest.approx(2 * (y0 - y1), abs=0.04)


@pytest.mark.parametrize("target", [None, 3.0, 800.0])
@pytest.mark.parametrize(
    "points", [[(1, 0.5)], [(0, 0.0)], [(10, 1e-7), (20, 2e-7)], [(10, 5e6), (10**9, 7e8)]]
)
def test_the_plot_stays_in_its_frame(points: list[tuple[int, float]], target: float | None) -> None:
    svg = draw_epsilon_curve(points, target)
    found = Page(svg)
    assert {"title", "desc"} <= set(found.tags)
    assert ("target ε" in found.text) == (target is not None)
    assert all(0 <= x <= 400 and 0 <= y <= 260 for x, y in coordinates(svg))
    for _, name, value in found.attributes:
        assert name not in ("x1", "x2", "cx", "x") or 0 <= float(value) <= 400
        assert name not in ("y1", "y2", "cy", "y") or 0 <= float(value) <= 260


@pytest.mark.parametrize("curve", [[], [[200, None]], [[100, 0.5], [200, None]]])
def test_a_step_without_a_bound_is_listed_and_not_drawn(curve: list[Any]) -> None:
    facts = private_facts() | {"epsilon_over_time": curve}
    assert load(facts).facts == shown(facts)
    assert load(facts).tags.count("svg") == (len(curve) == 2)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@each_case
def test_what_was_written_is_read_again(make: Make, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=re.escape(str(tmp_path))):
        report.read(tmp_path / "new")
    facts = make() | {"taints": ["Vokabular gezählt: ε"]}
    report.write(facts, tmp_path / "new")
    assert report.read(tmp_path / "new") == facts
    found = contents(tmp_path / "new")
    assert found.keys() == {"privacy_report.json", "privacy_report.html"}
    assert found["privacy_report.html"].decode() == report.render(facts)
    # People read the other one too.
    assert '\n    "Vokabular gezählt: ε"\n' in found["privacy_report.json"].decode()


def test_a_report_that_cannot_be_made_leaves_the_old_one(tmp_path: Path) -> None:
    report.write(private_facts(), tmp_path)
    before = contents(tmp_path)
    nan, half = {"epsilon": float("nan"), "delta": 1e-8}, "\ud800"  # of a surrogate pair
    bad: list[Facts] = [{"cross_check": {}}, {"target": nan}, {"run": half}, {"format": 2}]
    for spoilt in bad:
        with pytest.raises((KeyError, ValueError)):
            report.write(tainted_facts() | spoilt, tmp_path)
        assert contents(tmp_path) == before, spoilt


def test_a_full_disk_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report.write(private_facts(), tmp_path)
    before = contents(tmp_path)
    write_new = files._write_new

    def fill_up(path: Path, data: bytes) -> None:
        write_new(path, data[:100] if "html" in path.name else data)
        if "html" in path.name:
            raise OSError("No space left on device")

    monkeypatch.setattr(files, "_write_new", fill_up)
    with pytest.raises(Refused, match="No space left"):
        report.write(tainted_facts(), tmp_path)
    assert contents(tmp_path) == before


def test_showing_a_report_needs_the_standard_library_only() -> None:
    """Collecting its facts (facts.py) asks the plan and the ledger; showing them asks nobody."""
    ours = tuple(f"lightning_dpsparse.{part}." for part in ("report", "refused", "durable"))
    folders = [Path(report.__file__).parent, Path(files.__file__).parent]
    paths = [p for folder in folders for p in folder.glob("*.py") if p.name != "facts.py"]
    assert len(paths) > 3
    for path in paths:
        for name in imports(path):
            assert not name.startswith("lightning_dpsparse.report.facts")
            assert name.startswith(ours) or name.split(".")[0] in sys.stdlib_module_names, name


@pytest.fixture(scope="module")
def browse(tmp_path_factory: pytest.TempPathFactory) -> Browse:
    """Show a file in headless Chromium: its DOM, and the lines of its console."""
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(names)} is on PATH")
    flags = (
        "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
        "disable-component-update disable-sync enable-logging=stderr dump-dom"
    )
    options = [f"--{flag}" for flag in flags.split()]
    options.append(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")

    def run(path: Path) -> tuple[str, list[str]]:
        command = [program, *options, path.as_uri()]
        done = subprocess.run(command, capture_output=True, timeout=120, check=True)
        log = done.stderr.decode(errors="replace").splitlines()
        return done.stdout.decode(), [line for line in log if "CONSOLE" in line]

    return run


def test_the_browser_tells_of_errors(browse: Browse, tmp_path: Path) -> None:
    """Without this, a silent console would prove nothing."""
    (tmp_path / "bad.html").write_text("<script>nowhere()</script>")
    assert "nowhere is not defined" in "".join(browse(tmp_path / "bad.html")[1])


@each_case
def test_a_browser_shows_the_facts_of_the_json(make: Make, browse: Browse, tmp_path: Path) -> None:
    report.write(make(), tmp_path)
    dom, console = browse(tmp_path / "privacy_report.html")
    assert console == []
    found, sent = Page(dom), load(make())
    assert found.facts == shown(json.loads((tmp_path / "privacy_report.json").read_bytes()))
    assert found.tags == sent.tags
    assert found.text.split() == sent.text.split()

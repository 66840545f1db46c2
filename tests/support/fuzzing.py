"""Random malformed input, and the law that it must obey.

The law: whatever is given ends in success, in a `Refused` or in a usage error, and never in another
exception. Input is a good file with a few things changed, or nothing that anybody would write. A
quick test tries some of each; a slow one goes on for a while and says how many it tried.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from lightning_dpsparse.refused import Refused
from tests.support.bad_input import assert_is_refusal, run_main

SECONDS = float(os.environ.get("FUZZ_SECONDS", "40"))
"""How long each slow fuzzer goes on."""
SEED = int(os.environ.get("FUZZ_SEED", "0"))
"""Where it begins. The same for everybody, unless somebody goes looking for more."""

_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
_AT_A_TIME = 200
_ROOM = 4 << 30


def obeys(call: Callable[[], Any]) -> None:
    """The call succeeds, or is refused in one line."""
    try:
        call()
    except Refused as refusal:
        assert_is_refusal(str(refusal), "")


def command_obeys(argv: list[str]) -> str:
    """The command succeeds, or ends in one line. Returns what it said."""
    code, said = run_main(argv)
    if isinstance(code, str):
        assert_is_refusal(code.removeprefix("error: "), "")
    elif code is not None:
        assert code in (0, 2), (code, said)
        assert code == 0 or "error: " in said
    return said


def fuzz_quickly(law: Callable[[Any], None], inputs: st.SearchStrategy[Any], examples: int) -> None:
    """Try so many inputs, the same in every run: a test that fails, fails for everybody."""
    quick = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=_CHECKS,
    )
    quick(given(inputs)(_named(law)))()


def fuzz_for_a_while(law: Callable[[Any], None], inputs: st.SearchStrategy[Any]) -> int:
    """Try new inputs until the time is over, and return how many there were."""
    end, tried, rounds = time.monotonic() + SECONDS, 0, SEED

    def counted(value: Any) -> None:
        nonlocal tried
        if time.monotonic() < end:
            tried += 1
            law(value)

    long = settings(
        max_examples=_AT_A_TIME,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=_CHECKS,
    )
    with little_memory():
        while time.monotonic() < end:
            rounds += 1
            seed(rounds)(long(given(inputs)(_named(counted))))()
    return tried


@contextmanager
def little_memory() -> Iterator[None]:
    """No input, however few bytes it has, makes its reader take much memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    limits = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + _ROOM, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) << 10
    assert grown < _ROOM // 4, f"{grown >> 20} MB more than before"


def _named(law: Callable[[Any], None]) -> Callable[[Any], None]:
    """A new function, which hypothesis can decorate again and again."""

    def obeys_the_law(value: Any) -> None:
        law(value)

    return obeys_the_law


# ---- what is tried -------------------------------------------------------------------------------

JSON_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 30)
    | st.sampled_from([10**30, 10**400, 2**63, -(2**63)])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["\x1b[31m", "\ud800", "<script>", "a\nb", "", "GaussianDpEvent"])
)
JSON_VALUES = st.recursive(
    JSON_LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)


@st.composite
def changed_bytes(draw: st.DrawFn, whole: bytes, most: int = 5) -> bytes:
    """A file with a few bytes changed, taken out, put in or cut off."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(0, most))):
        at = draw(st.integers(0, max(0, len(content) - 1)))
        kind = draw(st.sampled_from(["flip", "insert", "delete", "cut", "copy"]))
        if kind == "flip" and content:
            content[at] ^= draw(st.integers(1, 255))
        elif kind == "insert":
            content[at:at] = draw(st.binary(max_size=6) | st.sampled_from(_WORDS))
        elif kind == "delete":
            del content[at : at + draw(st.integers(1, 40))]
        elif kind == "cut":
            del content[at:]
        else:
            content[at:at] = content[at : at + draw(st.integers(1, 200))]
    return bytes(content)


_WORDS = [
    b"\t",
    b"\n",
    b"\r\n",
    b",",
    b"::",
    b"nan",
    b"-1",
    b"9" * 40,
    b"\0",
    b'"',
    b"{",
    b"[",
    b": ",
]


@st.composite
def changed_json(draw: st.DrawFn, whole: Any, most: int = 3) -> Any:
    """JSON with a few values replaced, taken out or put in, wherever they are."""
    if draw(st.integers(0, 20)) == 0:
        return draw(JSON_VALUES)
    value = _copy(whole)
    for _ in range(draw(st.integers(1, most))):
        value = _changed(draw, value)
    return value


def _changed(draw: st.DrawFn, value: Any) -> Any:
    keys: list[Any] = []
    if isinstance(value, (dict, list)):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    if not keys or draw(st.integers(0, 5)) == 0:
        return draw(JSON_VALUES)
    key = draw(st.sampled_from(keys))
    kind = draw(st.integers(0, 9))
    if kind == 0:
        del value[key]
    elif kind == 1 and isinstance(value, dict):
        value[draw(st.text(max_size=5))] = draw(JSON_VALUES)
    else:
        value[key] = _changed(draw, value[key])
    return value


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value

"""Readers of files, and parsers of options, under random malformed input.

The slow tests go on for `FUZZ_SECONDS` each (40 by default), ten minutes with `test_fuzz_saved`.
"""

from __future__ import annotations

import bz2
import gzip
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies as st

from lightning_dpsparse import report
from lightning_dpsparse.accounting.calibration import epsilon_of
from lightning_dpsparse.accounting.events import describe_event, event_from_data, event_to_data
from lightning_dpsparse.accounting.ledger import Ledger
from lightning_dpsparse.accounting.privacy_loss import COARSE
from lightning_dpsparse.data.prepare import prepare_criteo
from lightning_dpsparse.data.ratings import read_ratings
from lightning_dpsparse.models.next_item import _public_weights
from lightning_dpsparse.recipe import RecipeCLI
from tests.support.bad_files import (
    HEADER,
    LINE,
    META,
    MOVIES,
    RATING,
    RECIPE,
    as_npy,
    as_npz,
    examples,
    read_frequencies,
    read_prepared,
    small_facts,
    small_ledger,
)
from tests.support.fuzzing import (
    JSON_VALUES,
    changed_bytes,
    changed_json,
    command_obeys,
    fuzz_for_a_while,
    fuzz_quickly,
    obeys,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # of numpy and Lightning, over odd numbers


class Fuzzer(NamedTuple):
    """A law, the inputs that it is tried with, and how many of them in the quick test."""

    law: Callable[[Any], None]
    inputs: st.SearchStrategy[Any]
    quick: int


def in_a_folder(law: Callable[[Path, Any], None]) -> Callable[[Any], None]:
    """The law with a new folder for every input."""

    def tried(value: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            law(Path(folder), value)

    return tried


# ---- data files ----------------------------------------------------------------------------------

LINES = "".join(LINE.replace("3\t0a", f"{i}\t0a").replace("1\t", f"{i % 2}\t", 1) for i in range(9))
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "a.txt": lambda text: text,
    "a.gz": gzip.compress,
    "a.bz2": bz2.compress,
    "a.zst": lambda text: pa.compress(text, codec="zstd", asbytes=True),
    "a.lz4": lambda text: pa.compress(text, codec="lz4", asbytes=True),
}


def criteo_files() -> st.SearchStrategy[tuple[str, bytes]]:
    """Text that was changed, also after it was packed, and bytes that were never a text."""
    changed = st.sampled_from(sorted(PACKED)).flatmap(
        lambda name: st.tuples(
            st.just(name),
            changed_bytes(LINES.encode()).flatmap(
                lambda text: changed_bytes(PACKED[name](text), 2)
            ),
        )
    )
    return changed | st.tuples(st.sampled_from(sorted(PACKED)), st.binary(max_size=300))


def prepare_law(folder: Path, file: tuple[str, bytes]) -> None:
    name, content = file
    (folder / name).write_bytes(content)
    obeys(lambda: prepare_criteo(folder / name, folder / "out", [10] * 26, progress=False))
    if (folder / "out" / "examples.npy").exists():  # what was prepared can be read
        assert len(read_prepared(folder / "out", None, None)) > 0


def movielens_law(folder: Path, files: tuple[bytes, bytes, str, int | None]) -> None:
    ratings, movies, suffix, num_items = files
    (folder / f"ratings{suffix}").write_bytes(ratings)
    (folder / f"movies{suffix}").write_bytes(movies)
    obeys(lambda: read_ratings(folder, num_items))


def movielens_files(suffix: str) -> st.SearchStrategy[Any]:
    ratings, movies = HEADER + RATING * 3 + "7,1,0.5,4\n", MOVIES
    if suffix == ".dat":
        ratings, movies = "1::2::3::100\n2::1::4::7\n", "1::A, the::B\n2::C::D\n"
    return st.tuples(
        changed_bytes(ratings.encode()) | st.binary(max_size=60),
        changed_bytes(movies.encode(), 2) | st.binary(max_size=30),
        st.just(suffix),
        st.none() | st.integers(-1, 5),
    )


def prepared_law(folder: Path, files: tuple[bytes, bytes]) -> None:
    obeys(lambda: read_prepared(folder, *files))


ARRAYS = st.sampled_from(
    [examples(), examples(20, 9, np.int64), examples(dtype=np.float32), examples()[:, :3]]
).flatmap(lambda array: changed_bytes(as_npy(array)))
METAS = changed_json(META).map(json.dumps).map(str.encode) | changed_bytes(
    json.dumps(META).encode()
)


def frequencies_law(folder: Path, content: bytes) -> None:
    obeys(lambda: read_frequencies(folder / "counts.npz", content))


def weights_law(folder: Path, file: tuple[str, bytes]) -> None:
    name, content = file
    (folder / name).write_bytes(content)
    obeys(lambda: _public_weights(str(folder / name), 4))


ONES = np.arange(1.0, 5.0)
COUNTS = changed_bytes(as_npz(t=ONES, u=np.ones(3))) | st.binary(max_size=50)
WEIGHTS = st.tuples(
    st.sampled_from(["w.npy", "w.npz"]),
    changed_bytes(as_npy(ONES)) | changed_bytes(as_npz(item=ONES)) | st.binary(max_size=50),
)

# ---- reports and ledgers -------------------------------------------------------------------------

FACTS, LEDGER = small_facts(), small_ledger().to_data()
REPORTS = changed_json(FACTS).map(json.dumps).map(str.encode) | changed_bytes(
    json.dumps(FACTS).encode()
)


def report_law(folder: Path, content: bytes) -> None:
    (folder / report.JSON_NAME).write_bytes(content)
    said = command_obeys(["report", str(folder)])
    assert all(line.isprintable() for line in said.split("\n"))
    page = folder / report.HTML_NAME
    if page.exists():
        text = page.read_text()
        assert "<script" not in text
        assert all(c.isprintable() or c == "\n" for c in text)


def ledger_law(data: Any) -> None:
    def read() -> None:
        ledger = Ledger.from_data(data)
        assert Ledger.from_data(json.loads(json.dumps(ledger.to_data()))) == ledger
        for entry in ledger.entries:
            describe_event(entry.event)

    obeys(read)


def event_law(data: Any) -> None:
    def read() -> None:
        event = event_from_data(data)
        assert event_from_data(event_to_data(event)) == event
        describe_event(event)

    obeys(read)


@st.composite
def events(draw: st.DrawFn) -> Any:
    """Events of every kind as data, with numbers that may be as odd as numbers get."""
    number = st.floats() | st.floats(0.01, 10) | st.sampled_from([0, 1e18, 1e-18, True, "1", None])
    share = st.floats(0, 1) | number
    whole = st.integers(0, 10**20) | st.integers(1, 50) | number
    kinds: dict[str, dict[str, st.SearchStrategy[Any]]] = {
        "GaussianDpEvent": {"noise_multiplier": number},
        "LaplaceDpEvent": {"noise_multiplier": number},
        "NonPrivateDpEvent": {},
        "NoOpDpEvent": {},
        "ExponentialDpEvent": {"epsilon": number},
        "GumbelDpEvent": {"epsilon": number},
        "MixtureOfGaussiansDpEvent": {
            "standard_deviation": number,
            "sensitivities": st.lists(number, max_size=3),
            "sampling_probs": st.lists(share, max_size=3),
        },
        "TruncatedSubsampledGaussianDpEvent": {
            "dataset_size": whole,
            "sampling_probability": share,
            "truncated_batch_size": whole,
            "noise_multiplier": number,
        },
        "PoissonSampledDpEvent": {"sampling_probability": share, "event": st.deferred(events)},
        "SelfComposedDpEvent": {"event": st.deferred(events), "count": whole},
        "ComposedDpEvent": {"events": st.lists(st.deferred(events), max_size=2)},
    }
    name = draw(st.sampled_from(sorted(kinds)))
    own = name in ("ExponentialDpEvent", "GumbelDpEvent")
    module = "lightning_dpsparse.accounting.events" if own else "dp_accounting.dp_event"
    fields = {key: draw(strategy) for key, strategy in kinds[name].items()}
    return {"module_name": module, "class_name": name, **fields}


def price_law(data: Any) -> None:
    """What can be read has a price, and asking for it takes neither minutes nor all memory."""

    def price() -> None:
        assert epsilon_of([(event_from_data(data), 3)], 1e-6, COARSE) >= 0

    obeys(price)


# ---- recipes and options -------------------------------------------------------------------------


def recipe_law(folder: Path, content: bytes) -> None:
    """A recipe is read and its objects are made. Nothing is trained."""
    (folder / "recipe.yaml").write_bytes(content)
    with mock.patch("lightning_dpsparse.cli._run_recipe", _make_objects):
        command_obeys(["fit", "--config", str(folder / "recipe.yaml")])


def _make_objects(args: list[str]) -> None:
    RecipeCLI(run=False, args=args[1:])


SETTINGS = json.loads(
    json.dumps(
        {
            "trainer": {"devices": 1, "accelerator": "cpu", "max_steps": 1, "logger": False},
            "model": {
                "class_path": "lightning_dpsparse.models.DLRMModule",
                "init_args": {"num_rows": [5, 6], "dense_arch": [16], "over_arch": [8, 1]},
            },
            "data": {
                "class_path": "lightning_dpsparse.data.SyntheticData",
                "init_args": {"num_rows": [5, 6], "examples_per_day": 200, "batch_size": 20},
            },
        }
    )
)
RECIPES = changed_bytes(RECIPE.encode()) | changed_json(SETTINGS).map(json.dumps).map(str.encode)

ODD = st.sampled_from(
    ["nan", "inf", "-1", "0", "1e308", "", "x", "true", "[1]", "{}", "*x", "!!python/x", "9" * 99]
)
TEXTS = ODD | st.text(max_size=12) | st.integers(-2, 10**9).map(str) | st.floats().map(str)
NAMES = st.sampled_from(
    [
        "epsilon",
        "noise-multiplier",
        "examples",
        "batch",
        "steps",
        "delta",
        "mechanism",
        "set",
        "noise-ratio",
        "map-clip-norm",
        "rows",
        "features",
        "sampling",
        "max-batch",
        "examples-per-user",
        "users",
        "epochs",
        "draw",
        "days",
        "json",
    ]
)
SET = st.tuples(
    st.sampled_from(
        ["threshold", "half_survival", "noise_ratio", "table_thresholds", "chunk_rows"]
    ),
    TEXTS,
).map("=".join)


@st.composite
def option_lists(draw: st.DrawFn) -> list[str]:
    command = draw(st.sampled_from(["calibrate", "account"]))
    needed = "--epsilon=3" if command == "calibrate" else "--noise-multiplier=1"
    argv = [command, needed, "--examples=1000", "--batch=10", "--steps=10"]
    mechanism = draw(st.sampled_from(["", "--mechanism=adafest", "--mechanism=lazydp"]))
    argv += [mechanism] if mechanism else []
    for name in draw(st.lists(NAMES, max_size=4)):
        argv.append(f"--{name}={draw(SET | TEXTS if name == 'set' else TEXTS)}")
    return argv + draw(st.lists(st.text(max_size=5), max_size=1))


def options_law(argv: list[str]) -> None:
    """Options are read, a run is made of them, and the answer is printed. The price is made up."""
    with (
        mock.patch("lightning_dpsparse.run_plan.calibrate", return_value=1.0),
        mock.patch("lightning_dpsparse.accounting.ledger.epsilons_of", _made_up),
        mock.patch("lightning_dpsparse.accounting.ledger.rdp_epsilon_of", return_value=1.0),
    ):
        command_obeys(argv)


def _made_up(counts: Any, deltas: list[float]) -> list[float]:
    return [1.0] * len(deltas)


FUZZERS: dict[str, Fuzzer] = {
    "criteo": Fuzzer(in_a_folder(prepare_law), criteo_files(), 250),
    "ratings.csv": Fuzzer(in_a_folder(movielens_law), movielens_files(".csv"), 250),
    "ratings.dat": Fuzzer(in_a_folder(movielens_law), movielens_files(".dat"), 100),
    "prepared": Fuzzer(in_a_folder(prepared_law), st.tuples(ARRAYS, METAS), 250),
    "frequencies": Fuzzer(in_a_folder(frequencies_law), COUNTS, 250),
    "weights": Fuzzer(in_a_folder(weights_law), WEIGHTS, 250),
    "reports": Fuzzer(in_a_folder(report_law), REPORTS, 250),
    "ledgers": Fuzzer(ledger_law, changed_json(LEDGER), 200),
    "events": Fuzzer(event_law, events() | JSON_VALUES, 300),
    "recipes": Fuzzer(in_a_folder(recipe_law), RECIPES, 60),
    "options": Fuzzer(options_law, option_lists(), 250),
}


@pytest.mark.parametrize("name", FUZZERS)
def test_malformed_input_ends_in_success_or_in_one_line(name: str) -> None:
    fuzz_quickly(*FUZZERS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FUZZERS, "prices"])
def test_malformed_input_ends_in_success_or_in_one_line_for_a_while(name: str) -> None:
    fuzzer = FUZZERS.get(name, Fuzzer(price_law, events(), 0))
    print(f"{name}: {fuzz_for_a_while(fuzzer.law, fuzzer.inputs):,} inputs")
